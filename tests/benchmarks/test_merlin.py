"""That benchmarks/merlin.py trains what it says, and scales as it says."""

import json

import numpy as np
import pytest
import tensorflow as tf

import sok
from benchmarks import merlin, synthetic, towers

MODEL = synthetic.Model(
    "tiny",
    (synthetic.Table(40, 3, (1, 4)), synthetic.Table(30, 4, (1,)), synthetic.Table(1, 2, (2,))),
    5,
    (8,),
    1.05,
    4,
)


def test_the_averaged_row_is_that_of_numpy():
    tower, rng = towers.Tower(MODEL), np.random.default_rng(0)
    embeddings = [rng.normal(size=[8, f.width]).astype("float32") for f in MODEL.features()]
    numbers, labels = rng.normal(size=[8, 5]).astype("float32"), rng.integers(0, 2, [8, 1]).astype("float32")
    row = np.concatenate(embeddings, 1)  # 12 of them, 4 at a time
    x = np.concatenate([row.reshape(8, 3, 4).mean(2), numbers], 1)
    (w0, w1), (b0, b1) = tower.variables[:2], tower.variables[2:]
    logits = np.maximum(x @ w0.numpy() + b0.numpy(), 0) @ w1.numpy() + b1.numpy()
    expected = np.mean(np.log1p(np.exp(logits)) - labels * logits)
    assert float(tower.loss(embeddings, numbers, labels)) == pytest.approx(expected, rel=1e-5)


def test_a_step_is_that_of_stock_tensorflow():
    sok.Init(seed=1)
    where = merlin.placements(MODEL, "memory_balanced", 1, 8, "adagrad")
    training = merlin.Training(merlin.Setup(MODEL, 1, where, 8, "adagrad"))
    batches = [synthetic.make_batch(MODEL, 8, number) for number in range(4)]
    tables = [tf.Variable(one) for one in training.embed.get_weights()]
    tower = towers.Tower(MODEL)  # each has the same weights
    stock = tf.keras.optimizers.Adagrad(synthetic.LEARNING_RATES["adagrad"])
    for number in range(6):
        numbers, labels, ids = batches[number % 4]
        with tf.GradientTape() as tape:
            pooled = [
                tf.reduce_sum(tf.gather(tables[f.table], one), 1) for f, one in zip(MODEL.features(), ids, strict=True)
            ]
            loss = tower.loss(pooled, numbers, labels)
        variables = [*tables, *tower.variables]
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
        stock.apply_gradients(zip(gradients, variables, strict=True))
        assert float(training.step(number)) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("strategy", merlin.STRATEGIES)
def test_the_plan_of_each_strategy(strategy):
    model = synthetic.load("tiny").scaled(100)
    where = merlin.placements(model, strategy, 2, 4096, "adagrad", 2_000_000)
    held = merlin.bytes_of_ranks(model, where, "adagrad", 2)
    assert sum(held) >= 2 * model.bytes and len(where) == 55
    kinds = {placement.kind for placement in where}
    if strategy == "row_wise":
        assert kinds == {"row_wise"} and held[0] == held[1]
    elif strategy != "auto":
        assert kinds == {"table_wise", "column_wise"}  # the two of 25M x 16 are cut in two
        assert [i for i, placement in enumerate(where) if placement.kind == "column_wise"] == [2, 3]
    if strategy == "memory_balanced":
        assert max(held) < 1.1 * min(held)


def test_rows_are_divided_until_they_fit_and_the_threshold_with_them():
    asked = []

    def place(model, threshold):
        asked.append(threshold)
        if len(asked) == 1:
            raise merlin.planner.DoesNotFit("1 byte is missing", 1)
        return merlin.placements(model, "row_wise", 1, 8, "adagrad")

    model, factor, where = merlin.scaled(MODEL, None, 100, place, lambda model, where: model.tables[0].rows <= 10)
    assert (factor, asked) == (4, [100, 50, 25])
    assert [t.rows for t in model.tables] == [10, 7, 1] and len(where) == 3
    assert merlin.scaled(MODEL, 3, None, place, lambda *_: False)[:2] == (MODEL.scaled(3), 3)
    with pytest.raises(merlin.planner.DoesNotFit, match="bytes are missing"):
        budget = lambda model, threshold: merlin.placements(model, "auto", 1, 8, "adagrad", threshold, 10)  # noqa: E731
        merlin.scaled(MODEL, None, None, budget, lambda *_: True)


def test_the_command_says_scale_and_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "load", lambda name: MODEL)
    options = ["--batch_size", "8", "--steps", "2", "--device", "CPU", "--hashed", "--strategy", "row_wise"]
    merlin.main([*options, "--memory", "2e-6", "--json", str(tmp_path / "found.json")])
    said, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    factor, held = found["scale"], sum(found["bytes_of_ranks"])
    assert f"scale: rows of every table divided by {factor}\n" in said and "published" not in said
    assert held <= merlin.SHARE * 2e-6 * 2**30 < 2.2 * held and found["rows"] == 40 // factor + 30 // factor + 1
    assert 0 < found["quartiles_ms"][0] <= found["ms"] <= found["quartiles_ms"][1]
    assert found["published"] == [] and found["loss"] > 0


def test_published_figures_are_those_of_the_batch_they_were_published_for():
    whole = merlin.Setup(synthetic.load("tiny"), 1, (), 65536, "adagrad")
    assert {(one["gpus"], one["ms"]) for one in merlin.published(whole)} >= {(1, 24.433), (8, 5.537), (1, 17.6)}
