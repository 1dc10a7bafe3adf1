"""`sok follow`: versions of an exported model, made as a job goes on saving."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("feed", metavar="FEED", help="the folder into which sok.Publisher saves")
    parser.add_argument(
        "exports", metavar="EXPORTS", help="the folder whose numbered folders are versions of the model"
    )
    parser.add_argument("--poll-seconds", type=float, default=2.0, metavar="S", help="how often it looks (default: 2)")
    parser.add_argument("--max-to-keep", type=int, default=3, metavar="N", help="versions of its own (default: 3)")
    parser.add_argument("--once", action="store_true", help="look once, and end")


def main(options: argparse.Namespace) -> int:
    """Looks until it is ended by SIGINT or SIGTERM. A look that fails is told, and the next one tries again."""
    import tensorflow as tf

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from sok.base.errors import CheckpointError, DamagedFileError
    from sok.saved_model import follow_export

    if not options.poll_seconds > 0:
        sys.stderr.write(f"sok follow: --poll-seconds must be positive. Received: {options.poll_seconds}.\n")
        return 2
    try:
        follower = follow_export(options.feed, options.exports, max_to_keep=options.max_to_keep)
    except ValueError as error:
        sys.stderr.write(f"sok follow: {error}\n")
        return 2
    ended = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in signal.SIGINT, signal.SIGTERM:
            signal.signal(number, lambda *_: ended.set())
    while not ended.is_set():
        try:
            path = follower.poll()
        except (OSError, ValueError, CheckpointError, DamagedFileError, tf.errors.OpError) as error:
            sys.stderr.write(f"sok follow: {error}\n")
            sys.stderr.flush()
            if options.once:
                return 1
        else:
            if path is not None:
                lag = follower.lag or 0.0
                sys.stdout.write(f"{path} holds {follower.generation}, saved {lag:.0f} s ago\n")
                sys.stdout.flush()
        if options.once:
            return 0
        ended.wait(options.poll_seconds)
    return 0
