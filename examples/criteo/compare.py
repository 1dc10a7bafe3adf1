#!/usr/bin/env python3
"""Compare a model with its baseline on several splits of one log: in the order of the file, then of its rows shuffled.

    python examples/criteo/compare.py --data train.txt --splits 5 --model deepfm

One test part of some thousand rows says an AUC to a hundredth at best; differences on the same rows say more. Every
other flag is handed to train.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from criteo import train
from criteo.formats import FORMATS


def shuffled(path: str | Path, target: Path, has_header: bool, seed: int) -> Path:
    """Write the rows of a log in an order that depends on the seed alone; 0 is that of the file."""
    text = Path(path).read_bytes()
    lines = (gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text).splitlines(keepends=True)
    header, rows = lines[:has_header], lines[has_header:]
    rows[-1] = rows[-1].rstrip(b"\n") + b"\n"
    order = np.random.default_rng(seed).permutation(len(rows)) if seed else range(len(rows))
    target.write_bytes(b"".join([*header, *(rows[i] for i in order)]))
    return target


def compare(data: str | Path, splits: int, flags: list[str], log_format: str = "criteo") -> list[dict[str, Any]]:
    """Return what `train.py --json` writes for each split. In one process."""
    import sok

    results = []
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder) / "log", Path(folder) / "result.json"
        for seed in range(splits):
            shuffled(data, log, FORMATS[log_format].has_header, seed)
            outputs = ["--json", str(result), "--report", folder, "--curve-points", "0"]
            sok.shutdown()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                status = train.main(["--data", str(log), "--format", log_format, *outputs, *flags])
            sok.shutdown()
            if status:
                raise SystemExit(status)
            results.append(json.loads(result.read_text()))
    return results


def differences(results: list[dict[str, Any]], key: str) -> np.ndarray:
    """Return by how much the model exceeds the baseline in each split."""
    return np.array([result[key] - result[f"baseline_{key}"] for result in results])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", metavar="FILE", required=True, help="click log, plain or .gz")
    parser.add_argument("--format", choices=sorted(FORMATS), default="criteo", help="format of --data")
    parser.add_argument("--splits", type=int, default=5, help="how many; the first is the order of the file")
    options, flags = parser.parse_known_args(arguments)
    results = compare(options.data, options.splits, flags, options.format)
    print("split   AUC  logistic regression   log loss  logistic regression   predicted / clicks")
    for seed, r in enumerate(results):
        print(
            f"{seed or 'file':>5}   {r['auc']:.4f}   {r['baseline_auc']:.4f}   {r['logloss']:.4f}   "
            f"{r['baseline_logloss']:.4f}   {r['calibration']['ratio']:.3f}   {r['baseline_calibration']['ratio']:.3f}"
        )
    for key, name in (("auc", "AUC"), ("logloss", "log loss")):
        ours, d = np.mean([r[key] for r in results]), differences(results, key)
        spread = f", standard deviation {d.std(ddof=1):.4f}, {(d > 0).sum()} of {d.size} above 0" if d.size > 1 else ""
        print(f"{name}: {ours:.4f}; model minus logistic regression: {d.mean():+.4f}{spread}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
