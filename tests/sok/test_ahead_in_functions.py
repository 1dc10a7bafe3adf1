"""The loop over `sok.ahead` inside a `tf.function`: to the bit the synchronous loop; its errors; how it may be left."""

import contextlib
import gc
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.lookup.lookup import lookup_rows
from tests.sok.ahead_cases import Batches, compare_in_a_function


@pytest.mark.parametrize(
    ("optimizer", "depth", "schedule"),
    [("adam", 1, {}), ("adagrad", 2, {"rows": True}), ("lazy", 3, {})],
)
def test_it_is_the_synchronous_loop_to_the_bit(tmp_path, optimizer, depth, schedule):
    compare_in_a_function(optimizer, depth, 5, tmp_path, seed=depth, **schedule)


class Told:
    """An iterable of batches, each of one id, that says what happened when."""

    def __init__(self, number):
        self.number, self.log, self.readings = number, [], []

    def __iter__(self):
        reading = self._read()
        self.readings.append(weakref.ref(reading))
        return reading

    def _read(self):
        for i in range(self.number):
            self.log.append(("read", i))
            yield tf.constant([i], tf.int64)

    def step(self, ids, *found):
        def note(ids, *_):
            time.sleep(0.02)  # nothing goes on meanwhile but what has been asked for
            self.log.append(("step", int(ids[0])))
            return np.int64(0)

        tf.numpy_function(note, [ids, *found], tf.int64)

    @property
    def steps(self):
        return [i for what, i in self.log if what == "step"]


@pytest.fixture
def one(request):
    table = sok.EmbeddingVariable(2, 50, name=f"looped_{request.node.name}", initializer="ones", hashed=False)
    return table, lambda ids: lookup_rows(table, ids)


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_begin_up_to_depth_steps_ahead_and_the_body_is_traced_once(one, depth):
    table, look_up = one
    told, traces = Told(8), []
    pipeline = sok.ahead(told, look_up, depth=depth)

    @tf.function
    def epoch():
        for ids, ticket in pipeline:
            traces.append(1)
            with ticket:
                look_up(ids)
            told.step(ids)

    for _ in range(2):
        told.log.clear()
        epoch()
        assert told.steps == list(range(8))
        for i in range(8):
            before = told.log[: told.log.index(("step", i))]
            assert ("read", i) in before and ("read", i + depth + 1) not in before
    assert len(traces) == 1 and int(table.size()) == 8 and int(table.ids_seen) == 16


def test_it_is_left_by_break_and_return_and_goes_on_by_continue(one):
    table, look_up = one
    told = Told(9)
    pipeline = sok.ahead(told, look_up, depth=2)

    @tf.function
    def leave(most):
        seen = 0
        for ids, ticket in pipeline:
            if ids[0] >= most:
                break
            with ticket:
                rows = look_up(ids)
            told.step(ids)
            if ids[0] % 2 == 0:
                continue
            seen += tf.cast(rows[0, 0], tf.int32)
        return seen

    @tf.function
    def first():
        for ids, ticket in pipeline:
            with ticket:
                return look_up(ids)
        return tf.zeros([1, 2])

    for most, seen in (3, 1), (0, 0), (99, 4), (5, 2):
        told.log.clear()
        assert int(leave(tf.constant(most, tf.int64))) == seen and told.steps == list(range(min(most, 9)))
        time.sleep(0.05)
        assert ("read", most + 3) not in told.log  # what has begun is dropped, and no more begins
    assert int(table.size()) == 9 and first().numpy().tolist() == [[1, 1]]
    for _ in range(100):  # until the thread has begun the last
        gc.collect()
        if not any(reading() for reading in told.readings):
            break
        time.sleep(0.01)
    assert not any(reading() for reading in told.readings)
    assert len(list(pipeline)) == 9  # in Python, as ever


def test_loops_in_loops_and_after_one_another(one):
    _, look_up = one
    told, other = Told(2), Told(3)
    pipeline, pipeline_of_other = sok.ahead(told, look_up), sok.ahead(other, look_up, depth=2)

    @tf.function
    def train():
        total = 0.0
        for _ in tf.range(2):
            for ids, ticket in pipeline:
                with ticket:
                    total += tf.reduce_sum(look_up(ids))
                for others, ticket_of_other in pipeline_of_other:
                    with ticket_of_other:
                        total += 100 * tf.reduce_sum(look_up(others))
        for ids, ticket in pipeline:
            with ticket:
                total += 10000 * tf.reduce_sum(look_up(ids))
        return total

    assert float(train()) == 2 * (2 * 2 + 2 * 3 * 200) + 2 * 20000


