#!/usr/bin/env python3
"""Train a click model on Criteo's log with sharded hashed embeddings, on one worker or on many.

    python examples/criteo/train.py                              one worker, generated data
    horovodrun -np 2 python examples/criteo/train.py             two workers, the same model
    python examples/criteo/train.py --data train.txt --model deepfm

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from criteo import generate, metrics
from criteo.data import ClickLog
from criteo.features import Features
from criteo.formats import FORMATS
from sok.base.progress import Progress


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a click model on Criteo's log with sharded hashed embeddings.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Run on N workers: horovodrun -np N python examples/criteo/train.py ...",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="FILE", help="click log, plain or .gz; without it one is generated")
    data.add_argument("--format", choices=sorted(FORMATS), default="criteo", help="format of --data")
    data.add_argument("--holdout", type=_fraction, default=0.2, help="the last fraction of the file is the test set")
    data.add_argument("--skip-bad-lines", action="store_true", help="leave malformed lines out instead of stopping")
    data.add_argument("--rows", type=_positive, default=400_000, help="rows to generate")
    data.add_argument("--cache", metavar="DIR", default="out/criteo", help="where generated logs are kept")
    data.add_argument("--generate-only", action="store_true", help="generate the log, say where it is, and stop")
    model = parser.add_argument_group("model and training")
    model.add_argument("--min-count", type=_positive, default=2, help="values that come less often share a row")
    model.add_argument("--model", choices=("dlrm", "deepfm", "widedeep"), default="deepfm", help="which model")
    model.add_argument("--embedding-dim", type=_positive, default=8, help="length of an embedding row")
    model.add_argument("--batch-size", type=_positive, help="rows of a batch over all workers together (default: "
                       "a power of two that leaves 100 steps to an epoch, at least 64, at most 1024)")  # fmt: skip
    model.add_argument("--epochs", type=_positive, help="passes over the training part (default: 1; up to 100,000 "
                       "rows 1, 2 or 4, whichever are best on an eighth that is left out)")  # fmt: skip
    model.add_argument("--optimizer", choices=("adam", "lazyadam", "adagrad", "sgd"), default="adam", help="rule")
    model.add_argument("--learning-rate", type=float, default=0.003, help="at first, of all but the linear part; falls")
    model.add_argument("--l2", type=float, default=0.1, help="times half the squares of the rows that a sample uses")
    model.add_argument("--seed", type=_not_negative, default=0, help="of the generated log and of all initial values")
    model.add_argument(
        "--max-vocabulary-size-per-gpu", type=_positive, default=1 << 24, metavar="ROWS",
        help="most rows of a table on one worker (memory is taken as rows appear)",
    )  # fmt: skip
    model.add_argument(
        "--backend", choices=("sok", "stock"), default="sok",
        help="stock: the same model on a plain TensorFlow variable, one process, to compare with",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write the results as one JSON object")
    output.add_argument("--report", metavar="DIR", default="out/criteo/report", help="where to write report.html")
    output.add_argument("--curve-points", type=int, default=12, help="measurements for the learning curve; 0 = none")
    options = parser.parse_args(arguments)
    if options.data and options.generate_only:
        parser.error("--generate-only makes a log, and --data says that there is one: give one of them.")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative. Received: {text}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1. Received: {text}")
    return value


def best_possible(log: ClickLog) -> tuple[float | None, float | None]:
    """Return AUC and log loss of the true click probabilities on the test set, if the log was generated."""
    path = generate.truth_path(log.path)
    if not path.exists():
        return None, None
    truth = np.load(path, mmap_mode="r")
    labels = np.concatenate([batch.labels for batch in log.batches("test", 65536)])
    if truth.size != log.rows or labels.size != log.test_rows:
        return None, None  # the log was edited after it was made
    probabilities = np.asarray(truth[log.train_rows :])
    return metrics.auc(labels, probabilities), metrics.log_loss(labels, probabilities)


def prepare_log(options: argparse.Namespace, rank: int, local_rank: int, barrier) -> ClickLog:
    """Generate the log if none is given, and count its lines."""
    path = options.data
    if path is None:
        path = str(generate.cached_path(options.cache, options.rows, options.seed))
        if local_rank == 0:  # one worker of each machine writes, the others wait
            progress = Progress("generating", enabled=rank == 0)
            generate.cached_log(options.cache, options.rows, options.seed, progress.update)
            progress.close()
        barrier()
    progress = Progress("counting lines", unit="bytes", enabled=rank == 0)
    log = ClickLog(path, FORMATS[options.format], options.holdout, options.skip_bad_lines, progress.update)
    progress.close()
    return log


def train(options: argparse.Namespace) -> dict[str, Any] | None:
    """Run everything; return the results on rank 0 and None elsewhere. Collective."""
    import tensorflow as tf

    import sok

    workers_here = int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
    if workers_here > 1:  # otherwise every worker of a machine starts as many threads as the machine has cores
        threads = max(1, len(os.sched_getaffinity(0)) // workers_here)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    sok.Init(seed=options.seed)
    rank, world_size = sok.rank(), sok.size()
    from criteo.loop import Run, Trainer, choose, gather, sum_over_workers
    from sok.job.context import get_transport

    begin = time.perf_counter()
    log = prepare_log(options, rank, sok.local_rank(), lambda: get_transport().barrier("criteo/generated"))
    if options.batch_size is None:
        options.batch_size = min(max(1 << (log.train_rows // 100).bit_length() - 1, 64), 1024)
    if rank == 0:
        print(
            f"{log.path}: {log.train_rows:,} rows to train on, in batches of {options.batch_size}, {log.test_rows:,} "
            f"to test on; {world_size} worker(s)"
        )
    features = Features(log, options.min_count, rank, world_size)
    progress = Progress("counting values", enabled=rank == 0)
    features.count(sum_over_workers, progress.update)
    progress.close()
    plan = choose(options, features, is_shown=rank == 0)
    trainer = Trainer(options, features, plan)
    run = Run(options, features, plan, trainer, is_shown=rank == 0)
    scores = run.train()
    rows_per_shard = trainer.rows_per_shard()
    skipped = int(gather(np.array([[log.skipped_lines]], np.float64), "criteo/skipped").sum())
    if rank != 0:
        return None
    best_auc, best_logloss = best_possible(log)
    settings = {**vars(options), "data": str(log.path)}
    return {
        **scores,
        "best_auc": best_auc,
        "best_logloss": best_logloss,
        "samples_per_second": run.samples_per_second,
        "steps": run.steps,
        "workers": world_size,
        "rows": sum(rows_per_shard),
        "rows_per_shard": rows_per_shard,
        "train_rows": log.train_rows,
        "test_rows": log.test_rows,
        "skipped_lines": skipped,
        "seconds": time.perf_counter() - begin,
        "settings": settings,
        "history": run.history,
    }


def summary(result: dict[str, Any], files: dict[str, Path]) -> str:
    """Return the last words of a run, for people."""

    def number(key: str) -> str:
        return "-" if result[key] is None else f"{result[key]:.4f}"

    def beside_others(key: str) -> str:
        others = [f"logistic regression: {number('baseline_' + key)}"]
        others += [f"best possible: {number('best_' + key)}"] if result["best_auc"] else []
        return f"{number(key)}   ({'; '.join(others)})"

    speed = f"{result['samples_per_second'] or 0:,.0f}"
    lines = [
        ("AUC", beside_others("auc")),
        ("log loss", beside_others("logloss")),
        ("predicted / clicks", f"{result['calibration']['ratio'] or 0:.3f}"),
        ("passes", "{model}   (logistic regression: {baseline})".format(**result["passes"])),
        ("samples/s", f"{speed}   on {result['workers']} worker(s), {result['steps']} steps"),
        ("rows per shard", "  ".join(f"{n:,}" for n in result["rows_per_shard"])),
        *((what, str(path)) for what, path in files.items()),
    ]
    if result["skipped_lines"]:
        lines.insert(6, ("bad lines skipped", f"{result['skipped_lines']:,}"))
    width = max(len(label) for label, _ in lines)
    return "\n".join(["", *(f"  {label.ljust(width)}  {text}" for label, text in lines), ""])


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.generate_only:
        progress = Progress("generating")
        path = generate.cached_log(options.cache, options.rows, options.seed, progress.update)
        progress.close()
        print(f"{path}\n{generate.truth_path(path)}")
        return 0
    import tensorflow as tf

    try:
        result = train(options)
    except (ValueError, OSError) as error:
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        return 1
    except tf.errors.ResourceExhaustedError as error:
        print(f"train.py: error: {error.message}\nGive --max-vocabulary-size-per-gpu a higher value.", file=sys.stderr)
        return 1
    except tf.errors.OpError as error:
        if "Horovod has been shut down" not in str(error):
            raise
        print("train.py: error: another worker stopped; its own message says why.", file=sys.stderr)
        return 1
    if result is None:
        return 0
    from criteo.report import write_report

    files = {"data": Path(result["settings"]["data"]), "report": Path(options.report) / "report.html"}
    write_report(files["report"], result, result["history"])
    if options.json:
        files["json"] = Path(options.json)
        files["json"].parent.mkdir(parents=True, exist_ok=True)
        files["json"].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(summary(result, files), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
