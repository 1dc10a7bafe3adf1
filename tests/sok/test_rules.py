"""Update rules: what Python and native code declare of each, and rules of one's own, registered at run time."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base import _ops
from sok.optimizers.matching import FUSED
from sok.table import rules
from tests.matrix.own_rule import DAMPED, Damped, address
from tests.matrix.rules import RULES as IN_THE_MATRIX
from tests.messages import saying
from tests.sok import own_rules
from tests.sok.optimizer_cases import gradient, initial_rows, table_of
from tests.sok.rule_cases import CASES


def declared(rule):
    """The rule as native code tells of it."""
    return {
        "name": rule.name,
        "slots": list(rule.slot_names),
        "starts": [str(slot.start) for slot in rule.slots],
        "hyper": ["learning_rate", *(hyper.name for hyper in rule.hyper)],
        "num_scalars": sum(slot.scalar for slot in rule.slots),
        "decays": rule.decays,
        "needs_whole_row": rule.needs_whole_row and rule.name in rules.RULES,
    }


def test_python_and_native_code_declare_the_same_rules():
    rules.register(DAMPED, address())
    native = {rule["name"]: rule for rule in _ops.rules()}
    for rule in native.values():
        rule["starts"] = [str(float(start)) if start[0].isdigit() else start for start in rule["starts"]]
    compiled_in = {name: rule for name, rule in native.items() if "(" not in name}
    assert compiled_in == {name: declared(rule) for name, rule in rules.RULES.items()}
    assert native[DAMPED.name] == declared(DAMPED)


def test_each_rule_has_its_class_and_goes_through_the_matrix_or_test_every_rule():
    assert set(FUSED) == set(rules.RULES)
    assert all(set(optimizer.rules or [optimizer.rule]) <= set(rules.RULES) for optimizer in FUSED.values())
    trained_by = {rule.make().rule for name, rule in IN_THE_MATRIX.items() if not name.startswith(("wrapped", "dist"))}
    assert trained_by | set(CASES) == {*rules.RULES, DAMPED.name, own_rules.adagrad.rule}
    assert all(rule.lazy in ("", *rules.RULES) for rule in rules.RULES.values())


def test_graphs_hold_the_name_of_a_rule(rng):
    table, optimizer = table_of(initial_rows(rng), "of_a_graph"), Damped(0.1)

    @tf.function
    def step():
        optimizer.apply_gradients([(gradient(table, [1], np.ones([1, table.dim])), table)])

    step()
    (op,) = [op for op in step.get_concrete_function().graph.get_operations() if op.type == "Sok>GroupApply"]
    assert op.get_attr("rule").decode() == "damped(m,total)"


def test_a_rule_that_nobody_has_registered_says_what_to_do(rng):
    class Absent(sok.optimizers.Optimizer):
        rule = "absent(m)"

    with pytest.raises(ValueError, match=saying("absent(m)", "takes []", "['beta']", "sok.table.rules.register")):
        Absent(0.1, hyper={"beta": 0.5})
    table = table_of(initial_rows(rng), "of_absent")
    before = table.sparse_read([1]).numpy()
    message = saying("'absent(m)' has no function", "sok.table.rules.register")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        Absent(0.1).apply_gradients([(gradient(table, [1], np.ones([1, table.dim])), table)])
    np.testing.assert_array_equal(table.sparse_read([1]), before)


def test_a_name_keeps_its_layout():
    rules.register(DAMPED, address())
    rules.register(DAMPED, address())
    other_start = (rules.Slot("m", start=1.0), DAMPED.slots[1])
    for other in (
        dataclasses.replace(DAMPED, hyper=DAMPED.hyper[::-1]),
        dataclasses.replace(DAMPED, slots=other_start),
        rules.RowRule("damped(m)", slots=DAMPED.slots[:1]),
    ):
        with pytest.raises(ValueError, match=saying(other.name, "this process has 'damped(m,total)'", "another name")):
            rules.register(other, address())
    with pytest.raises(ValueError, match=saying("must list its slots: m,total")):
        rules.register(dataclasses.replace(DAMPED, name="damped"), address())
    assert rules.find(DAMPED.name) == DAMPED


def test_hyperparameters_of_a_rule_are_checked():
    with pytest.raises(ValueError, match=saying("`beta`", "not negative", "-1")):
        Damped(0.1, beta=-1)


def test_rules_are_known_without_tensorflow():
    code = "from sok.table import rules; assert rules.find('x(a,b)').slot_names == ('a', 'b') and len(rules.RULES) > 3"
    subprocess.run([sys.executable, "-c", f"{code}; import sys; assert 'tensorflow' not in sys.modules"], check=True)


def test_the_page_of_optimizers_says_what_the_registry_says():
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    found = {}
    for line in page.splitlines():
        if line.startswith("| `") and line.count(" | ") == 5:
            rule, by, untouched, slots, row_bytes, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            found[rule.strip("`")] = (by, untouched, slots, row_bytes)
    assert list(found) == list(rules.RULES)
    for name, (by, untouched, slots, row_bytes) in found.items():
        rule = rules.RULES[name]
        assert by.strip("`").partition("(")[0] == FUSED[name].__name__
        assert ("lazy=True" in by) == (name.startswith("lazy_") and name != "lazy_adam")
        assert untouched == ("exact" if rule.decays else untouched) and untouched in (
            "exact",
            "lazy",
            "does not change",
        )
        assert slots == (", ".join(rule.slot_names) or "-")
        vectors, numbers = rule.slot_floats(1000) // 1000, rule.slot_floats(1000) % 1000 + rule.decays
        assert row_bytes == (
            " + ".join([f"{4 * vectors} D"] * (vectors > 0) + [f"{4 * numbers}"] * (numbers > 0)) or "0"
        )
