"""Several jobs and one folder: who saves there, and who reads meanwhile."""

import errno
import os
import re
import subprocess
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import lease, manifest, native, read_manifest, verify
from tests.sok.checkpoint_cases import DIM, contents, files_of, new_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def job(monkeypatch):
    """job(name): from now on this process is that job."""
    taken = {}

    def become(name):
        monkeypatch.setattr(lease, "_process_name", lambda pid: name)
        monkeypatch.setattr(lease, "_taken", taken.setdefault(name, {}))

    return become


def filled(value, **settings):
    table = new_table(name="shared", **settings)
    table.assign([1, 2], np.full([2, DIM], value))
    return table


def test_jobs_beside_each_other_neither_lose_a_checkpoint_nor_fail_to_read_one(forked, tmp_path):
    script = Path(__file__).with_name("checkpoint_jobs_script.py")
    done = forked.run(script, tmp_path, str(tmp_path / "saves"), "4", "0.7", environment={"CUDA_VISIBLE_DEVICES": "-1"})
    assert done.status == 0, done.stderr[-4000:]
    lost, broken, looks = map(int, re.search(r"(\d+) lost, (\d+) of (\d+) looks broken", done.stdout).groups())
    assert (lost, broken) == (0, 0) and looks > 20 and "told: True" in done.stdout, done.stdout
    saves, reads, errors = map(int, re.search(r"saves: (\d+), reads: (\d+), errors: (\d+)", done.stdout).groups())
    assert saves > 5 and reads > 5 and errors == 0, done.stdout + done.stderr[-4000:]


def test_the_job_that_began_first_is_told_until_it_restores(tmp_path, job):
    job("a")
    first, second = filled(1.0), filled(2.0)
    sok.save(tmp_path, first)
    job("b")
    with pytest.warns(UserWarning, match=f"process {os.getpid()} .*still there"):
        sok.save(tmp_path, second)
    sok.save(tmp_path, second)
    job("a")
    for _ in range(2):
        with pytest.raises(lease.LeaseLost, match=r"writer.json: another job .*process \d+ on .*, since"):
            sok.save(tmp_path, first)
    assert verify(tmp_path) == []
    sok.save(tmp_path / "elsewhere", first)
    with pytest.warns(UserWarning, match="has another seed|is still there"):
        sok.restore(tmp_path, {second.table_name: first})
        sok.save(tmp_path, first)
    job("b")
    with pytest.raises(lease.LeaseLost):
        sok.save(tmp_path, second)


@pytest.mark.filterwarnings("ignore:.*is still there")
def test_a_job_that_loses_the_lease_while_it_saves_leaves_the_other_checkpoint_alone(tmp_path, job, monkeypatch):
    first, second = filled(1.0), filled(2.0)
    other_place = filled(3.0)
    save = native.EagerCalls.save
    check = lease.Lease.check

    def of_the_other(*args):
        monkeypatch.setattr(native.EagerCalls, "save", save)
        monkeypatch.setattr(lease.Lease, "check", check)
        job("b")
        sok.save(tmp_path, second)
        job("a")

    def while_shards_are_written(self, *args):
        summary = save(self, *args)
        of_the_other()
        return summary

    def after_the_last_look(self):
        check(self)
        if any(name.startswith("manifest.json.") for name in os.listdir(tmp_path)):
            of_the_other()

    job("a")
    for owner, name, late in (
        (native.EagerCalls, "save", while_shards_are_written),
        (lease.Lease, "check", after_the_last_look),
    ):
        sok.restore(tmp_path, {second.table_name: other_place}) if files_of(tmp_path) else None  # takes over again
        monkeypatch.setattr(owner, name, late)
        with pytest.raises((lease.LeaseLost, FileNotFoundError)):
            sok.save(tmp_path, first)
        assert verify(tmp_path) == [] and len(files_of(tmp_path)) == 2
        assert read_manifest(tmp_path).tables[0].name == second.table_name


def test_compacting_by_another_process_leaves_the_lease_to_the_job(tmp_path, job):
    job("a")
    table = filled(1.0)
    sok.save(tmp_path, table, incremental=True)
    for value in (3, 4):
        table.assign([value], np.ones([1, DIM]))
        sok.save(tmp_path, table, incremental=True)
        job("compactor")
        sok.compact(tmp_path)
        job("a")
    table.assign([9], np.ones([1, DIM]))
    sok.save(tmp_path, table, incremental=True)
    assert [link.files[0].rows for link in read_manifest(tmp_path).links] == [4, 1] and verify(tmp_path) == []


