"""`sok.erase` of exports and dumps."""

import json
import os

import numpy as np
import tensorflow as tf
import tf_keras

import sok
from sok.saved_model import serving_file
from sok.saved_model.verifying import verify_export
from sok.tools import cli
from tests.sok.checkpoint_cases import DIM, contents, new_table
from tests.sok.erasing_cases import (
    NOBODY,
    OTHER,
    ROW,
    SECOND,
    SMALL,
    USER,
    bytes_of,
    bytes_under,
    copies_killed_at_each_step,
    export,
    served,
    user_table,
)


def test_native_exports_lose_the_row_and_serve_all_others(tmp_path):
    users, items = user_table(), new_table("items", hashed=False)
    users.assign([USER], [SMALL])
    items.assign([OTHER, 9], [SMALL, np.ones(DIM)])
    path = export(tmp_path / "1", users, items, native=True)
    before = served(path, [OTHER, 9])
    np.testing.assert_array_equal(before[0, DIM:], SMALL)
    names = [users.table_name, items.table_name]
    report = sok.erase(names, {names[0]: [USER, NOBODY], names[1]: [OTHER]}, exports=[tmp_path])
    assert [(p.kind, p.found, p.removed) for p in report.places] == [("export", 2, 2)]
    assert report.is_complete and report.nowhere == (NOBODY,)
    found = bytes_under(tmp_path)
    mixed = serving_file.mixed_keys(np.array([USER], np.uint64)).tobytes()
    assert mixed not in found and SMALL.tobytes() not in found
    assert not verify_export(path)[1]
    after = served(path, [OTHER, 9])
    np.testing.assert_array_equal(after[:, :DIM], before[:, :DIM])
    np.testing.assert_array_equal(after[1], before[1])
    # As in a table in which it was never trained.
    np.testing.assert_allclose(after[:1, DIM:], new_table().sparse_read([OTHER]), atol=0)
    assert [t["num_rows"] for t in json.loads((tmp_path / "1/assets.extra/sok.json").read_text())["tables"]] == [1, 200]
    sok.erase(names, {names[0]: [OTHER]}, exports=[path])
    np.testing.assert_array_equal(served(path, [9])[:, DIM:], before[1:, DIM:])


def test_killed_at_any_step_a_native_export_is_whole_and_a_second_call_completes_the_work(tmp_path):
    users, items = user_table(), new_table("items", hashed=False)
    items.assign([OTHER, 9], [2 * ROW, SMALL])
    path = export(tmp_path / "1", users, items, native=True, row_dtype="int8")
    before = served(path, [OTHER, 9])
    keys = {users.table_name: [USER], items.table_name: [OTHER]}

    def erase(folder):
        return sok.erase(list(keys), keys, exports=[folder])

    kills = 0
    for folder in copies_killed_at_each_step(path, tmp_path, erase):
        kills += 1
        assert verify_export(folder)[1] == []
        assert erase(folder).is_complete
        found = bytes_under(folder)
        scale = np.abs(ROW).max() / np.float32(127)
        secret = [*serving_file.mixed_keys(np.array([USER], np.uint64)), scale, 2 * scale]
        assert all(one.tobytes() in bytes_under(tmp_path / "1") for one in secret)
        assert not any(one.tobytes() in found for one in secret)
        assert [table.num_rows for table in verify_export(folder)[0]] == [1, 200]
        assert [t["num_rows"] for t in json.loads((folder / "assets.extra/sok.json").read_text())["tables"]] == [1, 200]
    # Two files are written, two get their names, and what is said of them; the initial row is made by a file that goes.
    assert kills == 7
    after = served(folder, [OTHER, 9])
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_array_equal(after[:, :DIM], before[:, :DIM])
    np.testing.assert_allclose(after[:1, DIM:], new_table().sparse_read([OTHER]), atol=1e-3)


