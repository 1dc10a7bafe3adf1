"""`EmbeddingVariable`: one shard of a table of rows, trainable like any TensorFlow variable."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from sok.base import _ops, keras_calls, names, strategies
from sok.base.types import TensorLike
from sok.job import context
from sok.job.job import Job, job_of
from sok.table import custom_gradients, on_servers, reading
from sok.table import state as table_state
from sok.table.as_variable import AsVariable
from sok.table.evicted import TellsEvicted, with_rows_counted
from sok.table.initializers import derived_seed, to_spec
from sok.table.keys import as_keys
from sok.table.on_servers import over_shards
from sok.table.options import TableOptions, said_once, whole_number
from sok.table.placement import Part, Placement
from sok.table.row_terms import RowTerms
from sok.table.shards import Shards
from sok.table.weights import rows_behind

_MAX_DIM = 2**20
_MAX_CAPACITY = 2**32 - 2  # row numbers are 32-bit words in the index, and two of them mean "no row"

_by_handle: weakref.WeakValueDictionary[int, EmbeddingVariable] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _lookup_rows(*_: Any, **__: Any) -> tf.Tensor:
    raise NotImplementedError("sok.lookup.lookup tells how tables are looked up; it is loaded with the native library.")


def look_up_with(function: Callable[..., tf.Tensor]) -> None:
    """Tells how tables are looked up: `sok.lookup`, which is built on tables, does so when it is loaded."""
    global _lookup_rows
    _lookup_rows = function


def _reshard(*_: Any) -> None:
    raise NotImplementedError("sok.table.resharding moves tables; it is loaded with the native library.")


def reshard_with(function: Callable[..., None]) -> None:
    """Tells how tables get another placement: `sok.table.resharding`, which is built on tables, does so."""
    global _reshard
    _reshard = function


class EmbeddingVariable(TellsEvicted, AsVariable):
    """This worker's shard of a table that maps keys to rows of `dim` floats.

    It is a trainable variable: `tape.gradient` gives `tf.IndexedSlices` whose indices are row ids of this shard, which
    `sok.optimizers` apply. Its declared TensorFlow `shape` is `(0, dim)`: nothing may read it as a dense matrix.
    The row of `key` lives where `placement` says, by default on rank `key % world_size`. A row that was never seen
    holds its initial value, a pure function of the table's seed and the key. Like any variable it is placed on the GPU
    if there is one (docs/gpu.md), and where `tf.device` says.

    Args:
        dim: length D of a row, at least 1.
        capacity: rows that this worker's shard may hold, at least 1.
        name: for messages, collectives and files; made unique (`name`, `name_1`, ...) until `sok.shutdown()`, which
            frees all names. Equal on all workers.
        options: all its other properties.
        **properties: instead of `options`, the arguments of `sok.TableOptions` by themselves; and `owner`, short
            for `placement=sok.table_wise(owner)`.

    Raises:
        ValueError: an argument is out of range, or given twice.
        RuntimeError: a `tf.distribute` strategy with replicas is in force.
        OSError: nothing can be written to the folder of `storage`.

    Collective if `initializer` is none of Keras' random or constant ones.

    Example:
        >>> v = EmbeddingVariable(dim=2, capacity=10, name="doc", initializer="ones")
        >>> v.sparse_read(tf.constant([3, -7], tf.int64)).numpy().tolist()
        [[1.0, 1.0], [1.0, 1.0]]
        >>> int(v.size())
        0

    Source: the role of SOK v1's `EmbeddingVariable`; see docs/migrating.md for differences.
    """

    def __init__(
        self,
        dim: int,
        capacity: int,
        *,
        name: str | None = None,
        options: TableOptions | None = None,
        **properties: Any,
    ) -> None:
        self._dim = whole_number("dim", dim, _MAX_DIM)
        self._capacity = whole_number("capacity", capacity, _MAX_CAPACITY)
        self._options = options = said_once(options, "options", **properties)
        self._key_dtype = tf.as_dtype(options.key_dtype)
        self._job = job = context.get_job()
        options.placement.check(job.holders, options.hashed, self._dim)
        self._options = options = with_rows_counted(options, self._dim, self._capacity, job.holders)
        strategies.refuse(f"The embedding table {name!r}" if name else "An embedding table", may_be_shared=True)
        self._table_name = names.unique("table", name or "embedding_variable")
        # A shard's capacity changes with the number of workers where it is a share of the legal keys.
        spec = to_spec(options.initializer, options.num_keys or self._capacity, self._dim)
        if options.seed is not None:
            self._seed = derived_seed("variable", options.seed)
        elif spec.seed is not None:
            self._seed = derived_seed("initializer", spec.seed)
        else:
            self._seed = derived_seed("table", context.get_seed(), self._table_name)
        self._initializer_spec = spec
        if options.storage is not None and job.servers is None:
            options.storage.prepare(self._table_name)
        with ops.init_scope():
            graph_mode = not tf.executing_eagerly()
            handle = self._take_shards(Shards.make(self, options, job, self._capacity))
            super().__init__(
                trainable=options.trainable,
                shape=tf.TensorShape([0, self._local_dim]),
                dtype=tf.float32,
                handle=handle,
                handle_name=self._table_name,
                unique_id=f"sok_{self._table_name}_{id(self)}" if not graph_mode else self._table_name,
                initial_value=None,
                initializer_op=tf.no_op() if graph_mode else None,
                is_initialized_op=None,
                cached_value=None,
                name=self._table_name,
                # tf_keras asks whether a model's variables were made under the strategy that trains it.
                distribute_strategy=tf.distribute.get_strategy() if tf.distribute.has_strategy() else None,
            )
            if graph_mode and options.trainable:
                # Not a global variable: initialisers, Savers and broadcasts of v1 would try to read it as a matrix.
                tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES, self)
        _by_handle[id(handle)] = self
        on_servers.drop_at_end(self)
        self.creation_number = next(_numbers)  # the tables of a program in the order in which they were made
        self.keeps_versions = False  # its file does, for saves that leave rows there; of a v1 graph, in some session
        self.is_known_crowded = False  # one worker has far more rows than the others, and somebody said so
        self.row_terms: RowTerms | None = None  # what steps add to its rows, and let them be
        self.regularizer = None  # what Keras reads of any variable, to add a penalty of the matrix
        self.overwrite_with_gradient = False
        self.path = self._table_name

    def make_handle(self, **attributes: Any) -> tf.Tensor:
        """The handle of a native table with these attributes."""
        return _ops.lib().sok_table_handle(**attributes)

    def _take_shards(self, shards: Shards) -> tf.Tensor:
        """Is from now on what these hold. Gives the handle of this worker's."""
        self._options, self._job, self._capacity = shards.options, shards.job, shards.capacity
        self._parts, self._local_dim = shards.parts, shards.own.dim
        self._part_handles, self._attributes = shards.handles, shards.attributes
        self.on_servers = shards.on_servers
        return shards.handle

    def move_to(self, shards: Shards) -> None:
        """Lies there from now on: see `sok.table.resharding`, which has brought the rows."""
        _by_handle.pop(id(self.handle), None)
        self._handle = self._take_shards(shards)
        self._shape = tf.TensorShape([0, self._local_dim])
        _by_handle[id(self._handle)] = self

    @property
    def options(self) -> TableOptions:
        """What it was made with."""
        return self._options

    @property
    def dim(self) -> int:
        """Length of a row."""
        return self._dim

    @property
    def local_dim(self) -> int:
        """How many of a row's columns this worker's shard has: `dim`, unless `placement` cuts rows."""
        return self._local_dim

    @property
    def num_copies(self) -> int:
        """How many workers have the same rows: 1, unless `placement` copies them."""
        return self.world_size if self.placement.is_copied else 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """What native ops take for tables of their own; the handles are `part_handles`. `handle` is that held here."""
        return self._parts

    @property
    def part_handles(self) -> list[tf.Tensor]:
        """Of each part; of a table on parameter servers, whose rows lie there, what routes keys."""
        return self._part_handles if self.on_servers is None else [self.on_servers.image_here()]

    @property
    def capacity(self) -> int:
        """Rows this worker's shard may hold; of a table on parameter servers, that of each."""
        return self._capacity

    @property
    def key_dtype(self) -> tf.DType:
        """Dtype of keys."""
        return self._key_dtype

    @property
    def num_keys(self) -> int | None:
        """How many row numbers are legal keys, in use or not, of all workers together; None: every key is legal."""
        if self.hashed:
            return None
        return self._attributes["num_keys"] or self.capacity * self.placement.num_shards(self.world_size)

    @property
    def hashed(self) -> bool:
        """False if keys are row numbers (`use_hashtable=False`)."""
        return self._options.hashed

    @property
    def table_name(self) -> str:
        """The unique name, the same on all workers."""
        return self._table_name

    @property
    def m_var_name(self) -> str:
        """SOK v1's word for `table_name`, by which `sok.Saver` calls its files."""
        return self._table_name

    @property
    def job(self) -> Job:
        """The workers that share the table."""
        return self._job

    @property
    def world_size(self) -> int:
        """How many they are; of a table on parameter servers, how many servers hold rows."""
        return self._job.holders

    @property
    def rank(self) -> int:
        """Which of them holds this shard."""
        return self._job.rank

    @property
    def owner(self) -> int | None:
        """The rank that holds all rows; None if they are spread over all ranks."""
        return self.placement.owner

    @property
    def placement(self) -> Placement:
        """Which rank holds which rows."""
        return self._options.placement

    @property
    def way_home(self) -> str:
        """How the owner of rows answers another worker's lookup: 'auto', 'rows' or 'sums'."""
        return self._options.way_home

    @property
    def exchange_dtype(self) -> str:
        """What rows and their gradients travel in: 'float32', 'float16' or 'bfloat16'."""
        return self._options.exchange_dtype

    @property
    def seed(self) -> int:
        """Seed of the initial values."""
        return self._seed

    def __repr__(self) -> str:
        kind = "hashed" if self.hashed else "identity"
        used = ""
        if tf.executing_eagerly() and not self._in_graph_mode:
            used = f", rows {int(self.num_rows()):,} of {self._capacity:,}"
        place = f"on {self.world_size} servers" if self.on_servers else f"shard {self.rank} of {self.world_size}"
        if self.placement.words:
            place += f", {self.placement.words}"
        if self.way_home != "auto":
            place += f", home by {self.way_home}"
        if self.exchange_dtype != "float32":
            place += f", exchanged in {self.exchange_dtype}"
        return (
            f"<EmbeddingVariable '{self._table_name}' dim={self._dim}, {kind} {self._key_dtype.name} keys{used}, "
            f"{place}>"
        )

    __str__ = __repr__

    @over_shards(on_servers.total)
    def num_rows(self) -> tf.Tensor:
        """Rows in use in this worker's shard: int64 scalar. Not collective."""
        return _ops.lib().sok_table_size(self.handle)

    @property
    @over_shards(on_servers.largest)
    def step(self) -> tf.Tensor:
        """Update calls so far (`apply_gradients` with this table), with a gradient or None: int64 scalar.

        The same on all workers, whatever each of them has looked up. Checkpoints keep it. Not collective.
        """
        return _ops.lib().sok_table_step(self.handle)

    @property
    def ids_seen(self) -> tf.Tensor:
        """Ids that this worker has looked up so far where lookups make rows, with their repeats: int64 scalar.

        Counted since the table was made, in no checkpoint. Not collective.
        """
        return _ops.lib().sok_table_ids(self.part_handles[0] if self.on_servers else self.handle)

    def size(self) -> tf.Tensor:
        """The same as `num_rows`; of a `sok.DynamicVariable` what SOK v2 calls its size."""
        return self.num_rows()

    @property
    def counts_for_all(self) -> bool:
        """Whether sums over workers take what this one has: rows that several have, or parts of, count once."""
        return self.rank in self.placement.writers(self.world_size)[: 1 if self.placement.cuts_rows else None]

    def total_size(self) -> tf.Tensor:
        """Rows in use in all shards: int64 scalar. Collective."""
        if self.on_servers:
            return self.num_rows()
        name = context.unique_collective_name(f"sok/{self._table_name}/size")
        mine = self.num_rows() if self.counts_for_all else tf.zeros([], tf.int64)
        return job_of([self]).transport.grouped_all_reduce([mine], name, average=False)[0]

    def stats(self, details: bool = False) -> dict[str, int]:
        """What all workers have done with this table since it was made; in no checkpoint. Collective; eager only.

        Args:
            details: adds `collisions` of keys in the index, which differ from run to run, `bytes_in_memory`, and
                `bytes_exchanged` of lookups and gradients, as `sok.trace` counts them: docs/profiling.md.

        Returns:
            `rows` in use now; `candidates`: keys that `admission` counts, without a row now; `made`: rows made;
            `refused`: keys of lookups for training that got no row, as they reached the owner, repeats included;
            `evicted`: rows that `eviction` took. (An index on a GPU counts no collisions.) With a file `rows_in_memory`
            now, and how many there can be, `cache_rows`; `hits` and `misses`: distinct rows of calls that were in
            memory, or came from the file; `read_ahead`: rows that `sok.ahead` had read before their step, which are no
            misses; `bytes_read` and `bytes_written` of the file; the bytes that it has now, `bytes_in_file`, and that
            `memory_bytes` bounds, `bytes_in_memory`. On a GPU with `storage` or policies `gpu_rows` now, and how many
            there can be, `gpu_cache_rows`; `gpu_hits` and `gpu_misses`: rows there, or brought; `bytes_on_gpu`.
        """
        return table_state.stats(self, details)

    @over_shards(on_servers.either)
    def history(self, keys: TensorLike) -> tuple[tf.Tensor, tf.Tensor]:
        """What a table with `admission` or `eviction` knows of keys [n], with a row or waiting for one. Not collective.

        Returns:
            (counts, last), both [n] int64: in how many steps a batch held the key; `step` after the last of these.
            Zeros of keys that no batch held, or that this worker's shard does not have. FailedPreconditionError without
            policies.
        """
        return table_state.history(self, keys)

    def sparse_read(self, keys: TensorLike, name: str | None = None) -> tf.Tensor:
        """The rows of `keys` as they stand, without inserting any. Collective; differentiable.

        `tf.nn.embedding_lookup(table, keys)` and `tf.gather(table, keys)`, which call it, look up as
        `sok.all2all_dense_embedding` does: a key without a row gets one, but in Keras' evaluate and predict.

        Args:
            keys: [...] of the table's key dtype. A key without a row reads as its initial value.
            name: ignored; here for `tf.Variable`'s signature.

        Returns:
            [..., D] float32. Between workers, too, they travel in float32.
        """
        if custom_gradients.gathers():
            return _lookup_rows(self, keys, training=not keras_calls.is_evaluating())
        return _lookup_rows(self, keys, training=False, exact=True)

    def assign(
        self,
        keys: TensorLike,
        values: TensorLike | None = None,
        use_locking: bool | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Stores rows, making those that are missing.

        Args:
            keys: [n] of the table's key dtype. Keys that other workers own are ignored, so all workers may make the
                same call with all keys. Of equal keys the last one counts. Without `values`: what `model.get_weights()`
                has for this table, which then holds those rows and no others (`set_weights` calls it so).
            values: [n, D] float32.

        Returns:
            None, or in a v1 graph the op to run. Not collective.

        Raises:
            tf.errors.ResourceExhaustedError: the shard has no room; nothing was stored.
            tf.errors.InvalidArgumentError: shapes do not fit, or a key is outside an identity table.
        """
        if values is None:
            return self._assign_copy(keys)
        reading.note_written(self)
        return self._assign_rows(self._as_keys(keys), tf.convert_to_tensor(values, tf.float32))

    @over_shards(on_servers.done)
    def _assign_rows(self, keys: tf.Tensor, values: tf.Tensor) -> tf.Operation | None:
        return _ops.lib().sok_table_assign(self.handle, keys, self.own_columns(values))

    def own_columns(self, values: tf.Tensor) -> tf.Tensor:
        """Of rows [n, D] the columns of this worker's shard."""
        if self._local_dim == self._dim:
            return values
        first = self._attributes["first_column"]
        return tf.ensure_shape(values, [None, self._dim])[:, first : first + self._local_dim]

    def _assign_copy(self, array: Any) -> tf.Operation | None:
        rows = rows_behind(array)
        if rows is None:
            if np.shape(array) != (0, self._dim):
                raise TypeError("assign takes keys and values: variable.assign(keys, values).")
            # Weights that were calculated with, or came from a file.
            self.warn_not_saved()
            return None
        stale = np.setdiff1d(self.export()[0].numpy(), rows.keys)
        self.erase(stale.astype(self._key_dtype.as_numpy_dtype))
        return self.assign(rows.keys, rows.values)

    @over_shards(on_servers.one_after_the_other)
    def export(self) -> tuple[tf.Tensor, tf.Tensor]:
        """All rows in use in this worker's shard. Not collective.

        Returns:
            keys [n] of the key dtype and values [n, local_dim] float32, in the order the rows were made.
        """
        return _ops.lib().sok_table_export(self.handle, key_dtype=self._key_dtype, dim=self._local_dim)

    @over_shards(on_servers.one_after_the_other)
    def slots(self, slot_set: str) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Optimizer state of all rows in use: keys [n], slots [n, K * D + S] of K vectors and S scalars,
        stamps [n] (-1: none). Not collective."""
        return _ops.lib().sok_table_slots(self.handle, key_dtype=self._key_dtype, slot_set=slot_set)

    def restore_rows(
        self, keys: TensorLike, values: TensorLike, slots: TensorLike | None = None, **slot_set: Any
    ) -> tf.Tensor:
        """Stores rows with the slots of an optimizer: see `sok.table.state.restore_rows`. Not collective."""
        return table_state.restore_rows(self, keys, values, slots, **slot_set)

    @over_shards(on_servers.done)
    def reserve(self, num_rows: int) -> tf.Operation | None:
        """Takes the memory for `num_rows` rows of this worker's shard now, so that no later step waits for it.

        Args:
            num_rows: rows in all, at most `capacity`.

        Returns:
            None, or in a v1 graph the op to run. Not collective. Slots that an optimizer has not made yet are not
            counted: reserve after its first step, or let the first step take them.

        Raises:
            tf.errors.InvalidArgumentError: more than the capacity.
            tf.errors.ResourceExhaustedError: that is more than the machine, or the container, has available now
                (`MemAvailable`); then nothing was reserved.

        Example:
            >>> v = EmbeddingVariable(dim=2, capacity=1000, name="reserved")
            >>> v.reserve(500)
        """
        return _ops.lib().sok_table_reserve(self.handle, tf.cast(num_rows, tf.int64))

    def reshard(self, placement: Placement, capacity: int | None = None) -> None:
        """Gives the table another placement, in memory: see `sok.reshard`. Collective."""
        _reshard(self, placement, capacity)

    @over_shards(on_servers.total)
    def erase(self, keys: TensorLike) -> tf.Tensor:
        """Removes rows of this shard; keys of other workers are ignored. Returns how many it removed, int64 scalar."""
        return _ops.lib().sok_table_erase(self.handle, self._as_keys(keys))

    def _as_keys(self, keys: Any) -> tf.Tensor:
        return as_keys(keys, self._key_dtype, self._table_name)


def table_of(handle: tf.Tensor) -> EmbeddingVariable | None:
    """The table whose `handle` this is, itself and not what a function made of it; None if it is none's."""
    found = _by_handle.get(id(handle))
    return found if found is not None and found.handle is handle else None


def is_embedding_variable(variable: object) -> bool:
    """Whether `variable` is an `EmbeddingVariable`."""
    return isinstance(variable, EmbeddingVariable)


def checked_table(variable: object, argument: str, kinds: str = "an embedding variable") -> EmbeddingVariable:
    """`variable`; TypeError if it is no `EmbeddingVariable`, which says that `argument` must be one of `kinds`."""
    if not isinstance(variable, EmbeddingVariable):
        raise TypeError(f"`{argument}` must be {kinds}. Received: {variable!r}.")
    return variable
