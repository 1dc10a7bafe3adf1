"""`sok.profile`: where the time of each step goes."""

from __future__ import annotations

from sok.base.profiling import Recording
from sok.job import context


class profile(Recording):
    """Writes a trace of what runs inside a `with`: one span for each part of each table's work in each step.

        with sok.profile("step.json"):
            model.fit(...)

    Open the file in https://ui.perfetto.dev or chrome://tracing. Spans are `route` (keys are checked and sorted by
    their owners), `exchange` (keys, rows or gradients travel), `narrow` and `widen` (before and after, if in 16 bit),
    `find` (rows are looked up or made), `combine` (rows are pooled), `find+combine` (both at once, on one worker),
    `backward` (gradients are brought to rows), `update` (the optimizer), and `collective` (what workers exchange for
    anything else). docs/profiling.md reads one.

    Args:
        path: the file, made or overwritten. With several workers each writes its own: 'step.json' becomes
            'step.rank0.json' and so on; Perfetto opens them together.
        max_spans: spans kept of each thread, at least 1; 128 bytes each. Of more the newest are kept, and a warning
            (and `dropped_spans` in the file) says how many are missing.

    After the `with`: `path`, the file's real name; `spans` in it; and `dropped`.

    Raises:
        ValueError: on entry, the file cannot be written, or `max_spans` makes no sense.
        RuntimeError: on entry, a profile runs already in this process; on leaving, the disk is full.

    Not collective: a single worker may do it. Also sees functions that were traced before. While no profile runs, a
    span costs a nanosecond. SOK_TRACE=FILE in the environment profiles a whole program.

    Example:
        >>> import os, sok, tempfile, tensorflow as tf
        >>> table = sok.EmbeddingVariable(4, 100, name="profiled")
        >>> with sok.profile(os.path.join(tempfile.mkdtemp(), "step.json")) as p:
        ...     rows = table.sparse_read(tf.constant([1, 2, 3], tf.int64))
        >>> p.spans, p.dropped
        (1, 0)
    """

    def __enter__(self) -> profile:
        transport = context.get_transport()
        self.start(transport.rank, transport.size)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
