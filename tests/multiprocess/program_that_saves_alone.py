"""Worker 0 alone saves a model under OpenEmbedding's names; the other has ended its program, or does something else."""

import sys
import time

import keras
import numpy as np

import openembedding.tensorflow as embed
import sok


def main(way: str, path: str) -> None:
    sok.Init(deadline=12)
    ids = keras.Input((1,), dtype="int64")
    model = embed.distributed_model(keras.Model(ids, keras.layers.Embedding(100, 4, name="alone")(ids)))
    model.compile(embed.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(np.arange(20)[:, None] + sok.rank(), np.zeros([20, 1, 4]), verbose=0)
    if sok.rank() == 0:
        time.sleep(2)  # the other has ended by then
        model.save_weights(path)
        print("saved", flush=True)
    elif way == "never":
        time.sleep(1000)


# Guarded: pytest imports every module below tests/ to look for doctests.
if __name__ == "__main__":
    main(*sys.argv[1:])
