"""`sok serve` from the command line: its arguments, and what it says. Loads TensorFlow and aiohttp when it runs."""

from __future__ import annotations

import argparse
import os
import re
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sok serve` takes."""
    parser.add_argument(
        "export",
        metavar="EXPORT",
        nargs="?",
        help="a SavedModel, or a folder of numbered ones (TensorFlow Serving's base path): the newest is served",
    )
    parser.add_argument("--name", help="of EXPORT in URLs (default: the folder's name)")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="serve this model, too; again for others",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=_natural, default=8501, help="0: any that is free (default: 8501)")
    parser.add_argument(
        "--poll-seconds", type=_positive, default=2.0, help="between two looks for newer versions (default: 2)"
    )
    parser.add_argument(
        "--versions", type=_count, default=1, metavar="N", help="serve so many of the newest versions (default: 1)"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="let clients load and unload models: whoever reaches the port can then load any SavedModel there is",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM: encrypt, with this certificate (and those above it)")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM: its key (default: in the file of the certificate)")
    parser.add_argument(
        "--tls-client-ca", metavar="FILE", help="PEM: clients must have a certificate of one of these authorities"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="clients must have a token, one a line here: Authorization: Bearer TOKEN"
    )
    parser.add_argument(
        "--control-token-file", metavar="FILE", help="as --control, for clients that have a token of this file alone"
    )
    parser.add_argument(
        "--max-request-bytes",
        type=_bytes,
        default=64 << 20,
        metavar="SIZE",
        help="of a request, as 64MB (default: 64MiB)",
    )
    parser.add_argument(
        "--timeout-seconds", type=_positive, default=30.0, help="for one request, waiting included (default: 30)"
    )
    parser.add_argument("--max-requests", type=_count, default=256, help="running and waiting at a time (default: 256)")
    parser.add_argument(
        "--threads", type=_count, help="requests that TensorFlow runs at a time (default: a core each, at least 4)"
    )


def main(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C, and returns 0; 1, and says why, where it cannot begin."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        models = _models(options)
        _check_installed()
        from sok.tools.serving import server
        from sok.tools.serving.refusal import Refused
    except (ValueError, ImportError) as error:
        return _fail(error)
    try:
        return server.serve(models, options)
    except (OSError, ValueError, ImportError, Refused) as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    sys.stderr.write(f"sok serve: {error}\n")
    return 1


def _models(options: argparse.Namespace) -> dict[str, str]:
    """Name and path of each model."""
    from sok.tools.serving.versions import name_of

    models: dict[str, str] = {}
    if options.export is not None:
        models[options.name or name_of(options.export)] = options.export
    elif options.name is not None:
        raise ValueError("--name is that of EXPORT, which is missing. --model NAME=PATH has its own.")
    for text in options.model:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ValueError(f"--model must be NAME=PATH. Received: {text!r}.")
        if name in models:
            raise ValueError(f"Two models have the name {name!r}: {models[name]} and {path}.")
        models[name] = path
    if not models:
        raise ValueError("give EXPORT, or --model NAME=PATH: what sok.export_saved_model has written.")
    return models


def _check_installed() -> None:
    try:
        import aiohttp  # noqa: F401
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ImportError(f"needs {error.name}, which is not installed: pip install 'sok[serve]'") from None


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number


def _natural(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _bytes(text: str) -> int:
    from sok.tools.planning import _bytes as bytes_of

    return bytes_of(text)
