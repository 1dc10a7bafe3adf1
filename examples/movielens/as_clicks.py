#!/usr/bin/env python3
"""Write MovieLens 100K as a click log in Criteo's format, in the order of time: who likes which movie.

    python examples/movielens/as_clicks.py --data ml-100k --out likes.tsv
    python examples/criteo/compare.py --data likes.tsv

A click is a rating of 4 or 5. The first count is how many movies the user liked before (at most 100); the first six
categories are user, movie, age in steps of five years, gender, occupation and the set of the movie's genres.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from movielens.ratings import SINGLE_FEATURES, load


def as_clicks(directory: str | Path) -> str:
    """Return the log as text."""
    ratings, none = load(directory, max_history=100, holdout=1e-9)
    assert len(none) == 0
    singles = ratings.singles % (1 << 20)  # without the number of the column
    sets = np.add.reduceat(1 << ratings.genres, ratings.genre_splits[:-1])  # every movie has a genre
    rows = zip(ratings.labels, np.diff(ratings.history_splits), singles.tolist(), sets.tolist(), strict=True)
    empty = "\t" * 12, "\t" * (25 - len(SINGLE_FEATURES))
    return "".join(
        f"{label:.0f}\t{likes}{empty[0]}\t" + "\t".join(f"{v:08x}" for v in (*values, genres)) + empty[1] + "\n"
        for label, likes, values, genres in rows
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="DIR", required=True, help="folder of u.data, u.item, u.user (plain or .gz)")
    parser.add_argument("--out", metavar="FILE", required=True, help="where to write the log")
    options = parser.parse_args(arguments)
    Path(options.out).write_text(as_clicks(options.data), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
