"""Names that nothing else has: of tables, of optimizers, of variables that were given none."""

from __future__ import annotations

import collections
import threading
import weakref

import tensorflow as tf


class Names:
    """The names that one program has given out, kind by kind. All ranks of a program give the same ones.

    A name stays taken when what had it is gone: garbage is collected at other times on other ranks, which would then
    call the next table by different names.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: collections.defaultdict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    def take(self, kind: str, base: str) -> str:
        """`base`, or `base_1`, `base_2` and so on, whichever is the first that none of its kind has."""
        with self._lock:
            taken, name = self._taken[kind], base
            while taken[name]:
                name = f"{base}_{taken[base]}"
                taken[base] += 1
            taken[name] += 1
            return name

    def next_number(self, kind: str) -> int:
        """0, 1, 2 and so on."""
        with self._lock:
            self._taken["numbers"][kind] += 1
            return self._taken["numbers"][kind] - 1


_of_job = Names()
_of_graphs: weakref.WeakKeyDictionary[tf.Graph, Names] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def of_job() -> Names:
    """Those of the job, from its first table to `sok.shutdown()`."""
    return _of_job


def start_anew() -> None:
    """Frees the names of the job that ends."""
    global _of_job
    _of_job = Names()


def unique(kind: str, base: str) -> str:
    """`base`, `base_1`, ...: a name that none of its kind has in the v1 graph being built or, eagerly, in the job."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return of_job().take(kind, base)
        with _lock:
            of_graph = _of_graphs.setdefault(tf.compat.v1.get_default_graph(), Names())
        return of_graph.take(kind, base)
