"""`make docs`: a page for each guide and each public module, every public name, and no link that leads nowhere."""

import html.parser
import inspect
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import sok

ROOT = Path(__file__).resolve().parents[2]


class Anchors(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.texts = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        self.links += [found[name] for name in ("href", "src") if found.get(name)]

    def handle_data(self, data):
        self.texts.append(data.strip())


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Path of each page -> what is in it."""
    folder = tmp_path_factory.mktemp("pages")
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py"), str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=200)
    # Warnings are errors there.
    assert answer.returncode == 0, answer.stderr
    return {path: Anchors(path.read_text("utf-8")) for path in folder.rglob("*.html")}, folder


def test_every_public_name_has_its_place(pages):
    pages, folder = pages
    missing = []
    for name in sok._PUBLIC:
        if inspect.ismodule(getattr(sok, name)):
            missing += [name] if folder / "sok" / f"{name}.html" not in pages else []
        elif name not in pages[folder / "sok.html"].ids:
            missing.append(name)
    assert missing == []


def test_links_between_pages_lead_somewhere(pages):
    pages, _ = pages
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            file = (path.parent / unquote(target)).resolve() if target else path
            if link.startswith(("http:", "https:", "data:")) or (file.exists() and not anchor):
                continue
            if file not in pages or unquote(anchor) not in pages[file].ids:
                dead.append(f"{path.name}: {link}")
    assert dead == []


def test_sections_of_docstrings_are_understood(pages):
    pages, _ = pages
    sections = ("Args:", "Returns: [", "Raises: ", "Example: >>>")
    raw = [f"{path.name}: {text}" for path, page in pages.items() for text in page.texts if text.startswith(sections)]
    assert raw == []


def test_methods_that_refuse_are_not_told_in_the_words_of_tensorflow(pages):
    pages, folder = pages
    assert "EmbeddingVariable.scatter_update" not in pages[folder / "sok.html"].ids
    assert "EmbeddingVariable.assign" in pages[folder / "sok.html"].ids
    assert "DynamicVariable.size" in pages[folder / "sok.html"].ids
