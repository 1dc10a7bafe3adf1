"""Rows of a user who asks to be forgotten, files that have them, and kills while these are rewritten."""

import os
import shutil
import struct

import numpy as np
import pytest
import tensorflow as tf

import sok
from sok.checkpoint import lease, native, verify
from sok.saved_model import serving_file
from tests.sok.checkpoint_cases import DIM, new_table

# Keys whose bytes are no length or offset in a file.
USER, SECOND, OTHER, NOBODY = 1_234_567_890_123, 987_654_321_987, 7, 999_999
ROW = np.array([1234.5, -9876.25, 3.0e7], np.float32)
SMALL = np.array([1.2345, -2.7182, 0.5772], np.float32)


def bytes_of(key, dtype="int64"):
    """The record of a key, as the files have it."""
    return struct.pack("<Q", int(np.array(key, dtype).astype(np.int64 if dtype[0] == "i" else np.uint64)) % 2**64)


def bytes_under(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def user_table(**settings):
    table = new_table("users", **settings)
    table.assign([USER, OTHER], [ROW, np.ones(DIM)])
    return table


def assert_gone(folder, *, rows=(ROW,), keys=(USER,), dtype="int64"):
    assert verify(folder) == []
    found = bytes_under(folder)
    assert not any(np.asarray(row, np.float32).tobytes() in found for row in rows)
    assert not any(bytes_of(key, dtype) in found for key in keys)


class Killed(BaseException):
    """What nobody handles as an error of the disk."""


class Steps:
    """Counts what changes files; at step `at` the process is gone: nothing that it does later reaches the disk."""

    def __init__(self, monkeypatch, at=None):
        self.count, self._at = 0, at
        of_native = ((native, "compact_shards"), (native, "save_erasure"), (serving_file.ServingFile, "finish"))
        for owner, name in ((os, "rename"), (os, "replace"), (os, "unlink"), (lease.Lease, "_write"), *of_native):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function):
        def run(*args, **kwargs):
            self.count += 1
            if self._at is not None and self.count >= self._at:
                raise Killed
            return function(*args, **kwargs)

        return run


def copies_killed_at_each_step(path, folder, erase):
    """Copies of what is at `path`, each after `erase(copy)` was killed at another step."""
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch)
        erase(shutil.copytree(path, folder / "counted"))
    for at in range(1, steps.count + 1):
        copy = shutil.copytree(path, folder / f"killed{at}")
        with pytest.MonkeyPatch.context() as patch:
            Steps(patch, at)
            with pytest.raises(Killed):
                erase(copy)
        yield copy


class Looked(tf.Module):
    """What a user looks up in some tables, side by side."""

    def __init__(self, *tables):
        super().__init__()
        self._tables = tables

    def __call__(self, ids):
        return tf.concat([t.sparse_read(tf.cast(ids, t.key_dtype)) for t in self._tables], 1)


def export(folder, *tables, **settings):
    spec = tf.TensorSpec([None], tf.int64, "ids")
    return sok.export_saved_model(Looked(*tables), folder, signatures=spec, **settings).path


def served(path, ids):
    model = tf.saved_model.load(path)
    return model.signatures["serving_default"](ids=tf.constant(ids, tf.int64))["output_0"].numpy()
