"""One worker, one GPU: which GPU a process uses, and how its memory grows."""

from __future__ import annotations

import contextlib

import tensorflow as tf


def bind(local_rank: int, size: int) -> None:
    """Gives this process the GPU with the number that it has among the workers of its host; memory grows as needed.

    TensorFlow, whose pool tables take their memory from, leaves the rest of the card to others that way: NCCL, CuPy.
    Where it has started already, its memory stays as it is. Does nothing without a GPU. Of several GPUs, a job of one
    worker keeps those that are visible. Where one GPU is visible already (CUDA_VISIBLE_DEVICES,
    `tf.config.set_visible_devices`), that is the worker's choice and stays. Sessions of TensorFlow 1 do not follow
    `tf.config`: there, `config.gpu_options.visible_device_list = str(sok.local_rank())` and
    `config.gpu_options.allow_growth = True` say the same.

    Raises:
        RuntimeError: the host has more workers than GPUs; or TensorFlow has run something on its GPUs before, and they
            cannot be chosen any more.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if size > 1 and len(gpus) > 1:
        if local_rank >= len(gpus):
            raise RuntimeError(
                f"Worker {local_rank} of this host has no GPU: TensorFlow sees {len(gpus)}. Start at most that many "
                "workers on a host, or hide the GPUs of workers that shall use the CPU: CUDA_VISIBLE_DEVICES=-1."
            )
        gpus = [gpus[local_rank]]
        try:
            tf.config.set_visible_devices(gpus, "GPU")
        except RuntimeError as error:
            raise RuntimeError(
                "TensorFlow has started its GPUs, so that sok.Init cannot choose this worker's any more. Call sok.Init "
                "before anything is computed, or choose it yourself: CUDA_VISIBLE_DEVICES."
            ) from error
    for gpu in gpus:
        _let_memory_grow(gpu)


def _let_memory_grow(gpu: tf.config.PhysicalDevice) -> None:
    # It is too late once TensorFlow runs, and there is no need where the user has chosen.
    with contextlib.suppress(RuntimeError, ValueError):
        if not tf.config.get_logical_device_configuration(gpu):
            tf.config.experimental.set_memory_growth(gpu, True)
