#!/usr/bin/env python3
"""Serves a SavedModel by stock TensorFlow alone, as TensorFlow Serving does by REST: there is no `sok` in this process.

python examples/deepctr/serve.py --model FOLDER/1

Prints the URL that client.py asks, and answers until it is stopped. It is for trying: where TensorFlow Serving runs, it
takes the same folder and the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

PATH = "/v1/models/deepctr:predict"


class Handler(BaseHTTPRequestHandler):
    """Answers {"inputs": {NAME: [[VALUE], ...], ...}} by {"outputs": [[VALUE], ...]}."""

    serve: tf.types.experimental.GenericFunction

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = self.answer(body) if self.path == PATH else (404, {"error": f"ask {PATH}"})
        said = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def answer(self, body: bytes) -> tuple[int, dict]:
        try:
            asked = json.loads(body)["inputs"]
            specs = self.serve.structured_input_signature[1]
            (outputs,) = self.serve(
                **{name: tf.constant(asked[name], spec.dtype) for name, spec in specs.items()}
            ).values()
        except KeyError as missing:
            return 400, {"error": f"the request has no {missing}"}
        except (ValueError, TypeError, tf.errors.OpError) as error:
            return 400, {"error": str(error)}
        return 200, {"outputs": outputs.numpy().tolist()}

    def log_message(self, *_):
        """Says nothing of each request."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=8501, help="0: any that is free")
    options = parser.parse_args()
    model = tf.saved_model.load(options.model)
    Handler.serve = model.signatures["serving_default"]
    with HTTPServer(("127.0.0.1", options.port), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}{PATH}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