def test_ids_that_are_wrong_raise_in_their_own_step_and_the_next_run_begins_anew(one):
    table, look_up = one
    told = Told(60)
    pipeline, most = sok.ahead(told, look_up, depth=3), tf.Variable(99, dtype=tf.int64)

    @tf.function
    def epoch():
        for ids, ticket in pipeline:
            if ids[0] == most:
                break
            with ticket:
                rows = look_up(ids)
            told.step(ids, rows)

    with pytest.raises(tf.errors.InvalidArgumentError, match=f"50.*{table.table_name}|{table.table_name}.*50"):
        epoch()
    assert told.steps == list(range(50)) and int(table.size()) == 50
    most.assign(4)
    told.log.clear()
    epoch()
    assert told.steps == [0, 1, 2, 3]


def test_what_the_data_raise_is_raised_at_the_turn_of_the_batch(one):
    _, look_up = one
    seen, told = tf.Variable(0), Told(0)

    def batches():
        yield tf.constant([1], tf.int64)
        yield tf.constant([2], tf.int64)
        raise KeyError("no third")

    told._read = batches
    pipeline = sok.ahead(told, look_up, depth=4)

    @tf.function
    def epoch():
        for ids, ticket in pipeline:
            with ticket:
                look_up(ids)
            seen.assign_add(1)

    for i in 1, 2:
        with pytest.raises(tf.errors.InvalidArgumentError, match="KeyError: .*no third"):
            epoch()
        assert int(seen) == 2 * i


def test_its_tickets_are_arguments_of_functions_and_say_by_tensors_what_they_are(one):
    _, look_up = one
    traces = []

    @tf.function
    def step(ids, ticket):
        traces.append(1)
        with ticket:
            return tf.reduce_sum(look_up(ids)) * ticket.weight

    data = tf.data.Dataset.range(12).batch(2, drop_remainder=True)
    pipeline = sok.ahead(data, look_up)

    @tf.function
    def epoch():
        total = 0.0
        for ids, ticket in pipeline:
            assert ids.shape == [2]  # with one worker all batches are like the first
            if ticket.has_batch:
                total += step(ids, ticket)
        return total

    assert [float(epoch()) for _ in range(2)] == [24.0, 24.0] and len(traces) == 1
    for _, ticket in pipeline:
        assert ticket.has_batch is True


def test_batches_of_every_form(one):
    _, look_up = one
    ids = tf.ragged.constant([[1, 2], [3]], tf.int64)
    batch = {"ragged": ids, "sparse": (ids.to_sparse(), tf.constant(["a", "b"])), "number": tf.constant(5)}
    pipeline = sok.ahead(tf.data.Dataset.from_tensors(batch).repeat(3), lambda one: look_up(one["ragged"].values))

    @tf.function
    def epoch():
        found = ""
        for one, ticket in pipeline:
            sparse, text = one["sparse"]
            with ticket:
                rows = look_up(one["ragged"].values)
            assert rows.shape == [None, 2] and one["number"].shape == []
            numbers = [tf.size(rows), tf.size(tf.sparse.to_dense(sparse)), one["number"]]
            found += tf.strings.reduce_join(text) + tf.strings.reduce_join(tf.as_string(numbers))
        return found

    assert epoch().numpy() == b"ab645" * 3


