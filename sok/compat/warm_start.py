"""Tables that begin with the rows of another checkpoint: DeepRec's `CheckpointOption`."""

from __future__ import annotations

import warnings

import tensorflow as tf

from sok.base.types import Session
from sok.checkpoint import restore
from sok.checkpoint.native import prepare
from sok.compat.deeprec_options import CheckpointOption
from sok.table.counted import with_counted
from sok.table.table import EmbeddingVariable


def begin_from(table: EmbeddingVariable, option: CheckpointOption | None) -> None:
    """Reads the rows now, or in a v1 graph once there is a session. Collective."""
    if option is None or option.source is None:
        return
    if not table._in_graph_mode:
        return _load(table, option, None)
    waiting = _waiting(table.handle.graph)
    if all(table is not known for known, *_ in waiting):
        with tf.control_dependencies(None):
            waiting.append((table, option, table.step))
        prepare(list(with_counted({table.table_name: table}).values()))  # a session may finalize the graph


def _waiting(graph: tf.Graph) -> list[tuple[EmbeddingVariable, CheckpointOption, tf.Tensor]]:
    # In the graph and not beside it: tables hold on to their graph, so that it would never be freed.
    waiting: list[tuple[EmbeddingVariable, CheckpointOption, tf.Tensor]] | None = getattr(
        graph, "_sok_warm_starts", None
    )
    if waiting is None:
        waiting = graph._sok_warm_starts = []
    return waiting


def warm_start(session: Session, graph: tf.Graph | None = None) -> int:
    """Gives the tables of a v1 graph the rows that their `CheckpointOption` names; how many tables that were.

    A table that has been trained already, or was restored after a step, keeps its rows, unless its option says
    `always_load_from_specific_ckpt`.

    Args:
        session: a session of the graph, whose tables need no initialization.
        graph: None: that of the session.

    Raises:
        As `sok.restore`.

    Collective.

    Example:
        >>> import sok, tempfile
        >>> old = sok.EmbeddingVariable(dim=1, capacity=9, name="old")
        >>> old.assign([3], [[5.0]])
        >>> folder = tempfile.mkdtemp()
        >>> sok.save(folder, old)
        >>> option = sok.deeprec.EmbeddingVariableOption(ckpt=sok.deeprec.CheckpointOption(folder, "old"))
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     table = sok.deeprec.get_embedding_variable("new", 1, ev_option=option)
        ...     row = table.export()[1]
        ...     print(warm_start(session), session.run(row).tolist())
        1 [[5.0]]
    """
    loaded = 0
    for table, option, step in _waiting(graph or session.graph):
        if option.always_load_from_specific_ckpt or int(session.run(step)) == 0:
            _load(table, option, session)
            loaded += 1
    return loaded


class WarmStartHook(tf.compat.v1.train.SessionRunHook):
    """Calls `warm_start` once a MonitoredTrainingSession is made.

    Put it behind `sok.hooks.CheckpointSaverHook`, which restores the job's own checkpoint.

    Collective.

    Example:
        >>> with tf.Graph().as_default(), tf.compat.v1.train.MonitoredTrainingSession(hooks=[WarmStartHook()]):
        ...     pass
    """

    def after_create_session(self, session: Session, coord: tf.train.Coordinator) -> None:
        warm_start(session, tf.compat.v1.get_default_graph())


def _load(table: EmbeddingVariable, option: CheckpointOption, session: Session | None) -> None:
    assert option.source is not None
    folder, name = option.source
    tables, as_new = {name or table.table_name: table}, option.init_data_source is not None
    with warnings.catch_warnings():  # rows that are new here begin as this table says
        warnings.filterwarnings("ignore", ".*has another seed or initializer than.*", UserWarning)
        restore(folder, tables, [], slots=option.slots, session=session, progress=False, _as_new=as_new)
