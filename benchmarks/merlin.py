"""python -m benchmarks.merlin: a training step of Merlin's synthetic models, with the flags of its own program.

The whole model in one tf.function: tables placed by a strategy of distributed_embeddings or by sok.plan and looked up
by `sok.parallel.EmbeddingCollection`, all outputs (averaged where the model says so) and the numbers in one row, MLP,
loss, update of tables and dense part. On several workers: horovodrun -np 2 python -m benchmarks.merlin. What does not
fit the memory is scaled: all tables have a power of two of times fewer rows, which is printed. docs/planning.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import distributed_embeddings
import sok
from benchmarks import machine, synthetic, towers, workloads
from benchmarks.job import GIB
from benchmarks.small_tables import in_turns
from sok.compat.merlin.layers import placements_of
from sok.job.context import get_transport
from sok.lookup.lookup import lookup_rows
from sok.planning import planner, tables
from sok.table import rules
from sok.tools._machine_checks import check_memory

# Classes of sok.optimizers, for tables, and of tf.keras.optimizers, for the dense part.
OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}
SHARE = 0.7  # of the memory, for tables and slots
_FILL = 500_000  # rows made at a time before timing starts
_WARM_UP = 5

# Milliseconds of a step on so many GPUs of DGX A100, Adagrad, batch 65,536, whole tables.
PUBLISHED = {
    "repository of distributed-embeddings, 2022-03": {
        "tiny": {1: 24.433, 8: 5.537, 16: 4.867},
        "small": {1: 67.355, 8: 17.203, 16: 12.461, 32: 11.839},
        "medium": {8: 63.393, 16: 46.636, 32: 37.732, 128: 27.329},
        "large": {32: 67.57, 128: 37.934},
        "jumbo": {128: 124.3},
    },
    "NVIDIA's blog, 2022-08 (columns inferred)": {
        "tiny": {1: 17.6, 8: 3.6, 16: 3.2},
        "small": {1: 57.8, 8: 14.0, 16: 11.6, 32: 7.4},
        "medium": {8: 64.4, 16: 44.9, 32: 31.1, 128: 17.2},
        "large": {32: 65.0, 128: 33.4},
        "jumbo": {128: 102.3},
    },
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is trained, all of it given: sizes, where tables are, on what device."""

    model: synthetic.Model  # scaled
    factor: int  # by which its rows are fewer than Merlin's
    placements: tuple[Any, ...]
    batch: int  # of all workers
    optimizer: str
    hashed: bool = False
    device: str = "/CPU:0"
    num_batches: int = synthetic.NUM_BATCHES
    dp_input: bool = True  # False: each worker brings the ids of the whole batch for its own tables


def placements(
    model: synthetic.Model,
    strategy: str,
    workers: int,
    batch: int,
    optimizer: str,
    threshold: int | None = None,
    budget: float = 2.0**62,
    dp_input: bool = True,
) -> tuple[Any, ...]:
    """A placement of each table.

    threshold: elements above which Merlin's strategies cut a table into columns. budget: bytes of a worker; 'auto'
    raises `planner.DoesNotFit` where no plan has room. dp_input: what 'auto' plans for.
    """
    if strategy == "row_wise":
        return (sok.row_wise(),) * len(model.tables)
    if strategy == "auto":
        asked = tables.Model(
            tuple(
                tables.Table(t.rows, t.width, t.hotness, skew=model.exponent, name=f"table_{i}")
                for i, t in enumerate(model.tables)
            ),
            sum((a + 1) * b for a, b in zip([model.width, *model.mlp], [*model.mlp, 1], strict=True)),
        )
        about = {"batch": batch, "optimizer": optimizer, "memory": int(budget), "dp_input": dp_input}
        found = planner.plan(asked, workers, **about)
        return tuple(table.where.placement() for table in found.tables)
    layers = [distributed_embeddings.Embedding(t.rows, t.width, combiner="sum") for t in model.tables]
    map_of = [f.table for f in model.features()]
    return tuple(
        placements_of(distributed_embeddings.DistEmbeddingStrategy(layers, workers, strategy, map_of, threshold))
    )


