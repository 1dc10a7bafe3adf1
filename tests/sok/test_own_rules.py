"""Rules written in Python and compiled by Numba. The judge is the function itself, called by NumPy on each row."""

import ast
import inspect
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import arithmetic, compiled
from sok.table import rules
from tests.messages import saying
from tests.sok import own_rules
from tests.sok.optimizer_cases import gradient, initial_rows, random_steps, stepper, table_of

ROWS = 12


class Rows:
    """Rows and what a rule keeps of each, changed by the function of Python."""

    def __init__(self, optimizer, values):
        self.optimizer, self.declared = optimizer, optimizer._declared
        self.rows = values.copy()
        self.kept = {
            name: np.full_like(values, start)
            for name, start in zip(optimizer.slot_names, optimizer.slot_inits, strict=True)
        }
        self.steps = 0

    def step(self, step):
        self.steps += 1
        for key in np.unique(step.keys):
            g = step.dense(len(self.rows))[key]
            if "touches" in self.kept:
                self.kept["touches"][key, 0] += 1
            given = {"step": self.steps, "key": int(key)}
            given |= {name: np.float32(getattr(self.optimizer, name)) for name in self.declared.hyper[1:]}
            given["learning_rate"] = np.float32(self.optimizer.learning_rate)
            for name, values in self.kept.items():
                given[name] = values[key, :1] if name in self.declared.scalars else values[key]
                given[name] = values[key, 0] if name == "touches" else given[name]
            names = self.declared.source.parameters
            arguments = [self.rows[key], g, *(given[name] for name in names[2:])]
            if self.declared.per == "row":
                self.optimizer.function(*arguments)
                continue
            for j in range(len(g)):
                numbers = [a[j] if isinstance(a, np.ndarray) and a.ndim else a for a in arguments]
                new = self.optimizer.function(*numbers)
                targets = [self.rows, *(self.kept[name] for name in self.declared.slots)]
                for target, value in zip(targets, new if isinstance(new, tuple) else (new,), strict=True):
                    target[key, j] = value


@pytest.mark.parametrize("make", own_rules.ALL, ids=lambda make: make.__name__)
def test_a_rule_does_what_its_function_does(make, rng):
    values, optimizer = initial_rows(rng), make()
    table, judge = table_of(values, "of_own_rule"), Rows(optimizer, values)
    step = stepper(optimizer, table)
    for taken in random_steps(rng, 8):
        step(tf.constant(taken.keys), tf.constant(taken.grads))
        judge.step(taken)
    np.testing.assert_allclose(table.sparse_read(np.arange(ROWS)).numpy(), judge.rows, rtol=2e-6, atol=1e-6)
    for name, kept in judge.kept.items():
        np.testing.assert_allclose(optimizer.get_slot(table, name), kept, rtol=2e-6, atol=1e-6)


def test_expressions_on_rows_become_loops_in_float32():
    def of(function, **kinds):
        source = compiled.source_of(function, "Rule")
        kinds = {name: kinds.get(name, arithmetic.ARRAY) for name in source.parameters}
        return ast.unparse(arithmetic.rewritten(source.tree, kinds, function.__globals__))

    def two_statements(w, g, m):
        m[:] = 0.5 * m + g
        w -= np.where(m > 0, 1, -1) * m**2

    def a_reduction(w, g, m):
        u = m + g
        w[:] -= u / np.sum(u * u)

    def one_array_twice(w, g, m):
        u = w
        w[:] = g
        m[:] = u

    assert of(two_statements).splitlines()[1:] == [
        "    for _sok_place in range(len(w)):",
        "        m[_sok_place] = _sok_float32(0.5) * m[_sok_place] + g[_sok_place]",
        "        w[_sok_place] -= (_sok_float32(1) if m[_sok_place] > _sok_float32(0) else _sok_float32(-1)) "
        "* m[_sok_place] ** 2",
    ]
    assert of(a_reduction).splitlines()[1:] == ["    u = m + g", "    w[:] -= u / _sok_float32(np.sum(u * u))"]
    assert of(one_array_twice).splitlines()[1] == "    u = w"


