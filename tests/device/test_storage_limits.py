"""What tables on a GPU with little room refuse, with which words, and what they count."""

import json

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.table import state as table_state
from sok.table.state import count_step
from tests.matrix.own_rule import Damped
from tests.messages import saying

from .conftest import GPU
from .tier_cases import CPU, DIM, FILL, LITTLE, new_table

ON_GPU = {"gpu_rows", "gpu_cache_rows", "gpu_hits", "gpu_misses", "bytes_on_gpu"}


@pytest.fixture(autouse=True, scope="module")
def job():
    sok.Init(seed=1)


@pytest.fixture(autouse=True)
def on_the_gpu(job):
    with tf.device(GPU):
        yield


def filled(**options):
    table = new_table(GPU, **options)
    table.assign(np.arange(FILL), np.ones([FILL, table.dim], np.float32))
    return table


def look_up(table, keys, training=True):
    return sok.group_embedding_lookup_sparse([table], [tf.constant(keys)[:, None]], training=training)[0]


def gradient_of(table, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(look_up(table, keys))
    return tape.gradient(loss, table)


def train(table, optimizer, keys):
    optimizer.apply_gradients([(gradient_of(table, keys), table)])


def test_the_least_room_is_enough_and_less_is_refused():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="'too_little'.*at least [0-9]+ bytes.*Received: 1000"
    ) as no:
        new_table(GPU, gpu_bytes=1000, name="too_little")
    least = int(str(no.value).split("at least ")[1].split()[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{least} bytes.*Received: {least - 1}.*gpu_bytes"):
        new_table(GPU, gpu_bytes=least - 1)
    table, optimizer = filled(gpu_bytes=least), sok.optimizers.Adam(0.1)
    assert table.stats()["gpu_cache_rows"] == 64
    for first in range(0, 500, 50):
        train(table, optimizer, np.arange(first, first + 50))
    np.testing.assert_array_equal(table.sparse_read(np.arange(500, FILL)), np.ones([FILL - 500, DIM]))
    assert 0.85 < table.sparse_read(np.arange(500)).numpy().max() < 1
    assert table.stats()["bytes_on_gpu"] <= least


def test_a_budget_of_the_table_is_one_of_its_rows_in_use():
    options = {"storage": None, "gpu_memory_bytes": LITTLE, "admission": sok.Admission(after=1)}
    assert new_table(GPU, **options).stats()["gpu_cache_rows"] == new_table(GPU).stats()["gpu_cache_rows"] < FILL
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least [0-9]+ bytes.*gpu_memory_bytes"):
        new_table(GPU, **{**options, "gpu_memory_bytes": 1000})
    with pytest.raises(ValueError, match=saying("`gpu_memory_bytes` or the `gpu_bytes` of `storage`")):
        sok.TableOptions(gpu_memory_bytes=10**6, storage=sok.Storage(gpu_bytes=10**6))


def test_tables_share_room_in_equal_parts():
    halves = new_table(GPU, storage=sok.Storage(gpu_bytes=2 * LITTLE, tables=2))
    assert halves.stats()["gpu_cache_rows"] == new_table(GPU).stats()["gpu_cache_rows"]


@pytest.mark.parametrize("training", [True, False])
def test_more_rows_than_there_is_room_for_are_refused_and_fewer_then_are_not(training):
    table, optimizer = filled(), sok.optimizers.Adagrad(0.1)
    room = table.stats()["gpu_cache_rows"]
    train(table, optimizer, np.arange(300))  # some are there already
    words = f"'{table.table_name}'.*{FILL - 300} rows of a lookup.*it takes {room}.*gpu_bytes"
    for _ in range(2):
        with pytest.raises(tf.errors.ResourceExhaustedError, match=words):
            look_up(table, np.arange(FILL), training)
    np.testing.assert_array_equal(look_up(table, np.arange(300, 300 + room), training), np.ones([room, DIM]))
    if training:
        train(table, optimizer, np.arange(300, 300 + room))
    assert table.stats()["gpu_rows"] <= room and table.stats()["rows"] == FILL


def test_lookups_of_which_no_step_comes_go_on():
    table = filled()
    for first in range(0, FILL, 100):
        rows = look_up(table, np.arange(first, first + 100))
        np.testing.assert_array_equal(rows, np.ones([100, DIM]))
    assert table.stats()["gpu_misses"] == FILL


def test_all_lookups_of_a_step_have_room_or_their_gradients_are_refused():
    table, optimizer = filled(), sok.optimizers.SGD(0.1)
    gradients = [gradient_of(table, np.arange(first, first + 150)) for first in (0, 150, 300)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="left the device since its lookup.*fewer ids in a step"):
        optimizer.apply_gradients([(gradients[0], table)])
    for gradient in gradients[1:]:
        optimizer.apply_gradients([(gradient, table)])
    expected = np.where(np.arange(600) // 150 % 3 == 0, 1.0, 0.9)
    np.testing.assert_allclose(table.sparse_read(np.arange(600))[:, 0], expected, rtol=1e-6)


def test_reads_take_any_number_of_rows():
    table = filled()
    table.assign(np.arange(FILL), np.arange(FILL * DIM, dtype=np.float32).reshape(FILL, DIM))
    keys = np.random.default_rng(0).integers(0, 2 * FILL, [7, 500])
    with tf.device(CPU):
        expected = table.sparse_read(keys)
    np.testing.assert_array_equal(table.sparse_read(keys), expected)
    assert int(table.num_rows()) == FILL


def test_gradients_of_rows_that_have_gone_home_are_refused():
    table, optimizer = filled(name="late"), sok.optimizers.SGD(0.1)
    late = gradient_of(table, np.arange(5))
    train(table, optimizer, np.arange(100, 110))
    optimizer.apply_gradients([(late, table)])  # they are there still
    late = gradient_of(table, np.arange(5))
    train(table, optimizer, np.arange(100, 110))
    table.sparse_read(np.arange(200, FILL))
    step, other = int(table.step), new_table(GPU)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="'late'.*left the device.*step of their.*lookups.*gpu_bytes"
    ):
        optimizer.apply_gradients([(gradient_of(other, np.arange(3)), other), (late, table)])
    assert int(table.step) == step
    read = table.sparse_read(np.arange(100, 110))
    np.testing.assert_allclose(read, np.full([10, DIM], 0.8), rtol=1e-6)
    np.testing.assert_allclose(table.sparse_read(np.arange(5)), np.full([5, DIM], 0.9), rtol=1e-6)
    train(table, optimizer, np.arange(5))


def test_gradients_of_rows_that_were_erased_are_dropped():
    table, optimizer = filled(), sok.optimizers.SGD(0.1)
    gradient = gradient_of(table, np.arange(5))
    table.erase([2])
    optimizer.apply_gradients([(gradient, table)])
    np.testing.assert_allclose(table.sparse_read([0, 1, 3, 4]), np.full([4, DIM], 0.9), rtol=1e-6)
    assert int(table.num_rows()) == FILL - 1


def test_bad_gradients_change_nothing():
    table = filled()
    for how in ("raise", "skip"):
        optimizer = sok.optimizers.Adagrad(0.1, nonfinite_gradients=how)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(table, np.arange(5)) * float("nan"))
        gradient = tape.gradient(loss, table)
        if how == "raise":
            with pytest.raises(tf.errors.InvalidArgumentError, match="holds NaN or infinity"):
                optimizer.apply_gradients([(gradient, table)])
        else:
            optimizer.apply_gradients([(gradient, table)])
        table.sparse_read(np.arange(500, FILL))
        np.testing.assert_array_equal(table.sparse_read(np.arange(5)), np.ones([5, DIM]))


def test_slots_of_a_rule_of_ones_own_stay_at_home(tmp_path):
    with tf.device(CPU):
        table, optimizer = new_table(CPU), Damped(0.1)
        train(table, optimizer, np.arange(40))
    sok.save(tmp_path, [table], [optimizer])
    other = new_table(GPU)
    sok.restore(tmp_path, {table.table_name: other})
    before = [part.numpy() for part in table.slots(optimizer.slot_set)]
    train(other, sok.optimizers.SGD(0.1), np.arange(40))
    for one, expected in zip(other.slots(optimizer.slot_set), before, strict=True):
        np.testing.assert_array_equal(one, expected)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is on a GPU.*'damped.*cannot lie"):
        train(other, Damped(0.1), np.arange(40))


def test_tables_that_lie_elsewhere_do_not_swap(tmp_path):
    for other in (new_table(CPU), new_table(GPU, storage=None)):
        with pytest.raises(tf.errors.OpError):
            table_state.swap(filled(), other.handle)
        with pytest.raises(tf.errors.OpError):
            table_state.swap(other, filled().handle)


def test_what_is_on_the_gpu_is_counted():
    table = filled()
    assert set(table.stats()) == {"rows", "candidates", "made", "refused", "evicted"} | ON_GPU
    table.sparse_read(np.arange(100))
    train(table, sok.optimizers.SGD(0.1), np.tile(np.arange(50, 150), 2))
    stats = table.stats()
    assert [stats[name] for name in ("gpu_rows", "gpu_hits", "gpu_misses")] == [150, 50, 150]
    assert 150 * DIM * 4 < stats["bytes_on_gpu"] < LITTLE
    details = table.stats(details=True)
    assert details["bytes_in_memory"] > stats["bytes_on_gpu"] + FILL * DIM * 4
    table.erase(np.arange(120))
    assert table.stats()["gpu_rows"] == 30
    with tf.device(CPU):
        assert not ON_GPU & set(new_table(CPU, storage=sok.Storage(gpu_bytes=1)).stats())
    assert not ON_GPU & set(new_table(GPU, storage=None).stats())


def test_tables_over_files_count_both(tmp_path):
    table = filled(folder=tmp_path)
    stats = table.stats()
    assert set(stats) > ON_GPU and stats["bytes_in_file"] > 0 and stats["rows_in_memory"] > 0
    assert list(stats)[5:14] == list(sok.table.state._STORAGE)


def test_scalars_tell_of_the_gpu(tmp_path):
    table = filled()
    scalars = sok.callbacks.TableScalars(tmp_path, tables=table)
    table.sparse_read(np.arange(60))
    scalars.write(1)
    table.sparse_read(np.arange(100))
    told = {tag.split("/")[2]: value for tag, value in scalars.write(2).items()}
    assert told["gpu_hit_rate"] == 0.6 and told["bytes_on_gpu"] == table.stats()["bytes_on_gpu"]
    assert not {"hit_rate", "bytes_in_file", "candidates"} & set(told)
    assert "gpu_hit_rate" not in {tag.split("/")[2] for tag in scalars.write(3)}


def test_steps_that_are_counted_without_an_update_make_room():
    table = filled()
    for first in range(0, FILL, 100):
        look_up(table, np.arange(first, first + 100))
        count_step([table])
    assert table.stats()["gpu_misses"] == FILL


def test_options_with_a_gpu_are_values():
    storage = sok.Storage(gpu_bytes=2 * LITTLE, tables=2)
    options = sok.TableOptions(storage=storage, seed=5, admission=sok.Admission(after=2))
    config = json.loads(json.dumps(options.get_config()))
    assert sok.TableOptions.from_config(config) == options != sok.TableOptions(storage=storage)
    layer = sok.DistributedEmbedding("sum", 100, 4, slot_num=1, max_nnz=2, table=options)
    copied = type(layer).from_config(layer.get_config())
    for one in (layer, copied):
        one(tf.constant([[[1, 2]]], tf.int64))
        assert one.embedding_variable.options == options and "GPU" in one.embedding_variable.handle.device
        assert one.embedding_variable.stats()["gpu_cache_rows"] > 0
