#!/usr/bin/env python3
"""Asks a model that `sok serve`, or TensorFlow Serving, serves.

python examples/serve_client.py --url http://127.0.0.1:8501/v1/models/ctr '{"ids": [[1, 2, 3]]}'

Needs neither `sok` nor TensorFlow: the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# Busy, starting or being replaced: another try may be answered. All others say what is wrong with the request.
TRY_AGAIN = (429, 503)


def predict(
    url: str,
    inputs: Any,
    signature: str = "serving_default",
    tries: int = 3,
    seconds: float = 30.0,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Any:
    """The outputs of a model for `inputs`, nested lists by name."""
    body = json.dumps({"signature_name": signature, "inputs": inputs}).encode()
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{url}:predict", body, headers)
    for left in reversed(range(tries)):
        try:
            with urllib.request.urlopen(request, timeout=seconds, context=tls) as answer:
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
    parser.add_argument("--token-file", type=Path, help="holds a token, where the server wants one")
    parser.add_argument("--ca", help="PEM: the authority of the server's certificate (default: those of the system)")
    options = parser.parse_args()
    try:
        token = options.token_file.read_text().strip() if options.token_file else None
        tls = ssl.create_default_context(cafile=options.ca) if options.url.startswith("https:") else None
        outputs = predict(options.url, json.loads(options.inputs), options.signature, token=token, tls=tls)
        print(json.dumps(outputs))
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
