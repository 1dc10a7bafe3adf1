"""Every rule that is compiled in: against stock Keras or NumPy, restored at another size, read from old files."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok
from sok.checkpoint import read_manifest
from sok.optimizers.matching import matching_optimizer
from sok.table import rules
from sok.table import state as table_state
from tests.messages import saying
from tests.reference.rules import STEPS
from tests.sok.checkpoint_cases import contents
from tests.sok.optimizer_cases import DIM, gradient, initial_rows, random_steps, rows_of, stepper, table_of
from tests.sok.rule_cases import CASES, EXACT, LAZY
from tests.sok.test_optimizers_adam import assert_within
from tests.sok.threads_world import checked, run_world
from tests.sok.wrapper_cases import BUFFERED, ROWS, stock_rows, train_on
from tests.sok.wrapper_cases import STEPS as WRAPPED_STEPS

MANY = 60


def set_rate(optimizers, rate, number):
    """The rate changes, and stands at zero for a while."""
    if number % 40 == 20:
        for optimizer in optimizers:
            optimizer.learning_rate = rate * [0.5, 0.0, 1.5, 1.0][number // 40 % 4]


@pytest.mark.parametrize("name", EXACT)
def test_300_steps_on_skewed_keys_are_those_of_stock_keras_on_a_dense_table(name, rng):
    case, weights = EXACT[name], initial_rows(rng, MANY)
    ours, stock, dense = case.make(case.rate), case.stock(case.rate), keras.Variable(weights)
    assert ours.rule == name and not ours.lazy
    table = table_of(weights, name)
    stock.build([dense])
    run, run_stock = stepper(ours, table), tf.function(lambda grad: stock.apply([grad], [dense]))
    for number, step in enumerate(random_steps(rng, 300, MANY)):
        set_rate([ours, stock], case.rate, number)
        run(step.keys, step.grads)
        run_stock(tf.constant(step.dense(MANY)))
        if number % 60 == 33:  # reading leaves rows as they are, or settles them
            assert_within(rows_of(table, MANY), dense.numpy())
    assert np.abs(dense.numpy() - weights).max() > 0.05
    assert_within(rows_of(table, MANY), dense.numpy())


@pytest.mark.parametrize("name", EXACT)
def test_300_steps_are_those_of_stock_tf_keras(name, rng):
    """Of the same optimizer there, and by the one that matches it."""
    case, weights = EXACT[name], initial_rows(rng, MANY)
    made = case.stock(case.rate)
    shared = {
        k: v for k, v in made.get_config().items() if k not in ("loss_scale_factor", "gradient_accumulation_steps")
    }
    stock, dense = getattr(tf_keras.optimizers, type(made).__name__)(**shared), tf.Variable(weights)
    stock.build([dense])
    ours, table = matching_optimizer(stock), table_of(weights, name)
    assert ours.rule == name
    run = stepper(ours, table)
    run_stock = tf.function(lambda grad: stock.apply_gradients([(grad, dense)]))
    for number, step in enumerate(random_steps(rng, 300, MANY)):
        set_rate([stock], case.rate, number)
        run(step.keys, step.grads)
        run_stock(tf.constant(step.dense(MANY)))
    assert np.abs(dense.numpy() - weights).max() > 0.05
    assert_within(rows_of(table, MANY), dense.numpy())


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_rule_is_the_formula_on_the_rows_of_the_batch(name, rng):
    case, weights = LAZY[name], initial_rows(rng, MANY)
    ours, table = case.make(case.rate), table_of(weights, name)
    assert ours.rule == name and ours.lazy == name.startswith("lazy_")
    run, rate, widths = stepper(ours, table), case.rate, rules.find(ours.rule).slot_widths(DIM)
    expected = (
        weights.astype(np.float64),
        *(np.full([MANY, w], s) for w, s in zip(widths, ours.slot_inits, strict=True)),
    )
    for number, step in enumerate(random_steps(rng, 60, MANY), 1):
        if number == 30:
            rate = ours.learning_rate = case.rate / 2
        run(step.keys, step.grads)
        w, slots = STEPS[name.removeprefix("lazy_")](
            expected[0], expected[1:], step.dense(MANY), {**ours._rule_config(), "learning_rate": rate}, number
        )
        touched = np.isin(np.arange(MANY), step.keys)[:, None]
        expected = tuple(np.where(touched, new, old) for new, old in zip((w, *slots), expected, strict=True))
    np.testing.assert_allclose(rows_of(table, MANY), expected[0], rtol=2e-5, atol=2e-5)
    keys, slots, _ = (part.numpy() for part in table.slots(ours.slot_set))
    np.testing.assert_allclose(slots, np.concatenate(expected[1:], axis=1)[keys], rtol=2e-4, atol=1e-5)


def new_table(name):
    return sok.EmbeddingVariable(DIM, 4 * MANY, name=name, seed=5)


def numbers_of(shards):
    return {key: np.concatenate([np.frombuffer(part, "f4") for part in row]) for s in shards for key, row in s.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_chain_of_saves_is_restored_at_another_size_and_trains_on_alike(name, rng, tmp_path, monkeypatch):
    """The rows that changed are in a delta: the others catch up with what they have missed meanwhile."""
    case, table = CASES[name], new_table(f"{name}_saved")
    table.assign(np.arange(MANY), initial_rows(rng, MANY))
    ours, steps = case.make(case.rate), list(random_steps(rng, 40, MANY))

    def train(by, trained, some):
        run = stepper(by, trained)
        for step in some:
            run(step.keys, step.grads)

    train(ours, table, steps[:12])
    sok.save(tmp_path, [table], [ours])
    train(ours, table, steps[12:30])
    sok.save(tmp_path, [table], [ours], incremental=True)

    def restored(transport):
        part = new_table("restored")
        sok.restore(tmp_path, {table.table_name: part})
        return contents(part)

    expected = numbers_of([contents(table)])
    with monkeypatch.context() as patch:
        found = numbers_of(checked(run_world(2, restored, patch)))
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_allclose(found[key], row, rtol=1e-5, atol=1e-6)
    again, continued = new_table("again"), case.make(case.rate)
    sok.restore(tmp_path, {table.table_name: again}, continued)
    assert int(continued.iterations) == 30
    train(ours, table, steps[30:])
    train(continued, again, steps[30:])
    assert_within(rows_of(again, MANY), rows_of(table, MANY))


def test_slots_of_several_rules_lie_side_by_side(rng):
    """Numbers of a row between vectors: each optimizer finds its own, also where rows come later."""
    values, steps = initial_rows(rng, MANY), list(random_steps(rng, 12, MANY))
    names = ["rowwise_adagrad", "lazy_adam_by_row", "amsgrad", "rowwise_adam"]

    def slots_of(chosen):
        table, optimizers = new_table("side_by_side"), [CASES[name].make(0.0) for name in chosen]
        runs = [stepper(optimizer, table) for optimizer in optimizers]
        for number, step in enumerate(steps):
            table.assign(step.keys, values[step.keys])  # makes new ones
            for run in runs if number > 3 else runs[:1]:
                run(step.keys, step.grads)
        assert len(table_state.slot_sets(table)) == len(chosen)
        return {o.rule: {k: o.get_slot(table, k).numpy() for k in o.slot_names} for o in optimizers}

    together = slots_of(names)
    assert together["rowwise_adagrad"]["accumulator"].shape[1] == together["rowwise_adam"]["v"].shape[1] == 1
    for name in names:
        alone = slots_of([name]) if name == names[0] else slots_of([names[0], name])
        for slot, found in alone[name].items():
            np.testing.assert_allclose(together[name][slot], found, rtol=1e-6, err_msg=f"{name}: {slot}")


def test_group_lasso_makes_rows_zero_as_a_whole(rng):
    table, optimizer = table_of(initial_rows(rng, MANY), "grouped"), CASES["group_ftrl"].make(0.5)
    run = stepper(optimizer, table)
    weak = np.arange(MANY)[:, None] % 2
    run(np.arange(MANY), np.where(weak, 0.01, 10.0) * rng.normal(size=(MANY, DIM)))
    zero = (rows_of(table, MANY) == 0).all(1)
    assert zero.sum() > MANY // 4 and not zero[::2].all()
    assert not np.signbit(rows_of(table, MANY)[zero]).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: sok.optimizers.Adam(bias_correction="row"),
        lambda: sok.optimizers.Adam(lazy=True, amsgrad=True, bias_correction="row"),
        lambda: sok.optimizers.Adamax(bias_correction="row"),
    ],
)
def test_rows_steps_are_counted_by_lazy_rules_alone(make):
    with pytest.raises(ValueError, match=saying("bias_correction='row'", "if it is lazy and not amsgrad")):
        make()
    with pytest.raises(ValueError, match=saying("`bias_correction`", "'step' or 'row'", "'key'")):
        sok.optimizers.Adam(bias_correction="key")
    with pytest.raises(ValueError, match=saying("initial_accumulator_value", "must be above 0")):
        sok.optimizers.RowWiseAdagrad(epsilon=0.0)


@pytest.mark.parametrize("name", BUFFERED)
def test_each_stock_optimizer_has_its_rule(name):
    matched = matching_optimizer(BUFFERED[name]())
    assert matched.rule in rules.RULES
    assert type(matched).from_config({**matched.get_config(), "learning_rate": 0.1}).rule == matched.rule


def test_options_choose_the_rule():
    for name, case in CASES.items():
        made = case.make(0.5)
        again = type(made).from_config(made.get_config())
        assert (again.rule, again._rule_config()) == (name, made._rule_config())
    with pytest.raises(ValueError, match=saying("`lazy`", "True or False", "'yes'")):
        sok.optimizers.RMSprop(lazy="yes")
    with pytest.raises(ValueError, match=saying("`nesterov`", "True or False", "2")):
        sok.optimizers.SGD(0.1, momentum=0.5, nesterov=2)
    with pytest.raises(ValueError, match=saying("`learning_rate_power`", "not positive", "0.5")):
        sok.optimizers.Ftrl(0.1, learning_rate_power=0.5)
    with pytest.raises(ValueError, match=saying("`momentum`", "[0, 1)", "1.0")):
        sok.optimizers.RMSprop(0.1, momentum=1.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sok.optimizers.Ftrl(0.0), ["Ftrl must be above 0"]),
        (lambda: sok.optimizers.AdamW(1.0, weight_decay=1.0), ["weight_decay times the learning rate must be below 1"]),
        (
            lambda: sok.optimizers.SGD(0.1, momentum=0.9999),
            ["momentum of rule 'momentum'", "at most 0.999", "'lazy_momentum'"],
        ),
        (lambda: sok.optimizers.Nadam(0.1, beta_1=0.9999), ["beta_1 of rule 'nadam'", "'lazy_nadam'"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused_at_the_first_step(make, message, rng):
    table = table_of(initial_rows(rng), "refused")
    before = rows_of(table)
    with pytest.raises(tf.errors.InvalidArgumentError, match=saying(*message)):
        make().apply_gradients([(gradient(table, [1], np.ones([1, DIM])), table)])
    np.testing.assert_array_equal(rows_of(table), before)


OLD = Path(__file__).parents[1] / "data" / "slots_of_stock_optimizers"  # two steps of each, by the sok before


@pytest.mark.parametrize("saved", read_manifest(OLD).names)
def test_slots_of_stock_optimizers_that_ran_beside_tables_are_read(saved):
    name = next(case for case in BUFFERED if case.replace(" ", "_") == saved)
    table, optimizer = sok.DynamicVariable(DIM, initializer="0", name=saved), sok.OptimizerWrapper(BUFFERED[name]())
    sok.restore(OLD, {saved: table})
    (found,) = table_state.slot_sets(table)
    if name == "v1.RMSProp centered":  # its slots came in another order
        assert found.rule == "RMSPropOptimizer(rms,mg,momentum)"
        optimizer.embedding_optimizer._slot_set = found.name
        with pytest.raises(tf.errors.InvalidArgumentError, match=saying(found.name, "belongs to another rule")):
            train_on(table, optimizer, [2])
        return
    assert found.rule in rules.RULES
    # One of twelve optimizers: a program that has one alone gives it to sok.restore, which then does this.
    optimizer.embedding_optimizer._slot_set = found.name
    optimizer.embedding_optimizer.iterations.assign(2)
    train_on(table, optimizer, range(2, WRAPPED_STEPS))
    np.testing.assert_allclose(
        table.sparse_read(np.arange(ROWS)), stock_rows(BUFFERED[name]())[-1], rtol=2e-5, atol=1e-6
    )