def bytes_of_ranks(
    model: synthetic.Model, where: Sequence[Any], optimizer: str, workers: int, hashed: bool = False
) -> list[float]:
    """What the tables and their slots take on each rank."""
    held = [0.0] * workers
    for table, placement in zip(model.tables, where, strict=True):
        for part in placement.parts(table.width, workers):
            one = tables.Table(table.rows, part.dim, hashed=hashed)
            size = table.rows * one.bytes_per_row(rules.RULES[optimizer].slot_floats(part.dim))
            for rank in part.ranks:
                held[rank] += size / len(part.ranks)
    return held


def scaled(
    model: synthetic.Model,
    factor: int | None,
    threshold: int | None,
    place: Callable[..., Any],
    fits: Callable[..., bool],
) -> tuple[synthetic.Model, int, tuple[Any, ...]]:
    """Model, factor and placements: those of `factor`, or of the smallest power of two that fits.

    place(model, threshold) gives placements; the threshold is scaled as the rows are, so that the same tables are cut.
    """
    tried = 1 if factor is None else factor
    while True:
        smaller = model.scaled(tried)
        is_last = factor is not None or max(t.rows for t in smaller.tables) == 1
        try:
            where = place(smaller, None if threshold is None else max(1, threshold // tried))
            if is_last or fits(smaller, where):
                return smaller, tried, where
        except planner.DoesNotFit:
            if is_last:
                raise
        tried *= 2


class Training:
    """The tables and the dense part, made on the device of the setup; `step()` trains the next batch."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        model = setup.model
        self.share = setup.batch // sok.size()
        rate = synthetic.LEARNING_RATES[setup.optimizer]
        self._rule = getattr(sok.optimizers, OPTIMIZERS[setup.optimizer])(rate)
        with tf.device(setup.device):
            self.embed = self._tables()
            self.tower = towers.Tower(model)
            self._stock = getattr(tf.keras.optimizers, OPTIMIZERS[setup.optimizer])(rate)
            dense = [v for v in self._variables() if not isinstance(v, sok.EmbeddingVariable)]
            self._stock.build(dense)
            sok.broadcast_variables(dense)  # copies of row numbers are made by Keras, on each worker its own
        batches = self._batches()
        # One argument: of each tensor that a tf.function is given, Python pays for the check.
        self._step = tf.function(lambda: self._train(*next(batches)))

    def _tables(self) -> Any:
        """All tables with all their rows."""
        model, hashed = self.setup.model, self.setup.hashed
        layers = [
            sok.Embedding(
                None if hashed else t.rows,
                t.width,
                combiner="sum",
                capacity=t.rows if hashed else None,
                name=f"table_{i}",
            )
            for i, t in enumerate(model.tables)
        ]
        asked = ([f.table for f in model.features()], self.setup.placements, self.setup.dp_input)
        embed = sok.parallel.EmbeddingCollection(layers, *asked)
        embed.build(None)
        for number, (layer, table) in enumerate(zip(embed.embeddings, model.tables, strict=True)):
            variable = layer.trainable_variables[0]
            if isinstance(variable, sok.EmbeddingVariable):
                for first in range(0, table.rows, _FILL * sok.size()):
                    last = min(table.rows, first + _FILL * sok.size())
                    keys = np.arange(first + sok.rank(), last, sok.size(), dtype=np.int64)
                    lookup_rows(variable, tf.constant(self._keys(keys, number)), training=True)
        return embed

    def _variables(self) -> list[Any]:
        return [*self.embed.trainable_variables, *self.tower.variables]

    def _keys(self, ids: np.ndarray, table: int) -> np.ndarray:
        return workloads.hashed_ids(ids, table) if self.setup.hashed else ids

    def _batch(self, number: int) -> list[tf.Tensor]:
        """This worker's part of a batch of all: its samples, and their ids, or those of all samples for its tables."""
        model, mine = self.setup.model, slice(sok.rank() * self.share, (sok.rank() + 1) * self.share)
        numbers, labels, ids = synthetic.make_batch(model, self.setup.batch, number)
        if self.setup.dp_input:
            keys = [self._keys(one[mine], f.table) for one, f in zip(ids, model.features(), strict=True)]
        else:
            keys = [ids[i] for i in self.embed.inputs_of_ranks[sok.rank()]]
        return [tf.constant(one) for one in (numbers[mine], labels[mine], *keys)]

    def _batches(self) -> Any:
        """A few batches over and over, brought to a GPU while the step before runs."""
        with tf.device("/CPU:0"):
            made = [tf.data.Dataset.from_tensors(tuple(self._batch(n))) for n in range(self.setup.num_batches)]
            dataset = functools.reduce(tf.data.Dataset.concatenate, made).repeat()
        if "GPU" in self.setup.device:
            dataset = dataset.apply(tf.data.experimental.prefetch_to_device(self.setup.device))
        return iter(dataset)

    def _train(self, numbers: tf.Tensor, labels: tf.Tensor, *ids: tf.Tensor) -> tf.Tensor:
        with tf.device(self.setup.device):
            with tf.GradientTape() as tape:
                loss = self.tower.loss(self.embed(list(ids), training=True), numbers, labels)
            variables = self._variables()
            pairs = list(zip(sok.DistributedGradientTape(tape).gradient(loss, variables), variables, strict=True))
            for rule, is_of_tables in ((self._rule, True), (self._stock, False)):
                rule.apply_gradients([p for p in pairs if isinstance(p[1], sok.EmbeddingVariable) == is_of_tables])
            return loss

    def step(self) -> tf.Tensor:
        """The mean loss of this worker's part, before the update. Collective."""
        return self._step()


def measure(training: Training, steps: int) -> dict[str, Any]:
    """Milliseconds of each step of the slowest worker, and of a step where nobody waits between them. Collective."""
    for _ in range(max(_WARM_UP, training.setup.num_batches)):
        training.step().numpy()
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        training.step().numpy()
        taken.append(1e3 * (time.perf_counter() - begin))
    begin = time.perf_counter()
    for _ in range(steps):
        last = training.step()
    loss = float(last)
    taken += [1e3 * (time.perf_counter() - begin) / steps, loss]
    everyone = get_transport().all_gather(tf.constant([taken], tf.float64), "benchmarks/merlin/times").numpy()
    *each, together, _ = everyone.max(axis=0)
    low, middle, high = np.percentile(each, [25, 50, 75])
    return {
        **{"ms": float(middle), "quartiles_ms": [float(low), float(high)], "ms_without_waiting": float(together)},
        **{
            "samples_per_s": 1e3 * training.setup.batch / float(middle),
            "steps": steps,
            "loss": float(everyone[:, -1].mean()),
        },
    }


def placed(model: synthetic.Model, factor: int, batch: int, optimizer: str, strategy: str) -> Setup:
    """A setup for the workers of this job, on the CPU; `model` is scaled already."""
    return Setup(model, factor, placements(model, strategy, sok.size(), batch, optimizer), batch, optimizer)


def beside_each_other(trainings: Mapping[str, Training], windows: int = 9, steps: int = 3) -> dict[str, float]:
    """Windows of steps of each strategy in turn: milliseconds of a step, and beside row_wise, window by window.

    Returns for each strategy `NAME_ms` and, of the quotients by row_wise, `NAME_to_row_wise`, its quartiles `_low` and
    `_high`; and `auto_to_best`, beside whichever of the others was the fastest. Collective.
    """
    turns: list[tuple[()]] = [()] * synthetic.NUM_BATCHES  # each training has its own batches, the same ones
    mine = in_turns({name: training.step for name, training in trainings.items()}, turns, windows, steps)
    stacked = tf.constant(np.stack(list(mine.values()))[None])
    everyone = get_transport().all_gather(stacked, "benchmarks/merlin/windows").numpy()
    taken = dict(zip(mine, everyone.max(axis=0), strict=True))  # the slowest worker's
    figures = {}
    for name, ms in taken.items():
        figures[f"{name}_ms"] = float(np.median(ms))
        if name == "row_wise":
            continue
        quartiles = np.percentile(ms / taken["row_wise"], [25, 50, 75])
        for what, value in zip(("_low", "", "_high"), quartiles, strict=True):
            figures[f"{name}_to_row_wise{what}"] = float(value)
    best = min((name for name in taken if name != "auto"), key=lambda name: np.median(taken[name]))
    return {**figures, "auto_to_best": float(np.median(taken["auto"] / taken[best]))}


def published(setup: Setup) -> list[dict[str, Any]]:
    """What Merlin and NVIDIA say of this model; nothing of other batches and optimizers."""
    if setup.batch != 65536 or setup.optimizer != "adagrad":
        return []
    return [
        {"source": source, "gpus": gpus, "ms": ms}
        for source, models in PUBLISHED.items()
        for gpus, ms in models.get(setup.model.name, {}).items()
    ]


def memory_of(device: str) -> int:
    """Bytes of the host, or of this container, or of the smallest GPU that `nvidia-smi` knows."""
    if "GPU" not in device:
        (found,) = check_memory()
        return int(found.details.get("container_limit_bytes", found.details["total_bytes"]))
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"nvidia-smi does not say how much memory the GPU has ({error}): give --memory.") from None
    return min(int(line) for line in said.split()) << 20


def name_of(device: str) -> str:
    if "GPU" not in device:
        about = machine.describe()
        return f"{about['cpu']}, {about['usable_cores']} cores"
    return str(tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])["device_name"])