def test_killed_at_any_step_a_stock_export_is_whole_and_a_second_call_completes_the_work(tmp_path):
    users, items = user_table(key_dtype="uint64"), new_table("items")
    users.assign(np.array([2**64 - 5], np.uint64), [ROW])
    items.assign([SECOND, OTHER, 9], [SMALL, np.ones(DIM), np.ones(DIM)])
    path = export(tmp_path / "1", users, items, row_dtype="int8")
    before = served(path, [OTHER, 5])
    keys = {users.table_name: [USER, 2**64 - 5], items.table_name: [SECOND]}
    secret = [*np.array([USER, -5, SECOND], np.int64), np.abs(ROW).max() / np.float32(127)]
    assert all(one.tobytes() in bytes_under(tmp_path / "1") for one in secret)

    def erase(folder):
        return sok.erase(list(keys), keys, exports=[folder])

    kills = 0
    for folder in copies_killed_at_each_step(path, tmp_path, erase):
        kills += 1
        reader = tf.train.load_checkpoint(str(folder / "variables/variables"))
        rows = [len(reader.get_tensor(f"tables/{number}/rows/.ATTRIBUTES/VARIABLE_VALUE")) for number in (0, 1)]
        assert rows in ([3, 3], [1, 2])
        assert erase(folder).is_complete
        assert not any(one.tobytes() in bytes_under(folder) for one in secret)
        told = json.loads((folder / "assets.extra/sok.json").read_text())["tables"]
        assert [table["num_rows"] for table in told] == [1, 2]
    assert kills >= 5  # new files and their index get their names, old ones go, and what is said of them
    np.testing.assert_array_equal(served(folder, [OTHER, 5]), before)
    # Once more: the number of files, which their names have, is another one again.
    names = [sorted(os.listdir(folder / "variables"))]
    assert sok.erase(list(keys), {items.table_name: [9]}, exports=[folder]).places[0].removed == 1
    names.append(sorted(os.listdir(folder / "variables")))
    assert not {name for name in names[0] if ".data" in name} & set(names[1]) and "variables.index" in names[1]
    np.testing.assert_array_equal(served(folder, [OTHER, 5]), before)


def test_an_export_that_cannot_lose_a_row_is_listed(tmp_path):
    users, items = user_table(), new_table("items", hashed=False)
    path = export(tmp_path / "1", users, items)
    report = sok.erase([users, items], {items.table_name: [OTHER]}, exports=[path])
    assert [(p.kind, p.found, p.removed) for p in report.places][-1] == ("export", 1, 0)
    assert not report.is_complete and "export it anew" in str(report)
    (tmp_path / "1/assets.extra/sok.json").unlink()
    report = sok.erase([users, items], [OTHER], exports=[path])
    assert not report.is_complete and "does not say which variables are tables'" in str(report)
    assert cli.main(["find", str(OTHER), path]) == 2


def test_dumps_lose_the_row_with_its_slots(tmp_path, capsys):
    table, other = (sok.DynamicVariable(DIM, initializer="zeros", name=name) for name in ("dumped", "matrix"))
    optimizer = sok.OptimizerWrapper(tf_keras.optimizers.legacy.Adam(0.1))
    sok.assign(table, tf.constant([USER, OTHER], tf.int64), tf.stack([ROW, tf.ones(DIM)]))
    sok.assign(other, tf.constant([0, 1], tf.int64), tf.ones([2, DIM]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[USER, OTHER]], tf.int64), combiners="sum"))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    sok.dump(tmp_path, [table], optimizer)
    sok.dump(tmp_path, [other])
    before = contents(table)
    (tmp_path / f"dumped_0-key.{'a' * 12}.tmp").write_bytes(bytes_of(USER))
    assert cli.main(["find", str(USER), str(tmp_path), "--table", "dumped"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/dumped_0: table 'dumped_0', key {USER}: a row\n"

    report = sok.erase(["dumped", "matrix"], {"dumped": [USER], "matrix": [1]}, checkpoints=[tmp_path])

    assert [(p.kind, p.found, p.removed) for p in report.places] == [("dump", 1, 1), ("dump", 1, 0)]
    assert "could not be loaded without one" in str(report)
    saved = b"".join(path.read_bytes() for path in tmp_path.glob("dumped*"))
    assert bytes_of(USER) not in saved and before[USER][0] not in saved and before[OTHER][0] in saved
    table.erase([USER, OTHER])
    sok.load(tmp_path, [table], optimizer)
    assert contents(table) == {OTHER: before[OTHER]}
    report = sok.erase("dumped", [OTHER], checkpoints=[tmp_path / "dumped_0-key"])
    assert "no rows left: remove its files" in str(report)
    (tmp_path / "dumped_0-key").unlink()  # as where writing was interrupted between two names
    assert [p.kind for p in sok.erase("dumped", [OTHER], checkpoints=[tmp_path]).places] == ["unfinished save", "dump"]


def test_files_of_keras_and_of_sok_v1_are_listed(tmp_path, capsys):
    (tmp_path / "plain.weights.h5").write_bytes(b"no rows of ours")
    (tmp_path / "model.keras").write_bytes(b"PK.. layers/embedding/vars sok_table ..")
    (tmp_path / "item_keys.file").write_bytes(bytes_of(USER))
    report = sok.erase("item", [USER], checkpoints=[tmp_path])
    assert [place.path for place in report.places] == [f"{tmp_path}/item_keys.file", f"{tmp_path}/model.keras"]
    assert not report.is_complete and "save it anew" in str(report)
    assert cli.main(["find", str(USER), str(tmp_path)]) == 2
    assert "model.keras: a file of Keras or of SOK v1: not looked into" in capsys.readouterr().err
