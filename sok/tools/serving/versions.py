"""Which versions of a model lie in a folder, as TensorFlow Serving finds them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re

MODEL = "saved_model.pb"


@dataclasses.dataclass(frozen=True)
class Found:
    """A SavedModel. `stamp` is another one as soon as any of its files is."""

    number: int
    path: str
    stamp: str


def versions_in(path: str) -> dict[int, Found]:
    """The versions at `path`, by number: numbered folders that hold a SavedModel; or `path` itself, if it is one.

    A SavedModel by itself has the number that is its name, else 1. Numbered folders without a `saved_model.pb` are not
    whole yet; other folders are none of ours.

    Raises:
        OSError: there is no such folder, or it cannot be read.

    Example:
        >>> import tempfile, os
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("1", "00012", "13", "14.partial", "latest"):
        ...     os.mkdir(os.path.join(folder, name))
        ...     _ = name == "13" or open(os.path.join(folder, name, "saved_model.pb"), "w").close()
        >>> sorted(versions_in(folder))
        [1, 12]
        >>> list(versions_in(os.path.join(folder, "00012")))
        [12]
    """
    if os.path.isfile(os.path.join(path, MODEL)):
        number = _number(os.path.basename(os.path.abspath(path)))
        folders = {1 if number is None else number: path}
    else:
        with os.scandir(path) as entries:
            folders = {n: entry.path for entry in entries if (n := _number(entry.name)) is not None}
    stamps = {number: stamp_of(folder) for number, folder in folders.items()}
    return {number: Found(number, folders[number], stamp) for number, stamp in stamps.items() if stamp is not None}


def name_of(path: str) -> str:
    """What a model is called that lies there: the folder's name, or that of the folder above a version.

    >>> name_of("models/ctr/"), name_of("models/ctr/12")
    ('ctr', 'ctr')
    """
    head, name = os.path.split(os.path.abspath(path))
    return (os.path.basename(head) if _number(name) is not None else name) or "model"


def stamp_of(folder: str) -> str | None:
    """A digest of names, sizes and times of the files of a SavedModel; None: it is none, or is going just now."""
    digest = hashlib.sha256()
    try:
        if not os.path.isfile(os.path.join(folder, MODEL)):
            return None
        for within, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(within, name)
                about = os.stat(path)
                digest.update(f"{path}\0{about.st_ino}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    except FileNotFoundError:  # removed or renamed meanwhile: the next look sees what it has become
        return None
    return digest.hexdigest()


def _number(name: str) -> int | None:
    return int(name) if re.fullmatch(r"[0-9]{1,18}", name) else None