def _yes_or_no(text: str) -> bool:
    """A word that Merlin's program takes for a flag."""
    words = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"must be true or false. Received: {text}.")
    return words[text.lower()]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.merlin", description=__doc__.partition("\n")[0])
    made.add_argument("--model", choices=list(json.loads(synthetic.PATH.read_text())["models"]), default="tiny")
    made.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adagrad")
    made.add_argument("--batch_size", type=int, default=65536, help="samples of all workers (default 65536)")
    made.add_argument("--strategy", choices=synthetic.STRATEGIES, default="memory_balanced")
    made.add_argument("--column_slice_threshold", type=int, metavar="N", help="elements, of whole tables")
    whose = made.add_mutually_exclusive_group()
    about = "each worker brings its own samples (default true; in Merlin's program false)"
    whose.add_argument("--dp_input", type=_yes_or_no, nargs="?", const=True, default=True, metavar="BOOL", help=about)
    about = "each worker brings the ids of the whole batch for its own tables: --dp_input=false"
    whose.add_argument("--mp_input", "--mp-input", "--nodp_input", action="store_false", dest="dp_input", help=about)
    made.add_argument("--scale", default="auto", metavar="F", help="rows are divided by F; auto: until they fit")
    made.add_argument("--steps", "--num_steps", type=int, default=100, help="that are timed, twice (default 100)")
    made.add_argument("--num_data_batches", type=int, default=synthetic.NUM_BATCHES, help="made before, used in turn")
    made.add_argument("--hashed", action="store_true", help="hashed tables of scattered keys, not row numbers")
    made.add_argument("--device", choices=["GPU", "CPU"], help="default: a GPU if TensorFlow sees one")
    made.add_argument(
        "--memory", type=float, metavar="GIB", help="of a GPU, or of the host of all workers; default: asked"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="all figures; of rank 0")
    return made


