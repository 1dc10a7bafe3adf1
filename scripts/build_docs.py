"""Builds the guides of docs/ and a reference of all public names, from their docstrings, as HTML. Warnings are errors.

.venv/bin/python scripts/build_docs.py [FOLDER]     # default: build/docs
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pdoc.doc
import pdoc.docstrings
import pdoc.render

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))
import sok  # noqa: E402  of this checkout

# In the order in which one meets them.
ROOMS = (
    *("job", "keras", "table", "planning", "lookup", "optimizers", "distributed", "checkpoint", "saved_model", "base"),
    *("compat", "tools"),
)
BEGIN_WITH = ("index", "docs.which_api", "docs.from_keras_embedding", "docs.several_workers", "docs.install")


class Page(pdoc.doc.Module):
    """A page: a guide, or a module under the name that users import it by, with its public names."""

    submodules: list[pdoc.doc.Module] = []

    def __init__(self, name: str, module: types.ModuleType, names: dict[str, Any], is_guide: bool = False) -> None:
        pdoc.doc.Namespace.__init__(self, name, "", module, (name, ""))
        self._names, self.is_guide, self.title = names, is_guide, name
        self.headings: dict[str, tuple[str, str]] = {}  # name of a member -> what is above it

        for found in self.classes:
            # What sok says of itself, also in bases that have no place on this page; the rest say Keras and TensorFlow.
            bases = {base.__qualname__ for base in found.obj.__mro__[1:] if base in names.values()}
            own = {
                name: member
                for name, member in found.members.items()
                if member.docstring and name != "__init__" and member.taken_from[0].startswith("sok.")
                if member.taken_from[1].rpartition(".")[0] not in bases
                # A method without a docstring has that of TensorFlow's method, often of what it refuses to do.
                if inspect.getattr_static(found.obj, name, "").__doc__
            }
            found.constructor, found.members, found.own_members = found.members.get("__init__"), own, list(own.values())

    @property
    def _member_objects(self) -> dict[str, Any]:
        return self._names


class Annotation(str):
    """A type as the source says it: evaluated, its aliases would be long, and some would import TensorFlow."""

    __repr__ = str.__str__


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    guides = {page.fullname: page for page in map(guide, [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))])}
    names = {page.fullname: page for page in [public_names(), *public_modules()]}
    pages = {**guides, **names}

    pdoc.doc.safe_eval_type = lambda type_, *_: Annotation(type_) if isinstance(type_, str) else type_
    pdoc.docstrings.GOOGLE_LIST_SECTIONS.append("Call args")
    pdoc.render.configure(docformat="google", show_source=False, template_directory=DOCS / "templates")
    pdoc.render.env.filters["in_markdown"] = in_markdown
    design = [name for name in guides if name.startswith("docs.design")]
    later = [name for name in guides if name not in (*BEGIN_WITH, *design)]
    contents = {"Begin with": BEGIN_WITH, "Reference": names, "Guides": later, "Design": design}
    pdoc.render.env.globals.update(contents=contents, version=sok.__version__)

    shutil.rmtree(folder, ignore_errors=True)
    for name, page in pages.items():
        file = folder / f"{name.replace('.', '/')}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(pdoc.render.html_module(page, pages), "utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(pages), "utf-8")
    shutil.copytree(DOCS / "images", folder / "docs" / "images")
    num_names = sum(len(page.members) for page in names.values())
    print(f"built {folder / 'index.html'}: {len(guides)} guides, {num_names} names")


def guide(path: Path) -> Page:
    """A Markdown file; of a link to something that has no page, such as an example, its text stays."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        file = (path.parent / target.partition("#")[0]).resolve()
        if re.match("https?:|#", target) or file.is_relative_to(DOCS / "images"):
            return match[0]
        has_page = file.suffix == ".md" and file.is_relative_to(DOCS)
        return f"[{text}]({target.replace('.md', '.html')})" if has_page else text

    text = path.read_text("utf-8")
    name = "index" if path.parent == ROOT else ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = types.ModuleType(name, re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text))
    module.__docformat__ = "markdown"
    page = Page(name, module, {}, is_guide=True)
    page.title = text.partition("\n")[0].lstrip("# ")
    return page


def in_markdown(docstring: str, page: Page) -> str:
    """A docstring whose mentions of guides are links, and whose stars of arguments are no Markdown."""
    if page.is_guide:
        return docstring
    up = "../" * page.modulename.count(".")
    linked = re.sub(r"(?<!`)docs/([\w/]+)\.md", rf"[docs/\1.md]({up}docs/\1.html)", docstring)
    return re.sub(r"^( +)\*\*(\w+):", r"\1\2:", linked, flags=re.MULTILINE)


def public_names() -> Page:
    """Functions and classes of `sok`, by the room that they live in."""
    rooms: dict[str, dict[str, Any]] = {room: {} for room in ROOMS}
    for name, target in sok._PUBLIC.items():
        value = getattr(sok, name)
        if not inspect.ismodule(value):
            where = getattr(value, "__module__", "")
            rooms[(where if where.startswith("sok.") else target).split(".")[1].partition(":")[0]][name] = value
    page = Page("sok", sok, {name: value for names in rooms.values() for name, value in names.items()})
    for room, names in rooms.items():
        says = (importlib.import_module(f"sok.{room}").__doc__ or "").partition("\n")[0]
        page.headings[next(iter(names))] = room, says
    return page


def public_modules() -> list[Page]:
    """The modules among the public names, with the names that each of them has for users."""
    pages = []
    for name in sok._PUBLIC:
        module = getattr(sok, name)
        if inspect.ismodule(module):
            own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            public = [n for n in getattr(module, "__all__", own) if not n.startswith("_")]
            pages.append(Page(f"sok.{name}", module, {n: getattr(module, n) for n in public}))
    return pages


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs"))