@pytest.fixture
def graphs_as_they_are():
    """TensorFlow's optimizer computes layers of Keras in another order in functions than in their loops."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


def test_a_model_whose_lookups_are_one_is_trained_as_without(caplog, graphs_as_they_are):
    results = []
    ids = np.arange(24, dtype=np.int64).reshape(4, 2, 3, 1) % 7
    data = tf.data.Dataset.from_tensor_slices(ids).map(lambda x: tuple(tf.unstack(x, num=2)))
    for use in (False, True):
        tf.keras.utils.set_random_seed(1)
        inputs = [tf.keras.Input([1], dtype="int64", name=f"in{i}") for i in range(2)]
        rows = [tf.keras.layers.Embedding(500, 4, name=f"looped_{use}_{i}")(x) for i, x in enumerate(inputs)]
        flat = tf.keras.layers.Flatten()(tf.keras.layers.Concatenate()(rows))
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(flat))
        model = sok.distributed_model(model, table=sok.TableOptions(seed=1))
        optimizer = sok.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
        optimizer.build(model.trainable_variables)

        def look_up(batch, model=model):
            return model(list(batch), training=True)

        def step(batch, ticket, model=model, optimizer=optimizer, look_up=look_up):
            with tf.GradientTape() as tape, ticket:
                loss = tf.reduce_sum(tf.square(look_up(batch) - 1))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        pipeline = sok.ahead(data, look_up, depth=2)

        @tf.function
        def epoch(pipeline=pipeline, step=step):
            for batch, ticket in pipeline:
                step(batch, ticket)

        def without(step=tf.function(step)):  # noqa: B008
            for batch in data:
                step(batch, contextlib.nullcontext())

        for _ in range(2):
            epoch() if use else without()
        results.append([weight.tobytes() for weight in model.get_weights()])
    assert results[0] == results[1] and "in vain" not in caplog.text


def test_a_run_that_is_begun_within_another_ends_that(one):
    _, look_up = one
    pipeline, is_inside = sok.ahead(Batches([np.int64([i]) for i in range(4)]), look_up), []

    def again():
        if not is_inside:
            is_inside.append(1)
            epoch()
        return np.int64(0)

    @tf.function
    def epoch():
        for _ in pipeline:
            tf.numpy_function(again, [], tf.int64)

    with pytest.raises(tf.errors.UnknownError, match="was begun anew before it had ended"):
        epoch()


def test_other_ways_to_iterate_in_a_graph_are_refused(one):
    _, look_up = one
    pipeline = sok.ahead(Batches([np.int64([1])]), look_up)

    def loop():
        for _ in pipeline:
            pass

    def numbered():
        for _ in enumerate(pipeline):
            pass

    words = "iterated over by `for batch, ticket in"
    for refused in (
        tf.function(lambda: next(iter(pipeline))),
        tf.function(numbered),
        tf.function(loop, autograph=False),
    ):
        with pytest.raises(RuntimeError, match=words):
            refused()
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match=words):
        loop()
    empty = sok.ahead([], look_up)

    @tf.function
    def of_nothing():
        for _ in empty:
            pass

    with pytest.raises(ValueError, match="has no batch, so nobody knows for what to trace"):
        of_nothing()


def test_where_functions_run_eagerly_it_is_the_loop_in_python(one):
    _, look_up = one
    pipeline, seen = sok.ahead(Batches([np.int64([i]) for i in range(4)]), look_up), []

    @tf.function
    def epoch():
        for ids, ticket in pipeline:
            with ticket:
                look_up(ids)
            seen.append(ticket.has_batch)

    tf.config.run_functions_eagerly(True)
    try:
        epoch()
    finally:
        tf.config.run_functions_eagerly(False)
    assert seen == [True] * 4


def test_runs_that_end_well_make_no_queue_anew(one, monkeypatch):
    """TensorFlow keeps the names and kernels of each: 72 KB a run."""
    table, look_up = one
    pipeline, made = sok.ahead(tf.data.Dataset.range(6).batch(1), look_up), []
    queue = tf.queue.FIFOQueue

    def counted(*arguments, **options):
        made.append(arguments)
        return queue(*arguments, **options)

    monkeypatch.setattr(tf.queue, "FIFOQueue", counted)

    @tf.function
    def epoch(most):
        steps = 0
        for ids, ticket in pipeline:
            with ticket:
                tf.debugging.assert_less(tf.reduce_max(look_up(ids)), 2.0)
            steps += 1
            tf.debugging.assert_less(steps, most + 1)
            if steps == 3:
                break
        return steps

    assert [int(epoch(9)) for _ in range(4)] == [3] * 4 and len(made) == 2
    with pytest.raises(tf.errors.InvalidArgumentError):
        epoch(1)
    assert int(epoch(9)) == 3 and len(made) == 4