def setup_of(options: argparse.Namespace) -> Setup:
    """Decides scale and placements, the same on all ranks."""
    if not options.dp_input and (options.strategy == "row_wise" or options.hashed):
        what = "--hashed tables" if options.hashed else "--strategy row_wise"
        raise SystemExit(
            f"With --mp_input each worker brings the ids of its own tables, which are whole on one worker or in "
            f"columns, and have row numbers. That does not go with {what}: choose another, or --dp_input."
        )
    device = f"/{options.device or ('GPU' if tf.config.list_physical_devices('GPU') else 'CPU')}:0"
    workers, on_gpu = sok.size(), "GPU" in device
    total = options.memory * GIB if options.memory else memory_of(device)
    budget = SHARE * total / (1 if on_gpu else workers)

    def place(model: synthetic.Model, threshold: int | None) -> tuple[Any, ...]:
        asked = (options.strategy, workers, options.batch_size, options.optimizer, threshold, budget, options.dp_input)
        return placements(model, *asked)

    def fits(model: synthetic.Model, where: Sequence[Any]) -> bool:
        held = bytes_of_ranks(model, where, options.optimizer, workers, options.hashed)
        # All workers share the memory of one host; each has a GPU to itself.
        return (max(held) if on_gpu else sum(held) / workers) <= budget

    factor = None if options.scale == "auto" else int(options.scale)
    found = scaled(synthetic.load(options.model), factor, options.column_slice_threshold, place, fits)
    about = (options.batch_size, options.optimizer, options.hashed, device, options.num_data_batches, options.dp_input)
    return Setup(*found, *about)


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    sok.Init(seed=1)
    if options.batch_size % sok.size():
        raise SystemExit(f"--batch_size {options.batch_size} cannot be split over {sok.size()} workers.")
    setup = setup_of(options)

    def tell(line: str) -> None:
        if sok.rank() == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    model, rows = setup.model, sum(t.rows for t in setup.model.tables)
    held = bytes_of_ranks(model, setup.placements, setup.optimizer, sok.size(), setup.hashed)
    tell(f"{name_of(setup.device)}, {sok.size()} workers, tables on {setup.device}, sok {machine.sok_version()}")
    tell(
        f"{model.name}: {len(model.tables)} {'hashed' if setup.hashed else 'identity'} tables, {rows:,} rows, "
        f"{model.bytes / GIB:.2f} GiB ({max(held) / GIB:.2f} with slots on the fullest worker), "
        f"{len(model.features())} inputs, batch {setup.batch:,}, {setup.optimizer}, {options.strategy}, "
        + ("each worker brings its samples" if setup.dp_input else "each worker brings the ids of its tables")
    )
    tell(f"scale: rows of every table divided by {setup.factor}" if setup.factor > 1 else "scale: 1, all rows")
    begin = time.perf_counter()
    training = Training(setup)
    made = time.perf_counter() - begin
    training.step().numpy()
    begun = time.perf_counter() - begin
    tell(f"made in {made:.1f} s, the first step had ended after {begun:.1f} s")
    found = measure(training, options.steps)
    low, high = found["quartiles_ms"]
    tell(
        f"{found['ms']:.2f} ms a step (median of {found['steps']}, quartiles {low:.2f} to {high:.2f}), "
        f"{found['samples_per_s']:,.0f} samples/s; {found['ms_without_waiting']:.2f} ms if none waits for the last"
    )
    for one in published(setup):
        tell(f"published: {one['ms']} ms on {one['gpus']} A100, all rows ({one['source']})")
    if options.json and sok.rank() == 0:
        about = {
            **{"machine": name_of(setup.device), "device": setup.device, "workers": sok.size()},
            **{"versions": machine.versions(), "model": model.name, "rows": rows, "scale": setup.factor},
            **{"table_bytes": model.bytes, "bytes_of_ranks": held, "hashed": setup.hashed},
            **{"batch_size": setup.batch, "optimizer": setup.optimizer, "strategy": options.strategy},
            **{"column_slice_threshold": options.column_slice_threshold, "dp_input": setup.dp_input},
            "placements": [repr(one) for one in setup.placements],
        }
        about |= {"made_s": made, "first_step_s": begun}
        options.json.write_text(json.dumps({**about, **found, "published": published(setup)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
