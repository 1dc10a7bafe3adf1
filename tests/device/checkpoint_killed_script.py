"""tests/sok/checkpoint_killed_script.py with tables on the emulated GPU, which each forked process makes for itself."""

import sys
import warnings

import tensorflow as tf

import sok
from sok.base import _ops
from tests.sok import checkpoint_killed_script as script

script.ROWS = 2000


def tables():
    from tests.device.conftest import GPU

    with tf.device(GPU):
        made = [sok.EmbeddingVariable(8, 3000, name="item"), sok.EmbeddingVariable(2, 1000, name="other")]
    assert all(table.handle.device.endswith("GPU:0") for table in made)
    return made


if __name__ == "__main__":
    _ops.lib()
    warnings.simplefilter("ignore")
    script.tables = tables
    script.main(sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4])
