#!/usr/bin/env python3
"""Asks a model that is served for the clicks of the first lines of a log: a client of TensorFlow Serving's REST.

python examples/deepctr/client.py --data LOG

Needs neither `sok` nor TensorFlow. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request

from click_log import read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8501/v1/models/deepctr:predict")
    parser.add_argument("--rows", type=int, default=65536, help="of each embedding, as in training")
    parser.add_argument("--count", type=int, default=8, help="lines of the log")
    options = parser.parse_args()
    columns, _ = read(options.data, options.rows, options.count)
    body = json.dumps({"inputs": {name: column.tolist() for name, column in columns.items()}})
    request = urllib.request.Request(options.url, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            outputs = json.load(answer)["outputs"]
    except urllib.error.HTTPError as refused:
        sys.exit(f"{options.url} said {refused.code}: {refused.read().decode()}")
    print(json.dumps({"predictions": [value for (value,) in outputs]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
