"""OpenEmbedding's script for persistent memory: rows in files, `persist_server_model`, and models that are saved so."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tensorflow as tf

import openembedding.tensorflow as embed
import sok
from tests.sok.checkpoint_cases import contents
from tests.sok.storage_cases import LITTLE


@pytest.fixture
def pmem(tmp_path, monkeypatch):
    """A folder for rows, named as the script names it, and the script's own two functions."""
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    config = {"server": {"pmem_pool_root_path": str(tmp_path / "pmem"), "cache_size": 16}}
    monkeypatch.setattr(embed.flags, "config", json.dumps(config))

    def save_server_model(model, filepath, include_optimizer=True):
        embed.persist_server_model(model, filepath, 0)

    monkeypatch.setattr(embed.exb, "save_server_model", save_server_model)
    monkeypatch.setattr(embed.exb, "load_server_model", embed.restore_server_model)
    return tmp_path


def compiled():
    ids = tf.keras.Input([2], dtype="int64")
    rows = tf.keras.layers.Embedding(3_000, 4)(ids)
    model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(rows)))
    model = embed.distributed_model(model)
    model.compile(embed.distributed_optimizer(tf.keras.optimizers.Adagrad(0.1)), "mse")
    return model


def fit(model):
    ids = np.arange(2_000).reshape(-1, 2)
    model.fit(ids, np.ones([1_000, 1]), batch_size=250, verbose=0)


def table_of(model):
    return model.layers[1].embedding_variable


def held(model):
    return contents(table_of(model)), [weight.tolist() for weight in model.layers[-1].get_weights()]


def test_the_script_saves_and_loads_with_rows_in_their_files(pmem):
    model = compiled()
    storage = table_of(model).options.storage
    assert (storage.memory_bytes, storage.path) == (16 << 20, str(pmem / "pmem"))
    fit(model)
    saved, before = str(pmem / "B"), held(model)
    model.save(saved)
    (shard,) = (pmem / "B" / "openembedding" / "rows").glob("*.shard")
    assert shard.stat().st_size < 2_000  # the rows are not in it
    assert not os.path.exists(os.path.join(saved, "saved_model.pb"))
    fit(model)
    assert held(model) != before
    model.load_weights(saved)
    assert held(model) == before
    fit(model)
    model.load_weights(os.path.join(saved, "variables", "variables"))  # as OpenEmbedding's examples have it
    assert held(model) == before


def test_windows_and_when_to_persist(pmem):
    model = compiled()
    assert not embed.should_persist_server_model(model)  # nothing was trained
    fit(model)
    assert embed.should_persist_server_model(model)
    folders, all_held = [str(pmem / f"{n}") for n in range(3)], []
    for window, folder in enumerate(folders):
        embed.persist_server_model(model, folder, window)
        all_held.append(contents(table_of(model)))
        assert not embed.should_persist_server_model(model)
        fit(model)
    for folder, then in zip(folders, all_held, strict=True):
        embed.restore_server_model(model, folder)
        assert contents(table_of(model)) == then
    with pytest.raises(ValueError, match="`persist_pending_window` must be 0, 1 or 2. Received: 3"):
        embed.persist_server_model(model, folders[0], 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{server", "must be YAML or JSON"),
        ("[1]", "must be YAML or JSON"),
        ('{"server": {"pmem_pool_root_path": "/x", "cache_size": "big"}}', "`cache_size` must be whole megabytes"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(monkeypatch, config, words):
    monkeypatch.setattr(embed.flags, "config", config)
    with pytest.raises(ValueError, match=words):
        embed.Embedding(100, 2)


def test_without_a_folder_rows_are_in_memory(monkeypatch):
    monkeypatch.setattr(embed.flags, "config", "server: {cache_size: 5}")
    layer = embed.Embedding(100, 2)
    layer(tf.constant([1]))
    assert layer.embedding_variable.options.storage is None and isinstance(layer, sok.Embedding)
