"""Rules written in Python and compiled by Numba. The judge is the function itself, called by NumPy on each row."""

import ast
import inspect
import os
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import arithmetic, compiled
from sok.checkpoint.manifest import read_manifest
from sok.lookup.lookup import lookup_rows
from sok.saved_model.frozen_table import unseen_row
from sok.table import rules
from sok.table.initializers import InitializerSpec
from tests.messages import saying
from tests.reference import initial_values
from tests.sok import own_rules
from tests.sok.optimizer_cases import gradient, initial_rows, random_steps, stepper, table_of

ROWS = 12


class Rows:
    """Rows and what a rule keeps of each, changed by the function of Python."""

    def __init__(self, optimizer, values):
        self.optimizer, self.declared = optimizer, optimizer._declared
        self.rows = values.copy()
        self.kept = {
            name: np.full([len(values), values.shape[1] if name in self.declared.slots else 1], start, np.float32)
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
                given[name] = values[key, 0] if name == "touches" else values[key]
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


@pytest.mark.parametrize("hashed", [True, False])
def test_a_rule_knows_the_keys_of_rows_old_and_new(hashed):
    optimizer = own_rules.by_key()
    table = sok.EmbeddingVariable(2, 64, hashed=hashed, name="known_keys")
    for keys in ([5, 3], [7, 3], [5, 40]):
        optimizer.apply_gradients([(gradient(table, keys, np.ones([2, 2])), table)])
    table.erase([7])
    optimizer.apply_gradients([(gradient(table, [41], np.ones([1, 2])), table)])
    keys, seen = (tensor.numpy() for tensor in table.slots(optimizer.slot_set)[:2])
    assert sorted(keys) == [3, 5, 40, 41]
    np.testing.assert_array_equal(seen, np.repeat(keys[:, None], 2, 1))


def test_a_rule_that_divides_by_zero_follows_nonfinite_gradients():
    grads = np.array([[1.0, 0.0, 1.0], [1.0, 2.0, 1.0]], np.float32)  # that of key 0 has 0 / 0
    fresh = np.ones([2, 3], np.float32)
    for policy, expected in {
        "allow": [[0.9, np.nan, 0.9], [0.9] * 3],
        "skip": [[1] * 3, [0.9] * 3],
        "raise": fresh,
    }.items():
        table, optimizer = table_of(fresh, f"divided_{policy}"), own_rules.divides(nonfinite_gradients=policy)
        other = table_of(fresh, f"beside_{policy}")

        def step(table=table, optimizer=optimizer, other=other):
            pairs = [(gradient(one, [0, 1], rows), one) for one, rows in ((other, fresh), (table, grads))]
            optimizer.apply_gradients(pairs)

        if policy == "raise":
            message = saying(f"divided_{policy}", "divides(total)", "key 0", "divide by zero", "Nothing was updated")
            for run in (step, tf.function(step)):
                with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                    run()
            np.testing.assert_array_equal(other.sparse_read([0, 1]), fresh)
        else:
            step()
            kept = optimizer.get_slot(table, "total").numpy()
            np.testing.assert_array_equal(kept, grads if policy == "allow" else [[0, 0, 0], [1, 2, 1]])
        np.testing.assert_allclose(table.sparse_read([0, 1]), expected, rtol=1e-6)


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


@pytest.fixture
def trained(tmp_path, rng):
    """A folder with a saved table, which `by_element` has trained."""
    table, optimizer = table_of(initial_rows(rng), "saved_rows"), own_rules.by_element()
    optimizer.apply_gradients([(gradient(table, [1, 2], np.ones([2, 3])), table)])
    sok.save(tmp_path, [table], [optimizer])
    return tmp_path, table, optimizer


@pytest.mark.filterwarnings("ignore:Table")  # it has another seed
def test_a_checkpoint_holds_the_rule_and_its_source(trained, capsys):
    folder, table, optimizer = trained
    (state,) = read_manifest(folder).optimizers
    assert state.rule == "by_element(accumulator)" and state.source == optimizer.source
    assert optimizer.source.startswith("tests.sok.own_rules.by_element ")
    other = sok.EmbeddingVariable(3, 48, name="saved_rows_again")
    again = own_rules.by_element(name="again")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Rule")
        sok.restore(folder, {table.table_name: other}, [again])
    np.testing.assert_array_equal(again.get_slot(other, "accumulator"), optimizer.get_slot(table, "accumulator"))
    assert again.iterations.numpy() == 1


@pytest.mark.filterwarnings("ignore:Table")  # it has another seed
def test_another_source_warns_and_another_layout_is_refused(trained):
    folder, saved, _ = trained
    table = sok.EmbeddingVariable(3, 48, name="saved_rows_too")
    changed = own_rules.changed(name="changed")
    assert changed.rule == own_rules.by_element.rule
    with pytest.warns(UserWarning, match=saying("'by_element(accumulator)'", "own_rules.changed", "`version`")):
        sok.restore(folder, {saved.table_name: table}, [changed])
    for other in (own_rules.adagrad(name="other"), own_rules.versioned(name="third")):
        with pytest.raises(ValueError, match=saying(other.rule, "'by_element(accumulator)'", "slots=False")):
            sok.restore(folder, {saved.table_name: table}, [other])


@pytest.mark.filterwarnings("ignore:Table")  # it has another seed
def test_a_scalar_is_one_number_in_tables_and_files(rng, tmp_path):
    """Where a rule's scalars were slots as long as rows, files have another layout: 'signum(m,count)'."""
    table, optimizer = table_of(initial_rows(rng), "with_scalar"), own_rules.signum(0.1, beta=0.5)
    optimizer.apply_gradients([(gradient(table, [1, 2], np.ones([2, 3])), table)])
    assert optimizer.rule == "signum(m;count)"
    assert optimizer.get_slot(table, "count").numpy().ravel().tolist() == [0, 1, 1, *[0] * 9]
    assert table.slots(optimizer.slot_set)[1].shape[1] == 3 + 1
    sok.save(tmp_path / "now", [table], [optimizer])
    again, restored = own_rules.signum(0.1, beta=0.5), sok.EmbeddingVariable(3, 48, name="with_scalar_again")
    sok.restore(tmp_path / "now", {table.table_name: restored}, [again])
    np.testing.assert_array_equal(again.get_slot(restored, "count"), optimizer.get_slot(table, "count"))
    with pytest.raises(ValueError, match=saying("as long as rows", "signum", "one number a row", "sok.save")):
        sok.dump(str(tmp_path), sok.DynamicVariable(3, name="dumped_with_scalar"), optimizer)

    class Before(sok.optimizers.Optimizer):
        rule = "signum(m,count)"

    before, old = Before(0.1, hyper={}), sok.EmbeddingVariable(3, 48, name="with_vectors")
    old.restore_rows([1], np.ones([1, 3]), np.ones([1, 6]), slot_set=before.slot_set, rule=before.rule)
    sok.save(tmp_path / "before", [old], [before])
    with pytest.raises(ValueError, match=saying("'signum(m;count)'", "'signum(m,count)'", "slots=False")):
        sok.restore(tmp_path / "before", {old.table_name: restored}, [own_rules.signum(0.1, beta=0.5)])


def test_slots_of_a_rule_that_is_not_known_are_refused_at_loading(trained):
    folder, table, _ = trained
    code = f"""
import sok
table = sok.EmbeddingVariable(3, 48, name="{table.table_name}")
sok.restore({str(folder)!r}, [table], slots=False)
assert table.sparse_read([1]).numpy().any()
try:
    sok.restore({str(folder)!r}, [table])
except ValueError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    for part in ("'by_element(accumulator)'", "tests.sok.own_rules.by_element did", "Import", "slots=False"):
        assert part in said


def test_a_rule_works_with_what_is_around_optimizers(rng):
    stock = keras.optimizers.SGD(0.5)
    optimizer = sok.DistributedOptimizer(stock, embedding_optimizer=own_rules.adagrad(0.1))
    table, dense = table_of(initial_rows(rng), "beside_dense"), tf.Variable([1.0])
    before = table.sparse_read([1]).numpy()
    optimizer.apply_gradients([(gradient(table, [1], np.ones([1, 3])), table), (tf.constant([1.0]), dense)])
    np.testing.assert_allclose(table.sparse_read([1]), before - 0.1 / np.sqrt(1.1), rtol=1e-5)
    assert float(dense[0]) == 0.5
    own = own_rules.signum(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5), beta=0.0)
    for rate in (0.5, 0.25):
        before = table.sparse_read([2]).numpy()
        own.apply_gradients([(gradient(table, [2], np.ones([1, 3])), table)])
        np.testing.assert_allclose(before - table.sparse_read([2]).numpy(), np.full([1, 3], rate), rtol=1e-5)


# Initializers.


@sok.initializer
def spread(key, column, random):
    return (random - 0.5) / (1 + column) if key % 2 else key * 0.5


@pytest.mark.parametrize("dtype", ["int64", "uint32"])
def test_an_initializer_gives_what_its_function_gives(dtype):
    keys = np.array([0, 1, 2, 7, 2**31 + 1], dtype)
    dim = 6
    table = sok.EmbeddingVariable(dim, 64, key_dtype=dtype, initializer=spread, name="spread")
    random = initial_values.initial_rows(initial_values.Initializer("uniform", 0.0, 1.0), table.seed, keys, dim)
    expected = [[spread.function(int(k), j, random[i, j]) for j in range(dim)] for i, k in enumerate(keys)]
    np.testing.assert_array_equal(table.sparse_read(keys), np.array(expected, np.float32))
    np.testing.assert_array_equal(lookup_rows(table, tf.constant(keys)), np.array(expected, np.float32))
    assert table.options.from_config(table.options.get_config()).initializer.kind == "own:spread"


def test_initializers_that_cannot_be_are_refused_with_words(tmp_path):
    with pytest.raises(ValueError, match=saying("Initializer 'plain'", "key, column, random", "'w'")):
        sok.initializer(own_rules.plain)
    with pytest.raises(ValueError, match=saying("Initializer 'endless'", "finite", "inf", "key 0", "column 0")):
        sok.EmbeddingVariable(2, 4, initializer=sok.initializer(own_rules.endless))
    with pytest.raises(ValueError, match=saying("Initializer 'unfinished'", "own_rules.py, line", "`undefined`")):
        sok.EmbeddingVariable(2, 4, initializer=sok.initializer(own_rules.unfinished))
    with pytest.raises(TypeError, match=saying("'spread'", "keys", ".function")):
        spread([2, 2], tf.float32)
    absent = InitializerSpec("own:absent")
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying("'own:absent'", "sok.initializer")):
        sok.EmbeddingVariable(2, 4, initializer=absent)


def test_an_export_asks_what_unseen_keys_read_as(tmp_path):
    table = sok.EmbeddingVariable(2, 16, initializer=spread, name="exported_spread")
    with pytest.raises(ValueError, match=saying("'exported_spread'", "'spread'", "default='zeros'")):
        unseen_row(table, "initial")
    np.testing.assert_array_equal(unseen_row(table, "zeros"), [0, 0])
