"""What goes wrong while exports follow a job: there is a whole version, or the one before, and an error with words."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.base.errors import DamagedFileError
from sok.checkpoint import CheckpointError, read_manifest
from sok.checkpoint import manifest as manifests
from sok.saved_model import following
from sok.saved_model.serving_file import ServingFile
from sok.saved_model.table_file import TableFile
from tests.messages import saying
from tests.sok.feed_cases import (
    DIM,
    Served,
    answers,
    assert_same_export,
    export,
    flip,
    new_table,
    shards_of,
    told,
)

ERRORS = (CheckpointError, DamagedFileError, OSError, tf.errors.OpError)


@pytest.fixture(scope="module", autouse=True)
def init():
    sok.Init()


@pytest.fixture(scope="module")
def model():
    return Served(new_table("faults"), new_table("faults_identity", hashed=False, capacity=12))


@pytest.fixture(scope="module")
def made(tmp_path_factory, model):
    """A model that was exported, and published once since; its feed, exports, and an export of the same instant."""
    folder = tmp_path_factory.mktemp("made")
    publisher = sok.Publisher(folder / "feed", model)
    model.tables[0].assign([1, 2], np.ones([2, DIM]))
    publisher.publish()
    export(model, folder / "exports" / "1")
    version = sok.follow_export(folder / "feed", folder / "exports").poll()
    shutil.rmtree(folder / "exports" / "1")
    os.rename(version, folder / "exports" / "1")  # is of a save, so that changes alone are read
    model.tables[0].assign([2, 3], np.full([2, DIM], 2.0))
    model.tables[1].assign([7], np.full([1, DIM], 2.0))
    model.shift.assign(2.0)
    publisher.publish()
    export(model, folder / "fresh")
    return folder


@pytest.fixture
def here(made, tmp_path):
    """The same, to be spoilt."""
    shutil.copytree(made, tmp_path / "here")
    return tmp_path / "here"


def names(here):
    return sorted(path.name for path in (here / "exports").iterdir())


def follower(here, **more):
    return sok.follow_export(here / "feed", here / "exports", **more)


def test_nothing_is_wrong_without_a_fault(here):
    one = follower(here)
    assert one.generation is None and one.lag is None
    assert_same_export(one.poll(), here / "fresh")
    assert names(here) == ["1", "2"] and one.poll() is None
    assert (
        one.generation == read_manifest(here / "feed").generation == told(here / "exports" / "2")["feed"]["generation"]
    )
    assert 0 <= one.lag < 600


def test_the_disk_has_a_version_before_it_has_its_name(here, monkeypatch):
    synced, named, fsync, rename = set(), [], os.fsync, os.rename

    def told_fsync(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def told_rename(old, new):
        if os.path.isdir(old):
            inside = [Path(folder, name) for folder, _, names in os.walk(old) for name in (".", *names)]
            named.append({str(path.relative_to(old)) for path in inside if path.stat().st_ino not in synced})
        rename(old, new)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "rename", told_rename)
    assert follower(here).poll()
    assert named == [set()]


def table_file(here):
    return next(path for path in (here / "exports" / "1" / "assets").iterdir() if "identity" not in path.name)


def dense_file(here):
    return here / "feed" / f"{read_manifest(here / 'feed').dense.name}.index"


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda here: shards_of(here / "feed")[0], "shard"),
        (table_file, r"\.sok|no file of table"),
        (dense_file, "-dense"),
        (lambda here: here / "feed" / "manifest.json", "manifest.json"),
        (lambda here: here / "exports" / "1" / "variables" / "variables.index", "."),
    ],
    ids=["shard", "table", "dense weights", "manifest", "variables"],
)
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_is_an_error_and_the_versions_stay_as_they_are(here, damaged, said, how):
    file = damaged(here)
    before = answers_or_none(here)
    if how == "flipped":
        data = flip(file, 10 if file.suffix == ".index" else file.stat().st_size // 2)
    else:
        data = file.read_bytes()
        file.unlink()
        if how == "cut":
            file.write_bytes(data[: len(data) // 2])
    if how == "gone" and file.name == "manifest.json":
        assert follower(here).poll() is None
        return
    one = follower(here)
    for _ in range(2):
        with pytest.raises((*ERRORS, ValueError), match=said):
            one.poll()
        assert names(here) == ["1"]
    file.write_bytes(data)
    assert answers_or_none(here) == before
    assert_same_export(one.poll(), here / "fresh")


def answers_or_none(here):
    return {name: value.tolist() for name, value in answers(here / "exports" / "1", [[1, 2, 3]]).items()}


def test_saves_without_dense_weights_or_with_others_are_told(here, model):
    kernel, shift = tf.Variable(np.ones([DIM, 1], "f")), tf.Variable(3.0)
    one = sok.follow_export(here / "other", here / "exports")
    for dense, error, said in (
        (False, ValueError, "the saves have no dense weights, and the export has"),
        ({"kernel": kernel}, ValueError, "no dense weights 'shift', and the export has"),
        (
            {"kernel": tf.Variable([[1.0]]), "shift": shift},
            ValueError,
            "'kernel' have another shape than in the export",
        ),
        ({"kernel": kernel, "shift": tf.Variable(3)}, tf.errors.OpError, "int32"),
    ):
        sok.save(here / "other", model.tables, dense=dense)
        with pytest.raises(error, match=saying(said)):
            one.poll()
        assert names(here) == ["1"]


def test_tables_of_another_model_are_told(here, model):
    one = sok.follow_export(here / "other", here / "exports")
    dense = {"kernel": model.kernel, "shift": model.shift}
    sok.save(here / "other", model.tables[:1], dense=dense)
    with pytest.raises(
        ValueError, match=saying("holds no table 'faults_identity', which the export has", "has faults.")
    ):
        one.poll()
    for changed in ({"dim": 9}, {"key_dtype": "int32"}, {"hashed": True}):
        sok.save(here / "other", model, dense=True)
        of = "faults_identity" if "hashed" in changed else "faults"
        with pytest.MonkeyPatch.context() as patch:
            table = dataclasses.replace(read_manifest(here / "other").table(of), **changed)
            patch.setattr(
                manifests.Manifest,
                "table",
                lambda self, name, table=table, of=of: table if name == of else {t.name: t for t in self.tables}[name],
            )
            with pytest.raises(ValueError, match=saying(f"Table '{of}' has other", "Export it anew")):
                one.poll()
    assert names(here) == ["1"]


def test_a_table_with_a_key_beyond_its_export_is_told(here):
    """As where a job goes on at more workers, each of which has room for so many rows."""
    model = Served(new_table("larger", hashed=False, capacity=13))
    export(model, here / "larger" / "1")
    sok.save(here / "feed_of_larger", model, dense=True)
    one = sok.follow_export(here / "feed_of_larger", here / "larger")
    assert one.poll()
    file = here / "larger" / "2" / "assets" / "0_larger.sok"
    described = TableFile(str(file)).described
    with contextlib.closing(ServingFile(str(file), described, None, 12)) as narrower:
        narrower.add(np.zeros([12, DIM], "f"))
        narrower.finish()
    model.tables[0].assign([12], np.ones([1, DIM]))
    sok.save(here / "feed_of_larger", model, dense=True, incremental=True)
    with pytest.raises(ValueError, match=saying("'larger' has key 12", "12 keys in the export", "Export it anew")):
        one.poll()
    assert not (here / "larger" / "3").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told.pop("dense"), "no export that can be followed"),
        (lambda told: told.update(native=False), "no export that can be followed"),
    ],
)
def test_an_export_of_an_older_sok_or_of_another_kind_is_refused(here, change, said):
    file = here / "exports" / "1" / "assets.extra" / "sok.json"
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    with pytest.raises(ValueError, match=saying(said, "native=True")):
        follower(here).poll()
    file.unlink()
    with pytest.raises(ValueError, match=saying(said)):
        follower(here).poll()


def test_where_there_is_nothing_to_begin_with_or_nothing_saved_it_says_so(here):
    shutil.rmtree(here / "exports" / "1")
    with pytest.raises(FileNotFoundError, match=saying("no version to begin with", "native=True")):
        follower(here).poll()
    with pytest.raises(FileNotFoundError):
        sok.follow_export(here / "feed", here / "nowhere").poll()
    assert sok.follow_export(here / "nothing", here / "exports").poll() is None
    for bad in (0, -1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="max_to_keep"):
            follower(here, max_to_keep=bad)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_files_are_copied_where_no_links_can_be(here, monkeypatch, number):
    def refuses(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuses)
    version = follower(here).poll()
    assert_same_export(version, here / "fresh")
    same = [Path(one, "assets.extra", "libsok_serving.so") for one in (version, here / "exports" / "1")]
    assert same[0].read_bytes() == same[1].read_bytes() and not os.path.samefile(*same)


def test_a_version_is_made_of_one_on_another_file_system(here):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == here.stat().st_dev:
        pytest.skip("there is no other file system")
    away = other / f"sok_follow_{os.getpid()}"
    try:
        shutil.move(here / "exports" / "1", away)
        (here / "exports" / "1").symlink_to(away)
        assert_same_export(follower(here).poll(), here / "fresh")
    finally:
        shutil.rmtree(away, ignore_errors=True)


def test_a_number_that_somebody_else_takes_meanwhile_stays_theirs(here, monkeypatch):
    tell = following._tell

    def slowly(*args):
        shutil.copytree(here / "fresh", here / "exports" / "2")
        tell(*args)

    one = follower(here)
    with monkeypatch.context() as patch:
        patch.setattr(following, "_tell", slowly)
        with pytest.raises(OSError, match="not empty|exists"):
            one.poll()
    assert names(here) == ["1", "2"] and "feed" not in told(here / "exports" / "2")
    assert one.poll() == str(here / "exports" / "3")  # that one is of no save
    assert_same_export(here / "exports" / "3", here / "fresh")


def test_names_that_are_no_numbers_are_left_alone(here):
    for name in ("²", "best", "2.partial", ".2.partial-1-ab", "-3", "1e3"):
        (here / "exports" / name).mkdir()
    (here / "exports" / "1").rename(here / "exports" / "0007")
    assert follower(here, max_to_keep=1).poll() == str(here / "exports" / "8")
    # What a follower that was killed had begun is gone, and versions of its own that are too many.
    assert names(here) == ["-3", "1e3", "2.partial", "8", "best", "²"]


def test_so_many_versions_of_its_own_stay_and_all_of_others(here, model):
    sok.save(here / "feed", model, dense=True)
    os.rename(here / "exports" / "1", here / "exports" / "4")
    shutil.copytree(here / "fresh", here / "exports" / "2")  # somebody's
    one = follower(here, max_to_keep=2)
    found = []
    for _ in range(3):
        one.poll()
        found.append(names(here))
        sok.save(here / "feed", model, incremental=True, dense=True)
    assert found == [["2", "4", "5"], ["2", "5", "6"], ["2", "6", "7"]]


def test_a_full_disk_leaves_no_half_version(here, monkeypatch):
    from tests.sok.test_checkpoint_crash import files_of_at_most

    for room in (0, 1000, 8000):
        with files_of_at_most(room), pytest.raises((OSError, tf.errors.OpError)):
            follower(here).poll()
        assert names(here) == ["1"]
    assert_same_export(follower(here).poll(), here / "fresh")


def test_a_follower_that_is_killed_leaves_no_half_version_and_the_next_one_goes_on(forked, here):
    script = Path(__file__).with_name("follow_killed_script.py")
    environment = {"CUDA_VISIBLE_DEVICES": "-1"}
    arguments = [str(here / "feed"), str(here / "exports"), str(here)]
    done = forked.run(script, here / "run", *arguments, environment=environment)
    assert done.status == 0, done.stderr[-4000:]
    steps = done.stdout.splitlines()
    assert len(steps) == 8
    for number, line in enumerate(steps):
        assert line.endswith(": 1: 2" if line.startswith("after it is renamed") else ": 1"), line
        assert sorted(path.name for path in (here / str(number)).iterdir()) == ["1", "2"]  # what was begun is gone
        assert_same_export(here / str(number) / "2", here / "fresh")


def test_a_save_that_comes_meanwhile_is_waited_for_or_read(here, model, monkeypatch):
    """Whatever is read, it is of one save."""
    pieces, saves = following.pieces_of, []

    def replaced(*args):
        if len(saves) < 3:
            model.shift.assign(float(len(saves)))
            model.tables[0].assign([1], np.full([1, DIM], float(len(saves))))
            saves.append(sok.save(here / "feed", model, dense=True))
        return pieces(*args)

    monkeypatch.setattr(following, "pieces_of", replaced)
    version = follower(here).poll()
    assert len(saves) == 3
    export(model, here / "now")
    assert_same_export(version, here / "now")
    monkeypatch.setattr(following, "TRIES", 2)
    sok.save(here / "feed", model, dense=True)
    saves[:] = []
    with pytest.raises(ERRORS):
        follower(here).poll()


def test_two_followers_of_one_folder_spoil_nothing(here):
    results, barrier = [], threading.Barrier(2)

    def polls():
        barrier.wait()
        try:
            results.append(follower(here).poll())
        except (OSError, RuntimeError, tf.errors.OpError):  # the other one was first, and has swept
            results.append(None)

    threads = [threading.Thread(target=polls) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert str(here / "exports" / "2") in results and set(results) <= {str(here / "exports" / "2"), None}
    assert names(here) == ["1", "2"]
    assert_same_export(here / "exports" / "2", here / "fresh")


def test_keys_that_are_erased_everywhere_do_not_come_back(tmp_path):
    table = new_table("forgotten")
    model = Served(table)
    table.assign([1, 2], np.ones([2, DIM]))
    publisher = sok.Publisher(tmp_path / "feed", model)
    publisher.publish()
    export(model, tmp_path / "exports" / "1")
    one = sok.follow_export(tmp_path / "feed", tmp_path / "exports", max_to_keep=1)
    version = one.poll()
    report = sok.erase(table, [1], checkpoints=[tmp_path / "feed"], exports=[tmp_path / "exports" / "1", version])
    assert report.is_complete, report
    assert_same_export(version, export(model, tmp_path / "fresh"))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all rows are written
            publisher.publish()
        version = one.poll()
    assert_same_export(version, tmp_path / "fresh")
    assert sok.erase(["forgotten"], [1], checkpoints=[tmp_path / "feed"], exports=[version]).nowhere == (1,)


def test_threads_may_serve_what_another_one_follows(here):
    """A version that is loaded goes on answering when its folder is removed."""
    served = tf.saved_model.load(here / "exports" / "1").signatures["serving_default"]
    expected = served(ids=tf.constant([[1, 2]], tf.int64))["rows_0"].numpy()
    polled = threading.Thread(target=lambda: follower(here, max_to_keep=1).poll())
    polled.start()
    while polled.is_alive():
        np.testing.assert_array_equal(served(ids=tf.constant([[1, 2]], tf.int64))["rows_0"], expected)
    polled.join()
    assert names(here) == ["2"]
    np.testing.assert_array_equal(served(ids=tf.constant([[1, 2]], tf.int64))["rows_0"], expected)
