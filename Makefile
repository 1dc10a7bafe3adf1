# What can be done here, one line each; the work is in scripts/. `make` alone prints this list.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast matrix fuzz kill-test bench bench-quick bench-peers lint format native wheel docs clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## .venv with TensorFlow, Horovod (SOK_WITH_HOROVOD=0: without), the native library and sok
	@scripts/setup.sh

demo:  ## set up, then train a click model on two workers with generated data (ARGS="--model deepfm": other flags)
	@scripts/demo.sh $(ARGS)

test:  ## set up, then lint, C++ tests under three sanitizers, all Python tests and doctests
	@scripts/test.sh all

test-fast:  ## the Python tests that start no workers, doctests, and the C++ tests without sanitizers
	@scripts/test.sh fast

matrix:  ## every kind of table x every operation x every rule, on one worker and on two (hours; PART=1/20: minutes)
	@$${PYTHON:-.venv/bin/python} -m tests.matrix --part $(or $(PART),1/1)

fuzz:  ## what reads files, under fuzzers (clang; SECONDS_EACH=600: of each reader, instead of 60)
	@scripts/fuzz.sh $${SECONDS_EACH:-60}

kill-test:  ## saves that are killed at every step and, hundreds of them, at random times (ARGS="--workers 2")
	@$${PYTHON:-.venv/bin/python} -m tests.kills --kills 150 $(ARGS)

bench:  ## sok beside the machine's limit and every installed peer (ARGS="--only w2": other flags); docs/performance.md
	@$${PYTHON:-.venv/bin/python} -m benchmarks $(ARGS)

bench-quick:  ## a few of the cases, within three minutes
	@$${PYTHON:-.venv/bin/python} -m benchmarks --quick $(ARGS)

bench-peers:  ## PyTorch, FBGEMM and TFRA for make bench, in environments of their own under build/ (6 GB)
	@scripts/bench_peers.sh

lint:  ## say what is not formatted or looks wrong
	@scripts/lint.sh

format:  ## format Python and C++
	@scripts/format.sh

native:  ## build sok/_native for the TensorFlow of $PYTHON (default: .venv)
	@scripts/build_native.sh

wheel:  ## sdist and wheel, into dist/
	@scripts/build_wheel.sh

docs:  ## the guides and the reference of all public names as HTML, into build/docs/
	@TF_CPP_MIN_LOG_LEVEL=3 $${PYTHON:-.venv/bin/python} scripts/build_docs.py

clean:  ## remove what was built; .venv stays
	@rm -rf build dist sok/_native *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
