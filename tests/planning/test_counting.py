"""What is counted of lookups, and sampled of batches, against what was looked up."""

import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import sok
from sok.planning.counting import sampled
from sok.planning.distinct import draw, expected_distinct, skew_of
from sok.planning.tables import Table
from sok.tools import cli
from tests.messages import saying


@given(st.integers(2, 100_000), st.floats(0, 3), st.integers(10, 100_000))
def test_a_skew_is_found_again(rows, skew, ids):
    distinct = expected_distinct(ids, rows, skew)
    assert expected_distinct(ids, rows, skew_of(ids, distinct, rows)) == pytest.approx(distinct, rel=1e-2)


def test_what_no_law_gives_has_the_nearest():
    assert skew_of(100, 100, 100) == 0 and skew_of(0, 0, 10) == 0
    assert skew_of(1000, 1, 1000) > 4


def identity_table(name, rows=1000):
    return sok.EmbeddingVariable(4, rows, name=name, options=sok.TableOptions(hashed=False))


def model_of(counts):
    return {table.name: table for table in counts.as_model().tables}


@pytest.mark.parametrize("is_function", [False, True], ids=["eager", "function"])
def test_lookups_of_steps_are_counted(is_function, rng):
    pooled, plain = identity_table("counted_pooled", 5000), sok.EmbeddingVariable(8, 600, name="counted_plain")
    never, optimizer = identity_table("counted_never"), sok.optimizers.SGD(0.1)
    other = sok.EmbeddingVariable(8, 600, name="counted_plain_again")

    def step(a, b, c):
        with tf.GradientTape() as tape:
            both = sok.group_embedding_lookup_sparse([pooled, pooled], [a, b], "sum")
            rows = sok.all2all_dense_embedding(plain, c)
            # A call of its own in the same step.
            more = sok.all2all_dense_embedding(plain, c[:, :1]) + sok.all2all_dense_embedding(other, c[:, :1])
            loss = tf.add_n([tf.reduce_sum(one) for one in (*both, rows, more)])
        tables = [pooled, plain, other]
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    def ragged(per_sample):
        return tf.RaggedTensor.from_row_lengths(draw(rng, 5000, 1.3, 64 * per_sample), [per_sample] * 64)

    step = tf.function(step, reduce_retracing=True) if is_function else step
    batches = [(ragged(3), ragged(5), tf.constant(rng.integers(0, 500, [64, 7]))) for _ in range(6)]
    with sok.count_lookups() as counts:
        for batch in batches[:5]:
            step(*batch)
    before = model_of(counts)
    step(*batches[5])  # nobody counts any more
    found = model_of(counts)
    assert {name: one.hotness for name, one in found.items()} == {name: one.hotness for name, one in before.items()}
    assert never.table_name not in found and never.num_keys == 1000
    table = found[pooled.table_name]
    assert (table.rows, table.dim, table.hotness, table.pooled, table.hashed) == (5000, 4, (4.0, 4.0), True, False)
    seen = np.mean([np.unique(np.concatenate([a.flat_values, b.flat_values])).size for a, b, _ in batches[:5]])
    assert table.distinct_keys(64, 64) == pytest.approx(seen, rel=0.01)
    table = found[plain.table_name]
    assert (table.rows, table.hotness, table.pooled, table.hashed) == (int(plain.num_rows()), (4.0, 4.0), False, True)
    assert found[other.table_name].hotness == (1.0,)


def test_what_is_traced_before_is_not_counted_and_what_is_traced_inside_no_longer():
    table = identity_table("counted_traced")

    @tf.function
    def before(ids):
        return sok.all2all_dense_embedding(table, ids)

    ids = tf.constant([[1, 2]], tf.int64)
    before(ids)
    inside = tf.function(lambda ids: sok.all2all_dense_embedding(table, ids))
    with sok.count_lookups() as counts:
        before(ids)
        with pytest.raises(ValueError, match="no table was looked up"):
            counts.as_model()
        inside(ids)
    inside(ids)
    (uses,) = [uses for _, _, uses in counts._tables.values()]
    assert (uses.calls, uses.ids) == (1, 2)


def test_ids_that_are_refused_are_not_counted():
    table = identity_table("counted_bad")
    with sok.count_lookups() as counts:
        with pytest.raises(tf.errors.InvalidArgumentError):
            sok.group_embedding_lookup_sparse(
                [table], [tf.SparseTensor([[3, 0], [1, 0]], tf.constant([1, 2], tf.int64), [2, 1])], "sum"
            )
        assert not counts._tables


def test_a_v1_graph_is_refused():
    table = identity_table("counted_v1")
    with sok.count_lookups(), tf.Graph().as_default(), pytest.raises(RuntimeError, match="not in v1 graphs"):
        sok.all2all_dense_embedding(table, tf.constant([[1]], tf.int64))


def test_a_file_of_counts_is_planned(tmp_path, capsys):
    table = identity_table("counted_saved")
    with sok.count_lookups() as counts:
        sok.all2all_dense_embedding(table, tf.constant([[1, 1], [1, 2]], tf.int64))
    counts.save(tmp_path / "counts.json")
    (saved,) = json.loads((tmp_path / "counts.json").read_text())["tables"]
    assert Table(**saved) == counts.as_model().tables[0]
    command = ["plan", str(tmp_path / "counts.json"), "--workers", "4", "--machine", "a100"]
    assert cli.main(command) == 0 and "counted_saved" in capsys.readouterr().out


def test_batches_say_what_tables_are_asked_for(rng):
    tables = [dict(rows=10_000, dim=8, name="user", hotness=[1, 1]), dict(rows=70, dim=8, name="day", skew=0.5)]
    batches = [
        {
            "user": [
                draw(rng, 10_000, 1.2, 2048).reshape(1024, 2),
                tf.RaggedTensor.from_row_lengths(draw(rng, 10_000, 1.2, 4096), [3, 5] * 512),
            ]
        }
        for _ in range(4)
    ]
    found = sampled(tables, batches)
    assert found.tables[0].hotness == (3.0, 3.0) and found.tables[0].skew == pytest.approx(1.2, abs=0.05)
    assert found.tables[1] == Table(**tables[1])
    made = sok.plan(tables, workers=2, batch=1024, machine="a100", batches=batches)
    same = sok.plan(found, workers=2, batch=1024, machine="a100")
    assert made == same and made != sok.plan(tables, workers=2, batch=1024, machine="a100")


def test_a_sparse_batch_has_the_samples_of_its_shape():
    sparse = tf.SparseTensor([[0, 0], [3, 0]], tf.constant([1, 2], tf.int64), [4, 9])
    assert sampled([dict(rows=10, dim=2, name="a")], [{"a": sparse}]).tables[0].hotness == (0.5,)


@pytest.mark.parametrize(
    "batch, words",
    [
        ({"b": [1]}, ("batch 0 names no table", "'b'", "There are: 'a'")),
        ({"a": np.zeros([3])}, ("ids of table 'a' in batch 0 must be integers",)),
        ({"a": np.int64(3)}, ("ids of table 'a' in batch 0 must be integers",)),
    ],
)
def test_batches_that_make_no_sense_are_refused(batch, words):
    with pytest.raises(ValueError, match=saying(*words)):
        sampled([dict(rows=10, dim=2, name="a")], [batch])
