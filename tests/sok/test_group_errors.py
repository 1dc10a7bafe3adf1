"""What a group lookup says of bad input: which argument, and which table or variable."""

import numpy as np
import pytest
import tensorflow as tf

import sok


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init()


def ragged(rows, dtype=tf.int64):
    return tf.ragged.constant(rows, dtype=dtype, ragged_rank=1)


def make(kind, name):
    if kind == "table":
        return sok.EmbeddingVariable(2, 10, name=name)
    dtype = tf.float64 if kind == "double" else tf.float32
    return tf.Variable(tf.zeros([10, 2], dtype), name=name)


def look_up(kind, bad, name, weights=None):
    """The second of two features is the bad one; the first one reads a table of the same kind."""
    params = [make(kind, f"fine_{name}"), make(kind, name)]
    return sok.group_embedding_lookup_sparse(
        params, [ragged([[1]]), bad], "sum", sp_weights=None if weights is None else [None, weights]
    )


KINDS = [("table", "table"), ("single", "variable"), ("double", "variable")]
CUBE = tf.SparseTensor(tf.zeros([0, 4], tf.int64), tf.zeros([0], tf.int64), [1, 1, 1, 1])


@pytest.mark.parametrize(("kind", "word"), KINDS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (tf.zeros([2], tf.int64), r"must be a SparseTensor \[batch, n\], .* a dense tensor of shape \(2,\), int64"),
        (CUBE, r"must be a SparseTensor \[batch, n\], .* Received: a SparseTensor of shape \(1, 1, 1, 1\), int64"),
        (tf.zeros([2, 2]), "keys must be int64, .* Received: float32"),
        (np.zeros([2, 2]), ".*integers.*float64"),
        ([[1], [2, 3]], ".*lists of keys .*even"),
        (ragged([[1.0]], tf.float32), "keys must be int64, .* Received: float32"),
    ],
    ids=["vector", "sparse_of_rank_4", "floats", "array_of_floats", "uneven", "ragged_floats"],
)
def test_ids_of_a_wrong_form_are_called_what_they_were_passed_as(kind, word, bad, message):
    name = f"form_{kind}"
    with pytest.raises(ValueError, match=rf"`sp_ids\[1\]` of {word} '{name}\w*'(: | ){message}"):
        look_up(kind, bad, name)


@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_weights_of_a_wrong_form_are_called_what_they_were_passed_as(kind, word):
    name = f"weights_{kind}"
    text = rf"`sp_weights\[1\]` .*form of `sp_ids\[1\]`, for {word} '{name}\w*'\. .*a RaggedTensor .*a dense tensor"
    with pytest.raises(ValueError, match=text):
        look_up(kind, ragged([[1]]), name, tf.ones([1, 1]))


@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_rows_of_no_dense_ids_name_their_argument(kind, word):
    params = [make(kind, "fine_rows"), make(kind, f"rows_{kind}")]
    with pytest.raises(ValueError, match=rf"`ids\[1\]` of {word} 'rows_{kind}\w*': keys must be int64"):
        sok.group_embedding_lookup(params, [[1], tf.constant([1.5])])


FALLING = "`row_splits` must not fall. Received: 2 then 1"
NEGATIVE = "`row_splits` must start with 0"


@pytest.mark.parametrize(("kind", "word"), KINDS)
@pytest.mark.parametrize(
    ("splits", "message"),
    # Two numbers of which the first is below 0 are what a report of bad input looked like once.
    [([0, 2, 1, 2], FALLING), ([-1, 2], NEGATIVE), ([-4, 5], NEGATIVE), ([-10, 0], NEGATIVE), ([0, 3], "end with")],
)
def test_malformed_row_splits_name_the_table_or_variable(call, kind, word, splits, message):
    values = tf.constant([1, 2], tf.int64)
    bad = tf.RaggedTensor.from_row_splits(values, tf.constant(splits, tf.int64), validate=False)
    params = [make(kind, "fine_splits"), make(kind, f"splits_{kind}")]
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{word} 'splits_{kind}\w*'.*: .*{message}"):
        call(lambda: sok.group_embedding_lookup_sparse(params, [ragged([[1]]), bad], "sum"))


@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_what_only_a_run_shows_names_the_table_or_variable(call, kind, word):
    params = [make(kind, "fine_run"), make(kind, f"run_{kind}")]
    outside = tf.SparseTensor(tf.constant([[0, 0], [7, 0]], tf.int64), tf.constant([1, 2], tf.int64), [2, 2])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=rf"{word} 'run_{kind}\w*'.*: the row index of key number 1"
    ):
        call(lambda: sok.group_embedding_lookup_sparse(params, [ragged([[1]]), outside], "sum"))
    weights = [None, ragged([[1.0], [1.0]], tf.float32)]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=rf"{word} 'run_{kind}\w*'.*: there must be one weight for"
    ):
        call(lambda: sok.group_embedding_lookup_sparse(params, [ragged([[1]]), ragged([[1, 2]])], sp_weights=weights))


@pytest.mark.parametrize("function", ["group_embedding_lookup_sparse", "group_embedding_lookup", "column scope"])
def test_what_rows_travel_in_is_said_by_the_table(function):
    table, ids = sok.EmbeddingVariable(2, 10), tf.ragged.constant([[1]], dtype=tf.int64)
    with pytest.raises(ValueError, match=r"said once, by the table.*EmbeddingVariable\(exchange_dtype=.*float16"):
        if function == "group_embedding_lookup_sparse":
            sok.group_embedding_lookup_sparse([table], [ids], "sum", exchange_dtype="float16")
        elif function == "group_embedding_lookup":
            sok.group_embedding_lookup([table], [ids], exchange_dtype="float16")
        else:
            with sok.group_embedding_column_scope(exchange_dtype="float16"):
                pass