def test_the_loop_of_a_rule_has_vectors():
    numba = pytest.importorskip("numba")
    address, compiled_rule = own_rules.adagrad._declared.compiled(keep=False)
    assert address and re.search(r"v?sqrtps\s", compiled_rule._library.get_asm_str()), numba.__version__


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: sok.optimizers.rule(hyper=["beta"])(own_rules.plain), ValueError, ("`hyper`", "learning_rate")),
        (lambda: sok.optimizers.rule(slots=["m"])(own_rules.plain), ValueError, ("plain", "parameters", "['m']")),
        (lambda: sok.optimizers.rule(slots=["step"])(own_rules.plain), ValueError, ("each once", "'step'")),
        (lambda: sok.optimizers.rule(per="column")(own_rules.plain), ValueError, ("`per`", "'element'", "'column'")),
        (lambda: sok.optimizers.rule(version="1 2")(own_rules.plain), ValueError, ("`version`", "'1 2'")),
        (lambda: sok.optimizers.rule()(lambda w, g: None), TypeError, ("`def`",)),
        (
            lambda: sok.optimizers.rule(per="element")(own_rules.returns_two),
            ValueError,
            ("return `w`", "`return (w, g)`"),
        ),
        (lambda: sok.optimizers.rule()(own_rules.returns_two), ValueError, ("must return nothing", "`return (w, g)`")),
        (lambda: sok.optimizers.rule(slots={"m": "x"})(own_rules.with_m), ValueError, ("'m' must start", "'x'")),
        (
            lambda: sok.optimizers.rule(scalars=["m"], per="element")(own_rules.with_m),
            ValueError,
            ("one element", "per='row'"),
        ),
        (lambda: own_rules.adagrad(epsilon=float("nan")), ValueError, ("`epsilon`", "nan")),
        (lambda: own_rules.signum(0.1), TypeError, ("signum()", "`beta`")),
    ],
)
def test_what_cannot_be_a_rule_is_refused_with_words(make, error, words):
    with pytest.raises(error, match=saying(*words)):
        make()


@pytest.mark.parametrize(("name", "words"), [("no_name", "`undefined`"), ("no_type", "nobody")])
def test_a_rule_that_does_not_compile_names_the_line(name, words, rng):
    function = getattr(own_rules, name)
    table, optimizer = table_of(initial_rows(rng), "of_no_rule"), sok.optimizers.rule()(function)(0.1)
    line = function.__code__.co_firstlineno + 2
    message = saying(f"Rule '{name}' cannot be compiled", f"own_rules.py, line {line}:", words, "numba.njit")
    with pytest.raises(ValueError, match=message):
        optimizer.apply_gradients([(gradient(table, [1], np.ones([1, table.dim])), table)])
    assert optimizer.iterations.numpy() == 0


def test_without_numba_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match=saying("Rule 'plain'", "sok[rules]")):
        sok.optimizers.rule()(own_rules.plain)(0.1)._compile()


def test_a_function_without_source_is_refused():
    names = {}
    exec("def nowhere(w, g, learning_rate):\n    w -= g", names)
    with pytest.raises(ValueError, match=saying("'nowhere'", "no source", "file")):
        sok.optimizers.rule()(names["nowhere"])


def test_a_rule_is_kept_on_disk(tmp_path):
    (tmp_path / "mine.py").write_text(inspect.getsource(own_rules))
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    code = """
import mine
print(mine.adagrad._declared.compiled()[1].cache_hits)
"""
    hits = [
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, stdout=subprocess.PIPE).stdout
        for _ in range(2)
    ]
    assert [int(said) for said in hits] == [0, 1]


def test_names_and_config_of_a_rule():
    optimizer = own_rules.adagrad(0.5, name="first", clipnorm=2.0)
    assert (own_rules.adagrad.rule, own_rules.versioned.rule) == ("adagrad(accumulator)", "versioned.3(m)")
    assert rules.find("versioned.3(m)").slot_names == ("m",)
    again = own_rules.adagrad.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config() and again.clipnorm == 2.0
    assert isinstance(optimizer, sok.optimizers.Optimizer) and "epsilon" in repr(optimizer)
    assert own_rules.adagrad.__doc__ == "Adagrad, as Keras has it."
