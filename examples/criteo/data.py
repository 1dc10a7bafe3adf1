"""Stream a click log from disk: constant memory, exact global batches, each worker parsing only its own part."""

from __future__ import annotations

import dataclasses
import gzip
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, TypeVar

import numpy as np

from criteo.fields import MARGIN
from criteo.formats import CRITEO, LogFormat, Parsed

_BLOCK_BYTES = 4 << 20
T = TypeVar("T")


class BadLine(ValueError):
    """A line that is not in the format of its file. The message has the file, the line number and the field."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One worker's part of a global batch. It may be shorter than the other workers' parts, or empty."""

    dense: np.ndarray  # [b, num_dense] float32
    keys: np.ndarray  # [b, num_sparse] int64
    labels: np.ndarray  # [b] float32
    global_rows: int
    """Lines in the whole batch, over all workers."""


def _open(path: str) -> BinaryIO:
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else open(path, "rb")  # type: ignore[return-value]


def _read(file: BinaryIO, size: int, path: str) -> bytes:
    try:
        return file.read(size)
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is damaged or cut short ({error}).") from error


class _LineReader:
    """Takes whole lines off a file, some thousands at a time."""

    def __init__(self, path: str, offset: int):
        self._path, self._file = path, _open(path)
        self._file.seek(offset)
        self._buffer = np.empty(0, dtype=np.uint8)
        self._line_ends = np.empty(0, dtype=np.int64)  # positions of the newlines not yet taken
        self._start = 0  # of the first line not yet taken
        self._at_end = False

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a buffer (MARGIN bytes longer than its text) with starts and ends [n] of n <= count lines."""
        while self._line_ends.size < count and not self._at_end:
            self._fill()
        ends, self._line_ends = self._line_ends[:count], self._line_ends[count:]
        starts = np.concatenate([[self._start], ends[:-1] + 1]) if ends.size else ends
        if ends.size:
            self._start = int(ends[-1]) + 1
        return self._buffer, starts, ends

    def _fill(self) -> None:
        block = _read(self._file, _BLOCK_BYTES, self._path)
        text = self._buffer[self._start : self._buffer.size - MARGIN] if self._buffer.size else self._buffer
        self._at_end = not block
        if self._at_end and text.size and text[-1] != ord("\n"):
            block = b"\n"
        self._line_ends = np.concatenate(
            [self._line_ends - self._start, np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + text.size]
        )
        self._buffer = np.concatenate([text, np.frombuffer(block + bytes(MARGIN), np.uint8)])
        self._start = 0

    def close(self) -> None:
        self._file.close()


class ClickLog:
    """A click log on disk whose last `holdout` fraction, in file order, is the test set.

    Args:
      path: plain or gzip-compressed text (told by its first bytes).
      log_format: what the columns are.
      holdout: fraction of the rows, 0 < holdout < 1.
      skip_bad_lines: leave malformed lines out and count them in `skipped_lines` instead of raising.
      progress: called with (bytes of the file read, its size) during the first pass, which counts the lines.

    Raises:
      ValueError: the file is empty, cut short, or too small to have both parts.
      BadLine: from `batches`, naming file, line and field.
    """

    def __init__(
        self,
        path: str,
        log_format: LogFormat = CRITEO,
        holdout: float = 0.2,
        skip_bad_lines: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ):
        if not 0.0 < holdout < 1.0:
            raise ValueError(f"`holdout` must be between 0 and 1, both excluded. Received: {holdout}.")
        self.path, self.format, self.skip_bad_lines = str(path), log_format, skip_bad_lines
        self._skipped: set[int] = set()  # line numbers, because a line may be read more than once
        self._marks = [(0, 0)]  # (byte offset of a line's start, lines before it), one a block
        if log_format.has_header:
            self._check_header()
        lines = self._count_lines(progress)
        self.rows = lines - log_format.has_header
        self.train_rows = self.rows - int(round(self.rows * holdout))
        self.test_rows = self.rows - self.train_rows
        if self.train_rows < 1 or self.test_rows < 1:
            raise ValueError(
                f"{path} has {max(self.rows, 0)} rows: too few for a training and a test part (holdout {holdout})."
            )

    def _check_header(self) -> None:
        with _open(self.path) as file:
            found = _read(file, 4096, self.path).split(b"\n", 1)[0].decode("utf-8", "backslashreplace").rstrip("\r")
        expected = self.format.separator.join(self.format.columns)
        if found != expected:
            raise BadLine(f"{self.path}, line 1: the header must be {expected!r}. Found: {found[:200]!r}.")

    def _count_lines(self, progress: Callable[[int, int], None] | None) -> int:
        lines = offset = 0
        last = b"\n"
        size = os.path.getsize(self.path)
        with _open(self.path) as file:
            raw = getattr(file, "fileobj", None) or file
            while block := _read(file, _BLOCK_BYTES, self.path):
                end = block.rfind(b"\n")
                lines += block.count(b"\n")
                if end >= 0:
                    self._marks.append((offset + end + 1, lines))
                offset += len(block)
                last = block[-1:]
                if progress:
                    progress(min(raw.tell(), size), size)
        return lines + (last != b"\n")

    @property
    def skipped_lines(self) -> int:
        """How many malformed lines this worker has met and left out."""
        return len(self._skipped)

    def num_batches(self, part: str, batch_size: int, limit: int | None = None) -> int:
        """Return how many global batches `batches` yields, the same on every worker."""
        first, last = self._range(part, limit)
        return -(-(last - first) // batch_size)

    def _range(self, part: str, limit: int | None) -> tuple[int, int]:
        if part not in ("train", "test"):
            raise ValueError(f"`part` must be 'train' or 'test'. Received: {part!r}.")
        first, last = (0, self.train_rows) if part == "train" else (self.train_rows, self.rows)
        return first, last if limit is None else min(last, first + limit)

    def batches(
        self, part: str, batch_size: int, rank: int = 0, world_size: int = 1, limit: int | None = None
    ) -> Iterator[Batch]:
        """Yield this worker's contiguous part of every global batch, in file order.

        The parts of all workers, one after the other, are the lines of the batch, so N workers see the batches that one
        sees. Every worker yields the same number of batches; the last is short, and some workers' parts may be empty.
        """
        first, last = self._range(part, limit)
        line = first + self.format.has_header
        offset, lines_before = max(mark for mark in self._marks if mark[1] <= line)
        reader = _LineReader(self.path, offset)
        try:
            while lines_before < line:
                lines_before += reader.take(min(line - lines_before, 65536))[1].size
            for begin in range(first, last, batch_size):
                count = min(batch_size, last - begin)
                buffer, starts, ends = reader.take(count)
                if starts.size != count:
                    raise ValueError(f"{self.path} became shorter while it was being read.")
                mine = slice(count * rank // world_size, count * (rank + 1) // world_size)
                parsed = self._parse(buffer, starts[mine], ends[mine], line + mine.start + 1)
                yield Batch(parsed.dense, parsed.keys, parsed.labels, count)
                line += count
        finally:
            reader.close()

    def _parse(self, buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray, first_line: int) -> Parsed:
        num_fields = len(self.format.columns)
        if starts.size:
            ends = ends - ((ends > starts) & (buffer[ends - 1] == ord("\r")))
            separators = np.flatnonzero(buffer[starts[0] : ends[-1]] == ord(self.format.separator)) + starts[0]
        else:
            separators = np.empty(0, dtype=np.int64)
        bounds = np.searchsorted(separators, np.concatenate([starts, ends[-1:]]))
        counts = np.diff(bounds) if starts.size else bounds[:0]
        whole = counts == num_fields - 1
        if not whole.all():
            rows = np.flatnonzero(~whole)
            self._report(first_line + rows, f"expected {num_fields} fields, found {counts[rows[0]] + 1}")
            separators = separators[np.repeat(whole, counts)]
        separators = separators.reshape(-1, num_fields - 1)
        field_starts = np.concatenate([starts[whole][:, None], separators + 1], axis=1)
        lengths = np.concatenate([separators, ends[whole][:, None]], axis=1) - field_starts
        parsed = self.format.parse(buffer, field_starts, lengths)
        bad = parsed.bad_field >= 0
        if not bad.any():
            return parsed
        row = int(bad.argmax())
        field = int(parsed.bad_field[row])
        start, length = int(field_starts[row, field]), int(lengths[row, field])
        text = buffer[start : start + min(length, 40)].tobytes().decode("utf-8", "backslashreplace")
        lines = first_line + np.flatnonzero(whole)[bad]
        self._report(lines, f"field {field + 1} ({self.format.columns[field]}) cannot be read: {text!r}")
        return Parsed(parsed.labels[~bad], parsed.dense[~bad], parsed.keys[~bad], parsed.bad_field[~bad])

    def _report(self, lines: np.ndarray, what: str) -> None:
        if not self.skip_bad_lines:
            raise BadLine(f"{self.path}, line {lines[0]}: {what}. (--skip-bad-lines leaves such lines out.)")
        self._skipped.update(lines.tolist())


def prefetch(items: Iterable[T], depth: int = 4) -> Iterator[T]:
    """Yield the items of `items`, produced by a background thread up to `depth` items ahead.

    An exception in the producer is raised here. Leaving the loop early ends the thread.
    """
    waiting: queue.Queue = queue.Queue(maxsize=depth)
    stopped = threading.Event()
    done = object()

    def put(item: object) -> bool:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((done, None))
        except BaseException as error:  # handed to the consumer, whatever it is
            put((done, error))

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is done:
                return
            yield item
    finally:
        stopped.set()
        thread.join()
