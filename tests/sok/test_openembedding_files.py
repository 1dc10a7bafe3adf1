"""OpenEmbedding's checkpoints as files: what is found in them, and that nothing odd is taken for a table."""

import json
import struct

import numpy as np
import pytest

from sok.compat.formats import columns, openembedding
from sok.compat.formats.columns import ChainedColumn, FileColumn, FormatError
from sok.compat.formats.openembedding_states import STATES, same_slots, slots_from, why_not
from tests.messages import saying
from tests.openembedding_files import HYPER, Saved, adam_states, shard, write

KEYS = np.array([0, 1, 5, 9, 2**62, 7, 2**63 - 1])
ROWS = np.arange(14, dtype=np.float32).reshape(7, 2)


def opened(folder, number=0):
    return openembedding.open_variable(str(folder), openembedding.read_meta(str(folder))[number])


def as_dict(table):
    return dict(
        zip(table.keys.read(0, table.num_rows).tolist(), table.rows.read(0, table.num_rows).tolist(), strict=True)
    )


@pytest.mark.parametrize("shards, nodes, files", [(1, 1, 1), (2, 1, 1), (3, 2, 2), (8, 3, 1), (5, 1, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_all_shards_and_files_are_found(tmp_path, shards, nodes, files, dtype):
    other = Saved(np.arange(4), np.ones([4, 3], np.float32), vocabulary=4, optimizer="adagrad")
    write(
        tmp_path, [other, Saved(KEYS, ROWS.astype(dtype), optimizer="adagrad", states=ROWS + 1)], shards, nodes, files
    )
    found = opened(tmp_path, 1)
    assert (found.optimizer, found.has_state, len(found.shards)) == ("adagrad", True, shards)
    assert found.hyper == HYPER["adagrad"]
    table = found.table("adagrad")
    assert as_dict(table) == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))
    for start in range(table.num_rows):  # pieces that begin and end inside of blocks
        for stop in range(start, table.num_rows + 1):
            np.testing.assert_array_equal(
                table.rows.read(start, stop) + 1, table.slots["accumulator"].read(start, stop)
            )
            assert len(table.keys.read(start, stop)) == stop - start
    first = opened(tmp_path)
    assert not first.has_state and as_dict(first.table()) == {key: [1.0] * 3 for key in range(4)}
    assert [str(one).split(": ")[1] for one in openembedding.read_meta(str(tmp_path))] == [
        "float32 rows of 3, 4 keys",
        f"{dtype} rows of 2, any key",
    ]


def test_a_table_without_rows_is_one(tmp_path):
    write(tmp_path, [Saved(KEYS[:0], ROWS[:0], optimizer="adam", states=np.zeros([0, 6]))])
    table = opened(tmp_path).table("lazy_adam_by_row")
    assert (table.num_rows, table.dim, list(table.slots)) == (0, 2, ["m", "v", "count"])
    assert table.keys.place(0) == "no rows" and table.rows.read(0, 0).shape == (0, 2)


def test_arrays_in_files_are_read_one_behind_the_other(tmp_path):
    (tmp_path / "a").write_bytes(np.arange(12, dtype="<i4").tobytes())
    parts = [
        FileColumn(str(tmp_path / "a"), offset, np.dtype("<i4"), (n, 2)) for offset, n in ((0, 2), (16, 1), (24, 3))
    ]
    column = ChainedColumn(parts, np.dtype("<i4"), 2)
    assert column.shape == (6, 2)
    np.testing.assert_array_equal(column.read(1, 5), np.arange(12).reshape(6, 2)[1:5])
    assert column.place(4).endswith("a, byte 32")


def test_every_state_is_as_long_as_its_optimizer_s():
    found = {name: state.floats(4) for name, state in STATES.items()}
    assert found == {
        **{"default": 0, "sgd": 4, "adagrad": 4, "adam": 10, "adamax": 9, "adadelta": 8, "rmsprop": 8, "ftrl": 8}
    }
    assert all(same_slots(name, rule) is None for name, rule in [("adam", "adam"), ("default", "sgd"), ("x", "sgd")])
    assert same_slots("rmsprop", "lazy_rmsprop_centered") is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_steps_of_a_row_follow_from_its_powers(dtype):
    steps = [0, 1, 7, 800, 3000, 20000]
    states = columns.ArrayColumn("states", adam_states(np.zeros([6, 1]), np.zeros([6, 1]), steps, dtype=dtype))
    found = slots_from("adam", HYPER["adam"], "lazy_adam_by_row", states, 1)["count"].read(0, 6)
    assert found[:4, 0].tolist() == steps[:4]
    # That of beta_1 is below what float32 has after 829 steps, and that of beta_2 was rounded so often.
    np.testing.assert_allclose(found[4:, 0], steps[4:], rtol=1e-3)
    # What is corrected by them: the same as by the powers.
    np.testing.assert_allclose(0.999 ** found[:, 0], states.array[:, 3], rtol=2e-3, atol=1e-6)
    all_gone = columns.ArrayColumn("states", np.zeros([1, 4], dtype))
    count = slots_from("adam", HYPER["adam"], "lazy_adam_by_row", all_gone, 1)["count"].read(0, 1).item()
    assert np.isfinite(count) and 0.999**count < 1e-30
    none = {"beta_1": "0", "beta_2": "0.5"}
    of_none = columns.ArrayColumn("states", adam_states(np.zeros([3, 1]), np.zeros([3, 1]), [0, 1, 5], 0.0, 0.5, dtype))
    assert slots_from("adam", none, "lazy_adam_by_row", of_none, 1)["count"].read(0, 3)[:, 0].tolist() == [0, 1, 5]


@pytest.mark.parametrize("power", [-0.1, 1.5, np.nan, np.inf])
def test_powers_that_are_none_are_refused(tmp_path, power):
    states = adam_states(ROWS, ROWS, [1] * 7)
    states[3, 4] = power
    write(tmp_path, [Saved(KEYS, ROWS, optimizer="adam", states=states)], 1, 1, 1)
    table = opened(tmp_path).table("lazy_adam_by_row")
    with pytest.raises(FormatError, match=saying("model_0_0, byte", "powers of betas")):
        table.slots["count"].read(0, 7)


def test_states_that_mean_something_else_are_named():
    assert why_not("adam", {}, "adam", {}) == "the state of its 'adam' is not that of 'adam' here"
    assert "has momentum" in why_not("sgd", {"momentum": "0.9"}, "sgd", {})
    assert why_not("sgd", {"momentum": "0"}, "sgd", {}) == ""
    assert "gradients" in why_not("sgd", {"momentum": "0.9"}, "lazy_momentum", {"rate_in_velocity": 0.0})


META = {"datatype": "float32", "embedding_dim": 2, "vocabulary_size": 2**63, "storage_name": "0"}


@pytest.mark.parametrize(
    "meta, words",
    [
        ("{", "is no JSON"),
        ("[" * 20000, "is no JSON"),
        ("[]", "must be an object that lists `variables`"),
        ({"version": "0.2"}, "must be an object that lists `variables`"),
        ({"version": "0.3", "variables": []}, "`version` must be '0.2'. It is '0.3'"),
        ({"variables": []}, "`version` must be '0.2'. It is None"),
        ([None], "`datatype` of variable 0 must be float32 or float64. It is None"),
        ([{**META, "datatype": "int8"}], "`datatype` of variable 0 must be float32 or float64. It is 'int8'"),
        ([{**META, "embedding_dim": 0}], "`embedding_dim` of variable 0 must be from 1"),
        ([META, {**META, "embedding_dim": 2.5}], "`embedding_dim` of variable 1 must be from 1"),
        ([{**META, "vocabulary_size": 2**64}], "`vocabulary_size` of variable 0"),
        ([{**META, "vocabulary_size": True}], "`vocabulary_size` of variable 0"),
        ([{**META, "storage_name": ".."}], "`storage_name` of variable 0"),
        ([{**META, "storage_name": "a/b"}], "`storage_name` of variable 0"),
    ],
)
def test_a_model_meta_that_is_none_is_refused(tmp_path, meta, words):
    if isinstance(meta, list):
        meta = {"version": "0.2", "variables": meta}
    (tmp_path / "model_meta").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    with pytest.raises(FormatError, match=saying("model_meta: ", words)):
        openembedding.read_meta(str(tmp_path))


def test_a_model_meta_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(openembedding, "_MAX_META", 10)
    (tmp_path / "model_meta").write_bytes(b" " * 11)
    with pytest.raises(FormatError, match="has 11 bytes, and can have 10"):
        openembedding.read_meta(str(tmp_path))


HEAD = len(shard(0, 0, 1, Saved(KEYS[:0], ROWS[:0], optimizer="adagrad")))
TEXT = len(Saved(KEYS[:0], ROWS[:0], optimizer="adagrad").text())


def changed(data, place, form, *values):
    data = bytearray(data)
    struct.pack_into(form, data, place, *values)
    return bytes(data)


@pytest.mark.parametrize(
    "place, form, values, words",
    [
        (0, "<I", [1], "holds no shard of variable 0"),
        (4, "<i", [0x108], "says dtype 0x108, dim 2 and vocabulary 9223372036854775808; model_meta says 0x104, 2 and"),
        (8, "<Q", [3], "dim 3 and vocabulary 9223372036854775808; model_meta says 0x104, 2 and 9223372036854775808"),
        (16, "<Q", [7], "byte 0: the shard says dtype 0x104, dim 2 and vocabulary 7"),
        (0, "<IiQ", [1, 0x104, 2**63], "byte 0: the shard of variable 1 says dtype 0x104 and dim 9223372036854775808"),
        (0, "<Ii", [1, 3], "byte 0: the shard of variable 1 says dtype 0x3"),
        (24, "<Q", [2**63], "byte 24: a text of 9223372036854775808 bytes; 1048576 are the most"),
        (24, "<Q", [2**19], "byte 32: a text of 524288 bytes was to come, and the file ends after"),
        (32, "<4s", [b"\xff\0x "], "byte 32: the text of a shard has the line"),
        (32, "<2s", [b"  "], "byte 32: the text of a shard has the line '  ble: hash'"),
        (32 + TEXT, "<i", [-1], "a shard of number -1 of 1"),
        (32 + TEXT, "<i", [1], "a shard of number 1 of 1"),
        (32 + TEXT, "<ii", [0, 3], "holds 1 of 3 shards of variable 0 (storage 0)"),
        (32 + TEXT, "<ii", [0, 2**31 - 1], "number 1 is missing. Is a file of one of the servers missing?"),
        (40 + TEXT, "<Q", [2**63], "a state of 9223372036854775808 bytes for each row; 'adagrad' has 8 for rows of 2"),
        (40 + TEXT, "<Q", [7], "a state of 7 bytes for each row is no whole number of 4 bytes"),
        (48 + TEXT, "<Q", [2**60], f"the length of a block ({2**60 - 7} rows of shard 0 are to come) of 8 bytes"),
        (48 + TEXT, "<Q", [1], "a block of 2 rows, where 1 are to come"),
        (HEAD, "<Q", [0], "a block of 0 rows, where 7 are to come"),
        (HEAD, "<Q", [3], "a block of"),
        (HEAD, "<Q", [2**61], "a block of 2305843009213693952 rows, where 7 are to come"),
    ],
)
def test_a_shard_that_says_nonsense_is_refused(tmp_path, place, form, values, words):
    write(tmp_path, [Saved(KEYS, ROWS, optimizer="adagrad", states=ROWS)], 1, 1, 1)
    path = tmp_path / "0" / "model_0_0"
    path.write_bytes(changed(path.read_bytes(), place, form, *values))
    with pytest.raises(FormatError, match=saying(words)) as error:
        opened(tmp_path)
    assert str(tmp_path / "0") in str(error.value)


def test_keys_that_a_variable_cannot_have_are_refused(tmp_path):
    write(tmp_path, [Saved(np.array([1, 8]), ROWS[:2], vocabulary=9, optimizer="adagrad", states=ROWS[:2])], 2, 1, 1)
    assert opened(tmp_path).table().keys.read(0, 2).tolist() == [8, 1]
    path = tmp_path / "0" / "model_0_0"
    data = path.read_bytes()
    at = data.index(struct.pack("<QQ", 1, 4)) + 8  # a block of one row: key 4 of shard 0 is 8
    for local, known in ((5, 10), (2**63, 2**64), (2**64 - 1, 2**65 - 2)):
        path.write_bytes(changed(data, at, "<Q", local))
        words = saying(f"model_0_0, byte {at}: holds key {local} of shard 0 of 2, which is {known}", "keys are below 9")
        with pytest.raises(FormatError, match=words):
            opened(tmp_path).table().keys.read(0, 2)


def test_files_of_two_saves_are_not_mixed(tmp_path):
    saved = Saved(KEYS, ROWS, optimizer="adagrad", states=ROWS)
    write(tmp_path, [saved], 2, 1, 1)
    left = tmp_path / "0" / "model_1_0"  # by a server that there is no longer
    for other, words in (
        (shard(0, 1, 2, saved), "holds shard 1 of variable 0 (storage 0): float32 rows of 2, any key, which is in"),
        (shard(0, 2, 3, saved), "num_shards of variable 0 (storage 0): float32 rows of 2, any key is 3, and 2 in"),
        (shard(0, 1, 2, Saved(KEYS, ROWS, optimizer="adagrad")), "state_bytes of"),
        (shard(0, 1, 2, Saved(KEYS, ROWS, optimizer="sgd", states=ROWS)), "was trained by 'sgd', and by 'adagrad' in"),
    ):
        left.write_bytes(other)
        with pytest.raises(
            FormatError, match=saying("model_1_0, byte 0", words, "Files of two saves are in one folder")
        ):
            opened(tmp_path)
    left.unlink()
    (tmp_path / "0" / "model_0_0.tmp").write_bytes(b"of somebody else")
    assert opened(tmp_path).table().num_rows == 7


def test_a_shard_or_storage_that_is_missing_is_named(tmp_path):
    write(tmp_path, [Saved(KEYS, ROWS)], 4, 2, 1)
    (tmp_path / "0" / "model_1_0").unlink()
    with pytest.raises(FormatError, match=saying("holds 2 of 4 shards", "that of number 1 is missing")):
        opened(tmp_path)
    for path in (tmp_path / "0").iterdir():
        path.unlink()
    with pytest.raises(FormatError, match="holds no shard of variable 0"):
        opened(tmp_path)
    (tmp_path / "0").rmdir()
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        opened(tmp_path)


def test_rows_in_persistent_memory_are_not_there(tmp_path):
    write(tmp_path, [Saved(KEYS, ROWS, optimizer="adagrad", states=ROWS, pmem="/mnt/pmem0/1-2-3")])
    words = saying("the rows are not in the file", "/mnt/pmem0/1-2-3", "save_server_model")
    with pytest.raises(FormatError, match=words):
        opened(tmp_path)


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path, monkeypatch):
    write(tmp_path, [Saved(KEYS, ROWS)], 1, 1, 1)
    path, size_of = tmp_path / "0" / "model_0_0", openembedding.size_of
    path.write_bytes(path.read_bytes()[:20])
    monkeypatch.setattr(openembedding, "size_of", lambda name: size_of(name) + 1000)
    with pytest.raises(FormatError, match="was longer when it was opened"):
        openembedding.open_variable(str(tmp_path), openembedding.SavedVariable(0, "float32", 2, 2**63, "0"))