def test_compacting_beside_a_save_breaks_neither(tmp_path, job, monkeypatch):
    job("a")
    table, other = filled(1.0), filled(0.0)
    for _ in range(2):
        sok.save(tmp_path, table, incremental=True)
    save = native.EagerCalls.save

    def compacting(self, *args):
        summary = save(self, *args)
        job("compactor")
        sok.compact(tmp_path)
        job("a")
        return summary

    monkeypatch.setattr(native.EagerCalls, "save", compacting)
    sok.save(tmp_path, table)
    assert verify(tmp_path) == [] and len(files_of(tmp_path)) == 2
    sok.restore(tmp_path, {table.table_name: other})
    assert contents(other) == contents(table)


@pytest.mark.filterwarnings("ignore:.*is still there")
def test_managers_of_two_jobs_take_turns_as_saves_do(tmp_path, job):
    managers = {}
    for name in ("a", "b"):
        job(name)
        checkpoint = tf.train.Checkpoint(table=filled(1.0))
        managers[name] = sok.CheckpointManager(checkpoint, tmp_path / "new" / "folder", max_to_keep=2)
        managers[name].save()
    job("a")
    with pytest.raises(lease.LeaseLost, match="ckpt.writer.json: another job"):
        managers["a"].save()
    managers["a"].restore(managers["b"].latest_checkpoint)
    assert managers["a"].save().endswith("ckpt-2")


def test_a_lease_that_makes_no_sense_is_nobodys(tmp_path):
    table = filled(1.0)
    for text in ("", "{", "[]", '{"token": 3}', "\0" * 10):
        (tmp_path / lease.NAME).write_text(text)
        sok.save(tmp_path, table)
    assert (tmp_path / lease.NAME).stat().st_size == 1024


def test_who_has_ended_is_known_to_have(tmp_path):
    path = str(tmp_path / "lease")
    with subprocess.Popen(["sleep", "60"]) as process:
        holder = {"pid": process.pid, "processes": lease._processes(), "began": lease._began(process.pid)}
        assert lease._lives_here(holder) and not lease._lives_here({**holder, "began": "1"})
        assert not lease._lives_here({**holder, "processes": "another machine"})
        process.kill()
    assert not lease._lives_here(holder) and not os.path.exists(path)


def test_a_checkpoint_of_before_is_read(tmp_path):
    """Made by the first sok that wrote deltas, with its own sum of the manifest."""
    folder = ROOT / "tests" / "data" / "incremental_checkpoint"
    table = new_table()
    sok.restore(folder, {"item": table})
    keys, rows = (tensor.numpy() for tensor in table.export())
    found = dict(zip(keys.tolist(), rows.tolist(), strict=True))
    assert sorted(found) == [*range(1, 10), 50] and found[50] == [7, 8, 9] and found[9] == [27, 28, 29]
    assert found[2] == pytest.approx([5.8438907, 6.8438907, 7.8438907])
    assert table.slots("Adagrad")[1].numpy()[:4, 0].tolist() == [0.25, 1.25, 2.25, 1.25]
    assert [len(link.files) for link in manifest.read_manifest(folder).links] == [1, 1, 1] and verify(folder) == []


class OtherHost:
    """Opens files as an NFS client that takes them for unchanged, since their time and size are, while it has them."""

    def __init__(self):
        self.cached, self.dropped, self.stale = {}, set(), 0

    def open(self, path, mode="r", **how):
        file = open(path, mode, **how)  # noqa: SIM115
        if mode != "rb":
            return file
        if self.stale:
            self.stale -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        read, number = file.read, file.fileno()

        def read_cached():
            if path not in self.cached or number in self.dropped:
                self.cached[path] = read()
            return self.cached[path]

        told = unittest.mock.MagicMock(wraps=file, read=read_cached)
        told.__enter__.return_value = told
        told.__exit__.side_effect = lambda *_: file.close()
        return told

    def advise(self, number, *_):
        self.dropped.add(number)


def test_a_lease_is_read_past_what_a_host_has_cached(tmp_path, job, monkeypatch):
    path, host = lease.in_folder(tmp_path), OtherHost()
    job("a")
    first = lease.Lease(path)
    first.take()
    with monkeypatch.context() as here:
        here.setattr(lease, "open", host.open, raising=False)
        first.check()
    job("b")
    with pytest.warns(UserWarning, match="is still there"):
        lease.Lease(path).take()
    monkeypatch.setattr(lease, "open", host.open, raising=False)
    monkeypatch.setattr(os, "posix_fadvise", host.advise)
    host.stale = 1  # and the file was made anew
    with pytest.raises(lease.LeaseLost, match="another job saves here now"):
        first.check()
