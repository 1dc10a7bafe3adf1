"""docs/extending.md answers where things are: by files that are there, and names that are in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = r"[\w/]+/[\w/]+\.(?:py|h|cc|cu)"


def rows_of(text: str) -> dict[str, tuple[str, str]]:
    """Question -> the two cells that answer it."""
    table = text.partition("\n## Questions\n")[2].partition("\n#")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return {question.strip(): (first, then) for question, first, then in rows}


def missing_names(text: str) -> list[str]:
    """Names that the text says are in a file (`file`, `name`; or `name` in `file`), and are not."""
    named = re.findall(rf"`({FILE})`, `([\w.]+)(?:\(.*?\))?`", text)
    named += [(file, name) for name, file in re.findall(rf"`([\w.]+)` in `({FILE})`", text)]
    assert named, "this would not see anything"
    return [
        f"{file}: {name}"
        for file, name in named
        if not re.search(rf"\b{name.split('.')[-1]}\b", (ROOT / file).read_text(encoding="utf-8"))
    ]


TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [
        "an optimizer",
        "a place for the rows",
        "a placement",
        "a collective",
        "at another world size",
        "whether a lookup makes rows",
        "TensorFlow's checkpoints meet a table",
        "learn that one has failed",
        "gather, reduce or broadcast",
        "the gradient of a lookup",
    ],
)
def test_each_question_of_a_newcomer_has_one_or_two_places(words):
    answers = next(cells for question, cells in rows_of(TEXT).items() if words in question)
    files = re.findall(rf"`({FILE}|[\w/]+)`", " ".join(answers))
    assert any((ROOT / name).exists() for name in files)


def test_names_are_in_the_files_that_are_said_to_have_them():
    assert missing_names(TEXT) == []


def test_a_name_that_is_not_there_is_seen():
    text = (
        "`sok/job/job.py`, `job_of(tables)`; `sok/job/job.py`, `no_such`; `Placement.xyz` in `sok/table/placement.py`"
    )
    assert missing_names(text) == ["sok/job/job.py: no_such", "sok/table/placement.py: Placement.xyz"]
