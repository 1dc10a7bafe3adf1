"""Rules of one's own: a Python function of a row or of an element, compiled by Numba, called in the fused update."""

from __future__ import annotations

import ast
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok.base import arithmetic, compiled
from sok.base.types import Rate
from sok.job.agreement import agree, together
from sok.job.job import Job, job_of
from sok.optimizers import gradients
from sok.optimizers.base import Optimizer
from sok.table import rules

_KNOWN = ("step", "key", "touches")
"""What a function may ask for beside what its rule keeps."""


def rule(
    slots: Sequence[str] | Mapping[str, float | str] = (),
    scalars: Sequence[str] | Mapping[str, float | str] = (),
    hyper: Sequence[str] = ("learning_rate",),
    *,
    version: int | str | None = None,
    per: str = "row",
) -> Callable[[Callable[..., Any]], type[OwnRule]]:
    """Makes an optimizer of a function that says how a row changes.

    The function is compiled by Numba (`pip install sok[rules]`) before the first update, and kept on disk beside its
    file. It then runs inside the fused update, on all threads, on the rows where they lie. What it calculates stays in
    float32, as in NumPy: called with arrays, before it is decorated or as `.function` of the class, it does the same.

    Args:
        slots: vectors that a table keeps beside each row, as long as the row: names, or a mapping from names to what
            they hold before the first update, a number or the name of a hyperparameter. Names alone: zeros.
        scalars: the same for numbers of which a row has one.
        hyper: names of hyperparameters, 'learning_rate' among them. Those that the function's signature gives a
            default have it in the class, too.
        version: of the rule, a number or word. It is part of the rule's name in files and graphs: slots that another
            version has written are not taken over.
        per: "row": the function takes a row [D] and changes it in place. "element": it takes one number of the row and
            its slots, and returns the new ones, the weight first; such a rule has no scalars.

    The function's first two parameters are the row and its summed gradient. All others go by name, in any order: slots
    ([D] float32), scalars ([1] float32), hyperparameters (float32), and, where it names them,

    - `step`: the number of this update, from 1 (int);
    - `key`: of the row, as int64 (uint64 keys from 2^63 on are negative);
    - `touches`: how often this row has been updated, this time included (float32, exact up to 2^24). It is kept with
      the row, as one more scalar.

    Returns:
        A decorator. What it makes is a subclass of `sok.optimizers.Optimizer`, whose constructor takes the
        hyperparameters and what every optimizer takes.

    Raises:
        ValueError: names that are none, that come twice, or that the function does not have; a function without source.
        TypeError: not a function.

    Example:
        >>> import numpy as np, sok
        >>> @sok.optimizers.rule(slots=["m"], hyper=["learning_rate", "beta"])
        ... def signum(w, g, m, learning_rate, beta=0.9):
        ...     m[:] = beta * m + (1 - beta) * g
        ...     w[:] -= learning_rate * np.sign(m)
        >>> optimizer = signum(learning_rate=0.1)
        >>> optimizer.rule, optimizer.beta
        ('signum(m)', 0.9)
    """

    def decorate(function: Callable[..., Any]) -> type[OwnRule]:
        return _class_of(_Declared(function, _starts(slots), _starts(scalars), tuple(hyper), version, per))

    return decorate


