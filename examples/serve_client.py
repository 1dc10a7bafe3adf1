#!/usr/bin/env python3
"""Asks a model that `sok serve`, or TensorFlow Serving, serves.

python examples/serve_client.py --url http://127.0.0.1:8501/v1/models/ctr '{"ids": [[1, 2, 3]]}'

Needs neither `sok` nor TensorFlow: the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

# Busy, starting or being replaced: another try may be answered. All others say what is wrong with the request.
TRY_AGAIN = (429, 503)


def predict(url: str, inputs: Any, signature: str = "serving_default", tries: int = 3, seconds: float = 30.0) -> Any:
    """The outputs of a model for `inputs`, nested lists by name."""
    body = json.dumps({"signature_name": signature, "inputs": inputs}).encode()
    request = urllib.request.Request(f"{url}:predict", body, {"Content-Type": "application/json"})
    for left in reversed(range(tries)):
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return json.load(answer)["outputs"]
        except urllib.error.HTTPError as refused:
            words = json.load(refused)["error"]
            if refused.code not in TRY_AGAIN or not left:
                raise RuntimeError(f"{url} answered {refused.code}: {words}") from None
        time.sleep(0.1)
    raise ValueError("`tries` must be at least 1.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", help='JSON: {"NAME": [[1, 2], ...], ...}')
    parser.add_argument("--url", default="http://127.0.0.1:8501/v1/models/ctr")
    parser.add_argument("--signature", default="serving_default")
    options = parser.parse_args()
    try:
        print(json.dumps(predict(options.url, json.loads(options.inputs), options.signature)))
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
