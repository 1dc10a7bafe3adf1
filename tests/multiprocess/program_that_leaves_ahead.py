"""Leaves loops of `sok.ahead` in another place than its peer does, and ends. Run by test_failures.py."""

import sys
import time

import tensorflow as tf

import sok


def main(way: str) -> None:
    sok.Init(deadline=100)
    tables = [sok.EmbeddingVariable(2, 500, name=name) for name in ("first", "second")]

    def look_up(table):
        return lambda ids: sok.group_embedding_lookup([table], [ids])[0]

    def batches():
        for i in range(100):
            if way == "stuck" and sok.rank() == 1 and i == 2:
                time.sleep(1000)
            yield tf.constant([i], tf.int64)

    pipelines = [sok.ahead(batches(), look_up(table), depth=2) for table in tables]
    for number, pipeline in enumerate(pipelines):
        last = 2 if number == sok.rank() and way == "apart" else 0  # each rank has begun more of one than the other
        for i, _ in enumerate(pipeline):
            if i == last:
                break
    print("left the loops", flush=True)


# Guarded: pytest imports every module below tests/ to look for doctests.
if __name__ == "__main__":
    main(sys.argv[1])