class OwnRule(Optimizer):
    """What `rule` makes of a function: an optimizer of embedding tables.

    Attributes:
        function: the function, of Python.
    """

    function: Callable[..., Any]
    _declared: _Declared
    _made: Any = None  # the compiled function, kept as long as the class
    _agreed: Job | None = None

    def __init__(self, learning_rate: Rate | None = None, name: str | None = None, **options: Any) -> None:
        declared = type(self)._declared
        given = {**declared.defaults, **options}
        if learning_rate is not None:
            given["learning_rate"] = learning_rate
        missing = [one for one in declared.hyper if one not in given]
        if missing:
            raise TypeError(
                f"{type(self).__name__}() must be given {', '.join(f'`{one}`' for one in missing)}: the function has "
                "no default for it."
            )
        hyper = {one: given.pop(one) for one in declared.hyper if one != "learning_rate"}
        super().__init__(given.pop("learning_rate"), name, hyper=hyper, **given)

    def _apply(self, pairs: list[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        if pairs:
            self._agree(job_of([variable for _, variable in pairs]))
        return super()._apply(pairs, *args, **kwargs)

    def _agree(self, job: Job) -> None:
        """Compiles the rule and registers it, once, and compares it with those of other workers. Collective."""
        if self._agreed is job:
            return
        # By one name: optimizers of other rules have other names.
        said = together(job.transport, "sok/own_rule", self._compile)
        for rank, theirs in enumerate(said):
            differ = [what for what in said[0] if theirs[what] != said[0][what]]
            if differ:
                what = differ[0]
                raise ValueError(
                    f"Optimizer '{self._slot_set}' must have one rule on all workers. Its {what} is "
                    f"{said[0][what]!r} on rank 0 and {theirs[what]!r} on rank {rank}. Start all of them with the same "
                    "files."
                )
        self._agreed = job

    def _update(self, ready: list[gradients.TableGradient], step: Any, hyper: Any) -> Any:
        if self.nonfinite_gradients != "raise":
            return super()._update(ready, step, hyper)
        # Whether its results are finite is known only when they are there: for all tables, before one changes.
        job = job_of([g.variable for g in ready])
        why = gradients.tried(ready, step, hyper, self.rule, self._slot_set)
        agreed = agree(job.transport, f"sok/{self._slot_set}/tried", why)
        with tf.control_dependencies([] if tf.executing_eagerly() else [agreed]):
            return super()._update(ready, step, hyper)

    def _compile(self) -> dict[str, str]:
        """What workers compare."""
        cls, declared = type(self), self._declared
        if cls._made is None:
            address, kept = declared.compiled()
            reads_keys = "key" in declared.source.parameters
            rules.register(declared.rule, address, prefetches=True, reads_keys=reads_keys)
            cls._made = kept
        return {
            "rule": declared.rule.name,
            "hyperparameters": ", ".join(declared.hyper),
            "initial values": ", ".join(str(slot.start) for slot in declared.rule.slots),
            "source": f"{declared.source.place}, {declared.source.digest}",
        }


class _Declared:
    """What the decorator was told."""

    def __init__(
        self,
        function: Callable[..., Any],
        slots: Mapping[str, float | str],
        scalars: Mapping[str, float | str],
        hyper: tuple[str, ...],
        version: int | str | None,
        per: str,
    ) -> None:
        self.source = source = compiled.source_of(function, "Rule")
        self.slots, self.scalars, self.hyper, self.per = slots, scalars, hyper, per
        self.defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is not parameter.empty
        }
        self._check(f"Rule '{function.__name__}' ({source.place})")
        self.counts = "touches" in source.parameters
        kept = {**slots, **scalars, **({"touches": 0.0} if self.counts else {})}
        word = function.__name__ if version is None else f"{function.__name__}.{version}"
        if not re.fullmatch(r"[A-Za-z0-9_.]+", word):
            raise ValueError(f"`version` must be a number or a word of letters, digits and '_'. Received: {version!r}.")
        slots_of_rule = tuple(rules.Slot(name, start, scalar=name not in slots) for name, start in kept.items())
        self.rule = rules.RowRule(
            rules.name_of(word, slots_of_rule),
            slots=slots_of_rule,
            hyper=tuple(rules.Hyper(name, _finite) for name in hyper if name != "learning_rate"),
            counts_steps="step" in source.parameters,
            needs_whole_row=per == "row",
        )
        rules.declare(self.rule)

    def _check(self, what: str) -> None:
        if self.per not in ("row", "element"):
            raise ValueError(f"`per` must be 'row' or 'element'. Received: {self.per!r}.")
        kept = [*self.slots, *self.scalars]
        names = [*kept, *self.hyper]
        for name in names:
            if not isinstance(name, str) or not name.isidentifier() or name in _KNOWN or names.count(name) > 1:
                raise ValueError(
                    f"{what}: names of slots, scalars and hyperparameters must be names of parameters, each once, and "
                    f"none of {', '.join(_KNOWN)}. Received: {name!r} among {names}."
                )
        if "learning_rate" not in self.hyper:
            raise ValueError(f"{what}: `hyper` must have 'learning_rate'. Received: {list(self.hyper)}.")
        if self.per == "element" and self.scalars:
            raise ValueError(
                f"{what}: a rule of one element cannot change what the whole row has. Received: "
                f"scalars={list(self.scalars)}. Write it of a row: per='row'."
            )
        asked = self.source.parameters[2:]
        strange = [name for name in asked if name not in (*names, *_KNOWN)]
        unused = [name for name in kept if name not in asked]
        if len(self.source.parameters) < 2 or strange or unused:
            raise ValueError(
                f"{what} must have as parameters the row, its gradient, and then by name all slots and scalars, and "
                f"those of the hyperparameters, {', '.join(_KNOWN)} that it reads. Received: "
                f"{list(self.source.parameters)}, slots and scalars {kept}, hyperparameters {list(self.hyper)}."
            )
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Return):
                returned = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] if node.value else []
                if len(returned) != (1 + len(self.slots) if self.per == "element" else 0):
                    due = "nothing: it changes the row in place"
                    if self.per == "element":
                        due = f"`{', '.join((self.source.parameters[0], *self.slots))}`, as they are now"
                    raise ValueError(
                        f"{what} must return {due}. Received, in line {node.lineno}: `{ast.unparse(node)}`."
                    )
        for name, start in {**self.slots, **self.scalars}.items():
            if start not in self.hyper and (isinstance(start, str) or not _is_finite(start)):
                raise ValueError(
                    f"{what}: '{name}' must start as a finite number or a hyperparameter. Received: {start!r}."
                )

    def compiled(self, keep: bool = True) -> tuple[int, Any]:
        """The address of the function for blocks of rows, and what keeps it there."""
        kept, parameters = [slot.name for slot in self.rule.slots], self.source.parameters
        by_element = self.per == "element"
        kinds, arguments = {}, []
        lines = [
            "dim = fields[2]",
            "rows = _sok_carray(_sok_words(fields[3]), (fields[1],))",
            f"hyper = _sok_carray(_sok_doubles(fields[6]), ({len(self.hyper)},))",
            *(["keys = _sok_carray(_sok_words(fields[8]), (fields[1],))"] if "key" in parameters else []),
            # Read here: a loop that writes rows could not know that these stay.
            "step, grads, offset = fields[7], fields[5], fields[4]",
            *(f"h{number} = _sok_float32(hyper[{number}])" for number in range(len(self.hyper))),
            # A row comes from memory while the ones before it are worked on: as far ahead as the built-in rules look.
            f"slots, end = 4 * offset, 4 * (offset + {len(self.slots)} * dim + {len(kept) - len(self.slots)})",
            "ahead = 12 if end <= 256 else 6 if end <= 768 else 3",
            "for i in range(fields[1]):",
            "    coming = rows[min(i + ahead, fields[1] - 1)]",
            "    for at in range(0, 4 * dim, 64):",
            "        _sok_prefetch(coming + at)",
            "    for at in range(slots, end, 64):",
            "        _sok_prefetch(coming + at)",
        ]
        ordered = ["learning_rate", *(one.name for one in self.rule.hyper)]
        vectors = []
        for place, name in enumerate(parameters):
            if place < 2 or name in self.slots:
                address = ("rows[i]", "grads + 4 * i * dim")[place] if place < 2 else _slot(kept.index(name))
                vectors.append(f"v{place} = _sok_carray(_sok_floats({address}), (dim,))")
                kinds[name], argument = arithmetic.ARRAY, f"v{place}"
                if by_element:
                    kinds[name], argument = arithmetic.FLOAT, f"v{place}[j]"
            elif name in self.scalars or name == "touches":
                address = _slot(len(self.slots), kept.index(name) - len(self.slots))
                vectors.append(f"v{place} = _sok_carray(_sok_floats({address}), (1,))")
                kinds[name], argument = arithmetic.CELL, f"v{place}"
                if name == "touches":
                    vectors += [f"v{place}[0] += _sok_float32(1)", f"touches = v{place}[0]"]
                    kinds[name], argument = arithmetic.FLOAT, "touches"
            elif name in ("step", "key"):
                vectors += ["key = keys[i]"] if name == "key" else []
                kinds[name], argument = arithmetic.INT, {"step": "step", "key": "key"}[name]
            else:
                kinds[name], argument = arithmetic.FLOAT, f"h{ordered.index(name)}"
            arguments.append(argument)
        lines += [f"    {line}" for line in vectors]
        call = f"_sok_rule({', '.join(arguments)})"
        if by_element:
            results = [arguments[0], *(arguments[parameters.index(name)] for name in self.slots)]
            lines += ["    for j in range(dim):", f"        {', '.join(results)} = {call}"]
        else:
            lines.append(f"    {call}")
        return compiled.compiled(self.source, kinds, "\n".join(lines), 9 if "key" in parameters else 8, "Rule", keep)


def _slot(vectors: int, scalars: int = 0) -> str:
    """The address behind so many slots of a row."""
    return f"rows[i] + 4 * (offset + {vectors} * dim + {scalars})"


def _class_of(declared: _Declared) -> type[OwnRule]:
    function = declared.source.function
    members = {
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__ or f"The rule `{function.__name__}` of {function.__module__}.",
        "rule": declared.rule.name,
        "function": staticmethod(function),
        "source": f"{function.__module__}.{function.__qualname__} {declared.source.digest}",
        "_declared": declared,
    }
    return type(function.__name__, (OwnRule,), members)


def _starts(names: Sequence[str] | Mapping[str, float | str]) -> dict[str, float | str]:
    return dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 0.0)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def _finite(name: str, value: float) -> float:
    if not _is_finite(value):
        raise ValueError(f"`{name}` must be a finite number. Received: {value!r}.")
    return float(value)
