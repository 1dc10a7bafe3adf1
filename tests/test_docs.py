"""The Python in README and docs/ runs as it stands.

A block that imports begins a program; one that does not goes on with the one before it. All programs of a page run in
one folder, one after the other. A paragraph before a block that begins with "CI does not run this:" says why; one
that ends with "from `PATH`:" says that its lines are in that file.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of Python, and the paragraph before it."""

    page: str
    line: int
    before: str
    code: str

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        said = re.match(r"CI does not run this: (.+)", self.before, re.S)
        return said[1] if said else None

    @property
    def source(self) -> str | None:
        """The file that it is a part of."""
        said = re.search(r"from `([\w/.]+)`:$", self.before)
        return said[1] if said else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    found = []
    for match in re.finditer(r"^```py(?:thon)?\n(.*?)^```$", text, re.M | re.S):
        before = text[: match.start()].rstrip("\n")
        found.append(Block(page, text[: match.start()].count("\n") + 1, before.rpartition("\n\n")[2], match[1]))
    return found


def programs_of(blocks: list[Block]) -> list[Block]:
    """What is run: each block with those that go on with it."""
    programs: list[Block] = []
    for block in blocks:
        if block.reason or block.source:
            continue
        if programs and not re.search(r"^(import|from) ", block.code, re.M):
            programs[-1] = dataclasses.replace(programs[-1], code=f"{programs[-1].code}\n{block.code}")
        else:
            programs.append(block)
    return programs


BLOCKS = {name: blocks_of(name, page.read_text("utf-8")) for page in PAGES for name in [str(page.relative_to(ROOT))]}
PROGRAMS = {name: programs_of(blocks) for name, blocks in BLOCKS.items()}


# What the first program of a page prints, beside what else it does.
PRINTS = {
    "docs/export.md": "table 'distributed_embedding': 0 rows of 4 as float32, 24 bytes\n(1, 1)\n",
    "docs/profiling.md": "40 spans in ",
}


@pytest.fixture(scope="module")
def outcomes(forked, tmp_path_factory):
    """What became of a page's programs, which run when the first of them is asked for."""
    done: dict[str, dict[int, object]] = {}

    def of(page):
        if page not in done:
            folder = tmp_path_factory.mktemp("page")
            done[page] = {program.line: forked.run(program.code, folder) for program in PROGRAMS[page]}
        return done[page]

    return of


@pytest.mark.parametrize("program", [p for programs in PROGRAMS.values() for p in programs], ids=str)
def test_the_program_runs(program, outcomes):
    ended = outcomes(program.page)[program.line]
    assert ended.status == 0, ended.stderr[-3000:]
    if program.page == "README.md" and "fit(" not in program.code:  # it ends with the loss, brought down by training
        assert float(ended.stdout.split()[-1]) < 0.65
    if program == PROGRAMS[program.page][0]:
        assert PRINTS.get(program.page, "") in ended.stdout


@pytest.mark.parametrize("block", [b for blocks in BLOCKS.values() for b in blocks if b.source], ids=str)
def test_the_lines_are_in_the_file_that_is_named(block):
    lines = [line.strip() for line in (ROOT / block.source).read_text("utf-8").splitlines()]
    assert [line for line in block.code.splitlines() if line.strip() not in lines] == []


def test_what_is_not_run_is_what_needs_more_than_this_machine():
    once, twice = ["docs/elastic.md", "docs/redis.md"], ["docs/gpu.md", "docs/parameter_servers.md"]
    pages = sorted([*once, *twice, *twice])
    assert [block.page for blocks in BLOCKS.values() for block in blocks if block.reason] == pages


def test_readme_has_an_example_for_each_of_the_three_modes():
    assert len(PROGRAMS["README.md"]) == 3


def test_blocks_and_programs_are_told_apart():
    text = (
        "One.\n\n```python\nimport x\n```\n\nGoes on.\n\n```py\nx.f()\n```\n\nCI does not run this: no\nspace.\n\n"
        "```python\nimport y\n```\n\nThis is from `a/b.py`:\n\n```python\nz = 1\n```\n\n```sh\nls\n```\n"
    )
    blocks = blocks_of("page", text)
    assert [block.line for block in blocks] == [3, 9, 16, 22]
    assert [block.reason for block in blocks] == [None, None, "no\nspace.", None]
    assert [block.source for block in blocks] == [None, None, None, "a/b.py"]
    assert [program.code for program in programs_of(blocks)] == ["import x\n\nx.f()\n"]


def test_a_program_that_fails_or_hangs_is_told(forked, tmp_path):
    ended = forked.run("print('said')\nraise ValueError('wrong')", tmp_path)
    assert (ended.status, ended.stdout) == (1, "said\n") and "ValueError: wrong" in ended.stderr
    assert forked.run("import sys; sys.exit(3)", tmp_path).status == 3
    assert forked.run("while True: pass", tmp_path, deadline=0.2).status == -9
    assert forked.run("import tensorflow as tf; print(int(tf.constant(1) + 1))", tmp_path).stdout == "2\n"
