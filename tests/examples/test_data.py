"""The streaming reader: values, splits, workers' parts, malformed lines."""

import gzip
import math
import threading

import numpy as np
import pytest
from criteo.data import BadLine, ClickLog, prefetch
from criteo.formats import AVAZU

from tests.messages import saying

FIELDS = 40


def line(label="1", ints=None, cats=None) -> str:
    return "\t".join([label, *(ints or [str(i) for i in range(13)]), *(cats or [f"{i:08x}" for i in range(26)])])


def write(path, lines, end="\n", last=True, compress=False):
    text = end.join(lines) + (end if last else "")
    data = text.encode()
    path.write_bytes(gzip.compress(data) if compress else data)
    return str(path)


def read(log, part="train", batch_size=7, **kwargs):
    batches = list(log.batches(part, batch_size, **kwargs))
    return tuple(np.concatenate([getattr(b, name) for b in batches]) for name in ("labels", "dense", "keys"))


@pytest.fixture
def numbered(tmp_path):
    """100 rows; row i has i in its first count and in its first category."""
    rows = [line(str(i % 2), [str(i), *["0"] * 12], [f"{i:08x}", *["0" * 8] * 25]) for i in range(100)]
    return write(tmp_path / "numbered.tsv", rows)


def test_values_missing_values_and_negative_counts(tmp_path):
    rows = [
        line("0", ["", "-3", "0", "7", *["1"] * 9], ["", "ffffffff", *["00000001"] * 24]),
        line("1"),
    ]
    labels, dense, keys = read(ClickLog(write(tmp_path / "a", rows), holdout=0.4), "train")
    _, _, other = read(ClickLog(write(tmp_path / "a", rows), holdout=0.4), "test")
    assert labels.tolist() == [0.0]
    np.testing.assert_allclose(dense[0, :4], [-1.0, 0.0, 0.0, math.log(8)], rtol=1e-6)
    assert keys[0, 1] == (1 << 33) | 0xFFFFFFFF
    assert keys[0, 0] not in (keys[0, 1], other[0, 0])  # missing is a key of its own
    assert np.unique(keys[0, 2:]).size == 24  # one value, 24 columns


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("compress", [True, False])
def test_line_ends_last_line_and_compression_do_not_matter(tmp_path, end, last, compress):
    rows = [line(cats=[*["0" * 8] * 25, tail]) for tail in ("", "00000007", "", "00000009")]
    log = ClickLog(write(tmp_path / "a", rows, end, last, compress), holdout=0.25)
    assert (log.rows, log.train_rows, log.test_rows) == (4, 3, 1)
    keys = np.concatenate([read(log, "train")[2], read(log, "test")[2]])
    missing = (25 << 33) | (1 << 32) | 25
    assert keys[:, 25].tolist() == [missing, (25 << 33) | 7, missing, (25 << 33) | 9]


def test_test_set_is_the_end_of_the_file(numbered):
    log = ClickLog(numbered, holdout=0.3)
    assert (read(log, "train")[2][:, 0]).tolist() == list(range(70))
    assert (read(log, "test")[2][:, 0]).tolist() == list(range(70, 100))
    assert (read(log, "test", limit=9)[2][:, 0]).tolist() == list(range(70, 79))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_parts_of_all_workers_make_up_each_global_batch(numbered, world_size):
    log = ClickLog(numbered, holdout=0.17)
    parts = [list(log.batches("train", 20, rank, world_size)) for rank in range(world_size)]
    assert {len(p) for p in parts} == {log.num_batches("train", 20)} == {5}
    for step, batches in enumerate(zip(*parts, strict=True)):
        keys = np.concatenate([b.keys[:, 0] for b in batches])
        assert keys.tolist() == list(range(20 * step, min(20 * step + 20, 83)))
        assert {b.global_rows for b in batches} == {keys.size}
    if world_size == 8:  # three rows for eight workers
        assert sorted(b[-1].labels.size for b in parts) == [0] * 5 + [1] * 3


