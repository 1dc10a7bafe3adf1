"""What the training checks share: samples, how ranks share them, and what a rank reports of its tables."""

import numpy as np
import tensorflow as tf

from sok.job import agreement, context

STEPS, BATCH, SLOTS, IDS_PER_SLOT, DIM = 20, 24, 3, 2, 4
STEPS_AT_ONCE = 4  # Keras' steps_per_execution, where it is used


def samples():
    """Ids [STEPS * BATCH, SLOTS, IDS_PER_SLOT], of which some are seen often and most seldom, and labels.

    Every fifth batch is the same, so that losses fall.
    """
    rng = np.random.default_rng(42)
    ids = (rng.zipf(1.3, (5 * BATCH, SLOTS, IDS_PER_SLOT)) % 97 - 48).astype(np.int64)
    labels = rng.integers(0, 2, 5 * BATCH).astype(np.float32)
    return np.tile(ids, (STEPS // 5, 1, 1)), np.tile(labels, STEPS // 5)


def even_shares(world):
    """This rank's samples of each step: as many on every rank."""
    part = BATCH // world.size
    return [slice(step * BATCH + world.rank * part, step * BATCH + (world.rank + 1) * part) for step in range(STEPS)]


def uneven_shares(world):
    """As a ragged last batch, and worse: any number of samples, often none."""
    rng = np.random.default_rng(7)
    shares = []
    for step in range(STEPS):
        cuts = np.sort(rng.integers(0, BATCH + 1, 3))[: world.size - 1]
        if step % 5 == 0:
            cuts = np.zeros_like(cuts)  # all samples on the last rank
        bounds = step * BATCH + np.concatenate([[0], cuts, [BATCH]])
        shares.append(slice(bounds[world.rank], bounds[world.rank + 1]))
    return shares


def shards(variables, slot_sets, run=lambda x: [t.numpy() for t in x]):
    """By table: this rank's keys with row, slots and stamp."""
    result = {}
    for name, variable in variables.items():
        keys, rows = run(variable.export())
        slot_keys, slots, stamps = run(variable.slots(slot_sets[name]))
        np.testing.assert_array_equal(keys, slot_keys)
        assert all(int(key) % context.size() == context.rank() for key in keys)
        result[name] = {
            int(key): np.concatenate([row, slot, [stamp]])
            for key, row, slot, stamp in zip(keys, rows, slots, stamps, strict=True)
        }
    return result


def by_rank_0(function):
    """What one worker computes, of what JSON can hold, for all: each would find the same, in time that others need."""
    transport = context.get_transport()
    return agreement.together(transport, "test/by_rank_0", lambda: None if transport.rank else function())[0]


def sum_over_ranks(values):
    return context.get_transport().all_gather(tf.constant([values], tf.float64), "test/losses").numpy().sum(axis=0)


def shared_folder(folder):
    """That of rank 0, on all ranks."""
    return type(folder)(agreement.together(context.get_transport(), "test/folder", lambda: str(folder))[0])
