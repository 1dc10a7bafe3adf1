"""Which GPU a worker gets. TensorFlow's answers are made up: no GPU is needed."""

import warnings

import pytest
import tensorflow as tf

from sok.job import gpus
from tests.messages import saying


class Config:
    """What `tf.config` would say of some GPUs, and what it is told."""

    def __init__(self, monkeypatch, count, started=False):
        self.visible = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)]
        self.growing = []
        self.started = started
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(self.visible))
        monkeypatch.setattr(tf.config, "set_visible_devices", self.choose)
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", self.grow)

    def choose(self, devices, kind):
        if self.started:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = list(devices)

    def grow(self, gpu, enable):
        if self.started:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.growing.append(gpu.name)


@pytest.mark.parametrize("local_rank", [0, 2])
def test_each_worker_gets_the_gpu_of_its_number(monkeypatch, local_rank):
    config = Config(monkeypatch, 4)
    gpus.bind(local_rank, 4)
    assert [gpu.name for gpu in config.visible] == [f"/physical_device:GPU:{local_rank}"] == config.growing


def test_one_worker_keeps_all_gpus(monkeypatch):
    config = Config(monkeypatch, 2)
    gpus.bind(0, 1)
    assert len(config.visible) == len(config.growing) == 2


def test_a_gpu_that_was_chosen_stays(monkeypatch):
    config = Config(monkeypatch, 1)
    gpus.bind(3, 4)
    assert len(config.visible) == 1


def test_without_gpus_nothing_happens(monkeypatch):
    config = Config(monkeypatch, 0, started=True)
    gpus.bind(1, 2)
    assert config.visible == [] == config.growing


def test_more_workers_than_gpus(monkeypatch):
    Config(monkeypatch, 2)
    with pytest.raises(RuntimeError, match=saying("Worker 2", "no GPU", "TensorFlow sees 2")):
        gpus.bind(2, 3)


def test_too_late_to_choose(monkeypatch):
    Config(monkeypatch, 2, started=True)
    with pytest.raises(RuntimeError, match="sok.Init before"):
        gpus.bind(1, 2)


def test_too_late_to_let_memory_grow(monkeypatch):
    """Nothing is said: tables take their memory from TensorFlow's pool, however large that is."""
    config = Config(monkeypatch, 1, started=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpus.bind(0, 1)
    assert config.growing == []
