"""The `sok` command: `sok COMMAND ...`, the same as `python -m sok COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of `sok` and returns its exit status.

    Args:
        arguments: the words after `sok`; `None` takes the command line's.

    Returns:
        0 for success; 1 where the command found something wrong; 2 (from argparse, as `SystemExit`) for a command
        line that makes no sense.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] | None = getattr(options, "run", None)
    if run is None:
        parser.print_help(sys.stderr)
        return 2
    return run(options)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; each command names the function that runs it."""
    parser = argparse.ArgumentParser(prog="sok", description="Tools for sharded embedding tables in TensorFlow.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], **texts: Any) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, **texts)
        added.set_defaults(run=run)
        return added

    doctor = command(
        "doctor",
        _doctor,
        help="say whether sok works on this machine, and what to do if not",
        description="Checks versions, the native library, devices and memory, and trains a small table against NumPy. "
        "Exit status 0 only if sok is usable.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    doctor.add_argument("--horovod", action="store_true", help="also start two Horovod workers and let them talk")

    doctor.add_argument(
        "--measure",
        metavar="FILE",
        nargs="?",
        const="",
        help="measure what the cost model of `sok plan` counts in, and write it to FILE (default: where `sok plan` "
        "looks); under horovodrun also the links between its workers",
    )

    inspect = command(
        "inspect",
        lambda options: _commands().inspect(options.path, as_json=options.json, plot=options.plot),
        help="say what is in a checkpoint, a manager's folder or an export",
        description="Prints the tables of a checkpoint: rows, dims, slots, workers, size; of a folder of "
        "sok.CheckpointManager all its checkpoints; of an export its signatures and tables. Reads what these say of "
        "themselves only; with --plot some of the rows, too.",
    )
    inspect.add_argument(
        "path", metavar="PATH", help="the folder given to sok.save, sok.CheckpointManager or sok.export_saved_model"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    inspect.add_argument(
        "--plot",
        metavar="FILE.png",
        nargs="?",
        const="",
        help="also draw histograms of the values of each table and slot (default: the name of PATH and .png, here); "
        "needs matplotlib",
    )

    verify = command(
        "verify",
        lambda options: _commands().verify(options.path),
        help="say whether a checkpoint, all of a manager's folder, or the tables of a native export are whole",
        description="Reads every byte of a checkpoint, of all checkpoints of a folder of sok.CheckpointManager, or of "
        "the tables of a model exported with native=True, and checks it. Exit status 0 only if all of it can be "
        "restored, or served.",
    )
    verify.add_argument(
        "path",
        metavar="PATH",
        help="the folder given to sok.save, sok.CheckpointManager or sok.export_saved_model; or one checkpoint of a "
        "manager, as its save() returned it",
    )

    from sok.tools import planning  # arithmetic alone: what it takes says it itself

    planning.add_arguments(
        command(
            "plan",
            planning.main,
            help="say where each table belongs on so many workers, and how long a step takes",
            description="Predicts a training step by a cost model whose constants were measured, or published, and "
            "says for each table where it belongs and why. Allocates nothing. Exit status 1 if they do not fit.",
            epilog="example: sok plan benchmarks/synthetic_models.json --model small --workers 8 --machine a100",
        )
    )

    from sok.tools.serving import command as serving  # argparse alone: main loads the rest

    serving.add_arguments(
        command(
            "serve",
            serving.main,
            help="serve exported models over HTTP, as TensorFlow Serving does",
            description="Answers TensorFlow Serving's REST (/v1/models/NAME:predict, status, metadata) with models "
            "that sok.export_saved_model has written, and takes newer versions up as they appear. For trying out and "
            "for small installations; docs/serving.md says when to take TensorFlow Serving. Needs sok[serve].",
            epilog="example: sok serve models/ctr --port 8501",
        )
    )

    from sok.tools import following  # argparse alone

    following.add_arguments(
        command(
            "follow",
            following.main,
            help="make versions of an exported model as a job goes on saving",
            description="From the newest version of a model that sok.export_saved_model has written (native=True, or "
            "rows in Redis) and what a job has saved since (sok.Publisher) it makes the next, whole when it appears: "
            "rows, deletions and dense weights of one step. Servers that watch the folder take it up. Needs neither "
            "the model's program nor its tables.",
            epilog="example: sok follow /feeds/ctr /models/ctr",
        )
    )

    from sok.tools.elastic import command as elastic  # argparse alone

    elastic.add_arguments(
        command(
            "elastic",
            elastic.main,
            help="start a job whose workers may come and go",
            description="Starts the workers of a program that trains under sok.elastic.run, others where some are "
            "lost or the hosts have room for more, and brings those that there are together.",
            epilog="example: sok elastic -np 2 --max-np 8 --host-discovery-script ./discover.sh python train.py",
        )
    )

    from sok.tools import parameter_server  # argparse alone

    parameter_server.add_arguments(
        command(
            "parameter-server",
            parameter_server.main,
            help="hold tables for workers, as a task of a TensorFlow cluster",
            description="A tf.distribute.Server that has loaded sok: it holds tables (job ps) or, under a "
            "ClusterCoordinator, runs what workers do (job worker). It ends when it is ended. "
            "docs/parameter_servers.md.",
            epilog='example: sok parameter-server --cluster \'{"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}\'',
        )
    )

    profile = commands.add_parser("profile", help="draw what sok.profile has written")
    plot = profile.add_subparsers(title="commands", metavar="COMMAND", required=True).add_parser(
        "plot",
        help="draw some steps as a picture",
        description="Draws steps of the traces of one worker or several: a row for each thread and for each "
        "collective. Needs matplotlib.",
    )
    plot.set_defaults(run=lambda o: _commands().plot_profile(o.traces, o.output, o.first, o.steps))
    plot.add_argument("traces", metavar="TRACE.json", nargs="+", help="what sok.profile or SOK_TRACE=FILE has written")
    plot.add_argument(
        "--output", metavar="FILE.png", help="the picture (default: the name of the first trace and .png)"
    )
    plot.add_argument("--first", metavar="STEP", type=int, default=0, help="the first step to draw (default: 0)")
    plot.add_argument("--steps", metavar="N", type=int, default=2, help="how many (default: 2)")

    compact = command(
        "compact",
        lambda options: _commands().compact(options.path),
        help="make one full checkpoint of an incremental one",
        description="Reads the full save and the deltas of an incremental checkpoint and puts one full checkpoint in "
        "their place. Needs room for the rows once more on the disk, and no tables in memory. Nothing must be saved "
        "there meanwhile.",
    )
    compact.add_argument("path", metavar="PATH", help="the folder given to sok.save")

    find = command(
        "find",
        lambda options: _commands().find(options.key, options.paths, options.table, options.json),
        help="say in which checkpoints, increments and exports a key lies",
        description="Looks for a key, a user's id say, in all checkpoints and exports at the paths and below: which "
        "table has a row of it, in which save, at which step. Increments that note it as erased count, too. Exit "
        "status 0 if it is anywhere, 1 if it is nowhere, 2 if that cannot be said. sok.erase removes it.",
        epilog="example: sok find 4711 checkpoints models --table users",
    )
    find.add_argument("key", metavar="KEY", type=int, help="as the tables have it; negative ones after --")
    find.add_argument("paths", metavar="PATH", nargs="+", help="folders given to sok.save and so on, or above such")
    find.add_argument("--table", metavar="NAME", help="look in tables of this name only")
    find.add_argument("--json", action="store_true", help="print one JSON object instead of lines")

    convert = command(
        "convert",
        _convert,
        help="write a table's files in the format of another system",
        description="Reads a table's files and writes them in another format, piece by piece: SOK v1's Saver (v1), SOK "
        "v2's dump (v2), NumPy's arrays (npy). docs/old_formats.md describes the formats. Exit status 1 if a file is "
        "not in order; then nothing was written.",
        epilog="example: sok convert v1:checkpoint/EmbeddingVariable npy:keys.npy,values.npy --dim 16",
    )
    convert.add_argument(
        "source",
        help="what to read: v1:DIRECTORY/NAME, v2:DIRECTORY/NAME, npy:KEYS.npy,VALUES.npy or "
        "openembedding:DIRECTORY/STORAGE",
    )
    convert.add_argument("target", help="what to write, in the same words; files of openembedding are read alone")
    convert.add_argument("--dim", type=int, help="length of a row; files of SOK v1 do not tell it")
    convert.add_argument(
        "--key-dtype",
        help="int64, int32, uint32 or uint64, of the keys to be written; else as they are. Files of SOK v1 do not tell "
        "the sign of keys: if this has their size, it is what they are read as",
    )
    convert.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


# Each imports what it needs, so that no command pays for what another one loads.


def _doctor(options: argparse.Namespace) -> int:
    from sok.tools import doctor

    if options.measure is not None:
        return doctor.measure(options.measure or None)
    return doctor.main(doctor.all_checks(options.horovod), options.json)


def _commands() -> ModuleType:
    from sok.tools import commands

    return commands


def _convert(options: argparse.Namespace) -> int:
    from sok.compat.formats import convert

    return convert.main(options, print, lambda error: print(f"sok convert: {error}", file=sys.stderr))