def test_small_blocks_give_the_same_batches(numbered, monkeypatch):
    expected = read(ClickLog(numbered))
    monkeypatch.setattr("criteo.data._BLOCK_BYTES", 97)  # less than a line
    for got, want in zip(read(ClickLog(numbered)), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert read(ClickLog(numbered), "test")[2][:, 0].tolist() == list(range(80, 100))


BAD_ROWS = {
    "too few fields": (line()[:-9], "expected 40 fields, found 39"),
    "too many fields": (line() + "\tx", "expected 40 fields, found 41"),
    "empty line": ("", "expected 40 fields, found 1"),
    "label": (line("2"), r"field 1 \(label\) cannot be read: '2'"),
    "no label": (line(""), r"field 1 \(label\) cannot be read: ''"),
    "count": (line(ints=["1"] * 12 + ["1.5"]), r"field 14 \(I13\) cannot be read: '1.5'"),
    "category": (line(cats=["0" * 8] * 2 + ["xyz"] + ["0" * 8] * 23), r"field 17 \(C3\) cannot be read: 'xyz'"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_malformed_line_is_named_or_skipped_and_counted(tmp_path, kind):
    bad, message = BAD_ROWS[kind]
    path = write(tmp_path / "bad.tsv", [line("0")] * 5 + [bad] + [line("1")] * 6)
    with pytest.raises(BadLine, match=rf"bad\.tsv, line 6: {message}"):
        read(ClickLog(path, holdout=0.25), batch_size=3)
    log = ClickLog(path, holdout=0.25, skip_bad_lines=True)
    for _ in range(2):  # a second epoch does not count it again
        assert read(log, batch_size=3)[0].tolist() == [0.0] * 5 + [1.0] * 3
    assert log.skipped_lines == 1


def test_several_kinds_of_bad_lines_in_one_batch_are_skipped(tmp_path):
    rows = [line("0"), "", line("7"), line("1"), "x\ty", line("1")]
    log = ClickLog(write(tmp_path / "bad.tsv", [*rows, *[line()] * 4]), holdout=0.4, skip_bad_lines=True)
    assert read(log, batch_size=100)[0].tolist() == [0.0, 1.0, 1.0]
    assert log.skipped_lines == 3


def test_only_the_worker_with_the_bad_line_needs_to_parse_it(tmp_path):
    log = ClickLog(write(tmp_path / "bad.tsv", ["x", *[line()] * 9]), holdout=0.2)
    assert read(log, batch_size=8, rank=1, world_size=2)[0].size == 4
    with pytest.raises(BadLine, match="line 1:"):
        read(log, batch_size=8, rank=0, world_size=2)


def test_truncated_gzip_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "cut.gz"
    rng = np.random.default_rng(0)
    whole = gzip.compress(
        "\n".join(line(cats=[f"{v:08x}" for v in rng.integers(0, 2**32, 26)]) for _ in range(500)).encode()
    )
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=saying("cut.gz", "the compressed file is damaged or cut short")):
        ClickLog(str(path))


@pytest.mark.parametrize("rows", [0, 1])
def test_file_too_small_for_two_parts_is_an_error(tmp_path, rows):
    with pytest.raises(ValueError, match=f"has {rows} rows: too few"):
        ClickLog(write(tmp_path / "a", [line()] * rows, last=bool(rows)))


@pytest.mark.parametrize("holdout", [0.0, 1.0, -0.1])
def test_holdout_out_of_range_is_an_error(numbered, holdout):
    with pytest.raises(ValueError, match=saying("`holdout`", "between 0 and 1")):
        ClickLog(numbered, holdout=holdout)


def test_unknown_part_is_an_error(numbered):
    with pytest.raises(ValueError, match=saying("`part`", "'train' or 'test'", "Received: 'dev'")):
        ClickLog(numbered).num_batches("dev", 10)


def avazu_row(click="1", hour="14102123", site="1fbe01fe") -> str:
    return ",".join(["1000009418151094273", click, hour, "1005", "0", site, *[f"{i}" for i in range(18)]])


def test_avazu_rows_have_an_hour_and_a_key_for_each_category(tmp_path):
    rows = [",".join(AVAZU.columns), avazu_row(), avazu_row("0", "14103023"), avazu_row("0", "14102105", "")]
    log = ClickLog(write(tmp_path / "a.csv", rows), AVAZU, holdout=0.01 + 1 / 3)
    assert log.rows == 3
    labels, dense, keys = read(log, "train")
    _, other_dense, other = read(log, "test")
    assert labels.tolist() == [1.0, 0.0]
    np.testing.assert_array_equal(keys[0], keys[1])  # another day, the same hour
    np.testing.assert_allclose(dense[0], [math.sin(math.tau * 23 / 24), math.cos(math.tau * 23 / 24)], rtol=1e-5)
    assert np.flatnonzero(keys[0] != other[0]).tolist() == [0, 3]  # hour and site_id
    assert np.unique(keys[0]).size == 22
    assert not np.allclose(dense[0], other_dense[0])


def test_avazu_file_without_its_header_is_an_error(tmp_path):
    with pytest.raises(BadLine, match=saying("line 1", "the header", "'id,click,hour")):
        ClickLog(write(tmp_path / "a.csv", [avazu_row()] * 3), AVAZU)


def test_avazu_bad_hour_is_named(tmp_path):
    rows = [",".join(AVAZU.columns), avazu_row(), avazu_row(hour="1"), *[avazu_row()] * 8]
    with pytest.raises(BadLine, match=saying("line 3", "field 3 (hour) cannot be read", "'1'")):
        read(ClickLog(write(tmp_path / "a.csv", rows), AVAZU))


def test_prefetch_keeps_order_and_hands_errors_over():
    assert list(prefetch(iter(range(50)), depth=2)) == list(range(50))

    def failing():
        yield 1
        raise OSError("disk on fire")

    items = prefetch(failing())
    assert next(items) == 1
    with pytest.raises(OSError, match="disk on fire"):
        next(items)


def test_prefetch_left_early_ends_its_thread():
    items = prefetch(iter(range(1000)), depth=1)
    next(items)
    items.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


def test_real_criteo_sample_reads_like_a_plain_python_parser(criteo_sample):
    log = ClickLog(criteo_sample, holdout=0.2)
    assert (log.train_rows, log.test_rows) == (6400, 1600)
    got = [np.concatenate(pair) for pair in zip(read(log, "train", 1000), read(log, "test", 999), strict=True)]
    with gzip.open(criteo_sample, "rt") as file:
        rows = [text.rstrip("\n").split("\t") for text in file]
    assert got[0].tolist() == [float(row[0]) for row in rows]
    counts = [[math.log1p(max(int(v), 0)) if v else -1.0 for v in row[1:14]] for row in rows]
    np.testing.assert_allclose(got[1], counts, rtol=1e-6)
    keys = [[(c << 33) | (int(v, 16) if v else (1 << 32) | c) for c, v in enumerate(row[14:])] for row in rows]
    assert got[2].tolist() == keys


def test_real_avazu_sample_has_its_known_click_rate(avazu_sample):
    log = ClickLog(avazu_sample, AVAZU)
    assert log.rows == 8999
    labels = np.concatenate([read(log, part, 1000)[0] for part in ("train", "test")])
    assert abs(labels.mean() - 0.1737) < 5e-5
    ips = np.concatenate([read(log, part, 1000)[2][:, 10] for part in ("train", "test")])
    assert np.unique(ips).size == 6678
