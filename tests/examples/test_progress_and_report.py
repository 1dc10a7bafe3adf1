"""What people look at: the progress lines and the HTML report."""

import io
import math
from html.parser import HTMLParser

import pytest
from criteo import report

from sok.base.progress import Progress, human


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_rewrites_one_line_and_clears_it():
    stream = Terminal()
    progress = Progress("training", stream=stream)
    progress._shown -= 1
    progress.update(500, 1000, "loss 0.5")
    progress.close()
    text = stream.getvalue()
    assert "\n" not in text
    assert "training [##########..........]  50%" in text
    assert "loss 0.5" in text
    assert text.endswith("\r")


def test_progress_in_a_pipe_writes_whole_lines_now_and_then():
    stream = io.StringIO()
    progress = Progress("training", stream=stream, interval=5)
    for done in range(100):
        progress.update(done, 1000)
    assert stream.getvalue() == ""  # not yet time
    progress._shown -= 6
    progress.update(100, 1000)
    progress.update(101, 1000)
    progress.close()
    assert stream.getvalue().count("\n") == 1
    assert "\r" not in stream.getvalue()


def test_progress_of_the_other_ranks_is_silent():
    stream = io.StringIO()
    progress = Progress("training", enabled=False, interval=0, stream=stream)
    progress.update(1, 2)
    progress.close()
    assert stream.getvalue() == ""


def test_human_numbers():
    assert [human(n) for n in (0, 999, 1000, 1_500_000, 2.5e9)] == ["0", "999", "1.0k", "1.5M", "2.5G"]


RESULT = {
    "auc": 0.8123, "logloss": 0.44, "best_auc": 0.8381, "best_logloss": 0.41, "samples_per_second": 54321.0,
    "baseline_auc": 0.8011, "baseline_logloss": 0.45, "steps": 30, "workers": 2,
    "calibration": {"ratio": 1.0421, "bins": [{"predicted": p, "observed": p + 0.01, "rows": 9} for p in (0.1, 0.3)]},
    "baseline_calibration": {"ratio": 0.9, "bins": [{"predicted": 0.2, "observed": 0.1, "rows": 9}]},
    "rows": 300, "rows_per_shard": [140, 160], "train_rows": 800, "test_rows": 200,
    "settings": {"model": "dlrm", "data": "/data/<a>&b.tsv", "learning_rate": 0.002, "json": None},
}  # fmt: skip
HISTORY = [
    {
        "step": s,
        "train_loss": 0.6 - s / 100,
        "test_auc": 0.7 + s / 400,
        "test_logloss": 0.5,
        "seconds": s / 2,
        "samples_per_second": 54321.0 - s,
    }
    for s in (10, 20, 30)
]


class Checker(HTMLParser):
    """Fails on tags that are not closed in order, and collects what a test asks about."""

    VOID = {"meta", "line", "rect", "polyline", "circle"}

    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_report_is_one_well_formed_page_without_outside_references(tmp_path):
    path = report.write_report(tmp_path / "new" / "report.html", RESULT, HISTORY)
    page = path.read_text()
    checker = Checker(page)
    for expected in ("0.8123", "0.8381", "0.8011", "1.0421", "54.3k", "<a>&b.tsv", "worker 1", "160", "0.002"):
        assert expected in checker.text, expected
    assert not {tag for tag, _ in checker.seen} & {"script", "link", "img", "iframe"}
    assert "http" not in page
    lines = [attrs["points"] for tag, attrs in checker.seen if tag == "polyline"]
    # Loss: training, test, baseline, best. AUC: test, baseline, best. Rows per second. Calibration: model and exact; of
    # the baseline there is one point, a dot.
    assert [len(points.split()) for points in lines] == [3, 3, 2, 2, 3, 2, 2, 3, 2, 2]
    assert [tag for tag, _ in checker.seen].count("circle") == 3
    widths = [float(attrs["width"]) for tag, attrs in checker.seen if tag == "rect"]
    assert widths[0] / widths[1] == pytest.approx(140 / 160, rel=1e-3)


@pytest.mark.parametrize("history", [[], HISTORY[:1], [{**HISTORY[0], "test_auc": None, "samples_per_second": None}]])
def test_report_of_a_short_run_without_known_truth(tmp_path, history):
    result = {**RESULT, "best_auc": None, "best_logloss": None, "rows_per_shard": [0], "workers": 1}
    result |= {"auc": None, "baseline_auc": None, "calibration": {**RESULT["calibration"], "ratio": None}}
    checker = Checker(report.write_report(tmp_path / "report.html", result, history).read_text())
    drawn = [attrs["points"] for tag, attrs in checker.seen if tag == "polyline"]
    assert all(math.isfinite(float(x)) for points in drawn for pair in points.split() for x in pair.split(","))
    assert [tag for tag, _ in checker.seen].count("html") == 1


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.4137, 0.6921), (5, 5), (0, 313), (1e-4, 9e-4), (0.75, 0.8381)])
def test_ticks_are_round_and_cover_the_range(low, high):
    ticks = report._ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
