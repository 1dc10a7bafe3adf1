"""Functions of a model that were traced before, for training, must not be taken for its export."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.eager.polymorphic_function import polymorphic_function

from sok.base.patching import Here, Patch

_Function = polymorphic_function.Function
_copies = Here()


@contextlib.contextmanager
def functions_are_traced_anew() -> Iterator[None]:
    """Inside, in this thread, a call of a `tf.function` is one of a copy of it that has not been traced yet.

    What a function was traced to holds the ops of that time, and it would keep what it is traced to now. TensorFlow's
    class of functions is touched as long as one of these is open.
    """
    with _patch.begun(), _copies.inside({}):
        yield


def _calling_copies(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        copies = _copies.value
        # Of a subclass, such as a function that was loaded, there is nothing to trace. A copy is a copy already.
        is_traced = type(function) is _Function and copies is not None
        if is_traced and not any(function is copy for _, copy in copies.values()):
            if id(function) not in copies:
                # With the function itself, so that its id stays its own.
                copies[id(function)] = (function, function._clone(None))
            function = copies[id(function)][1]
        return call(function, *args, **kwargs)

    return called


_patch = Patch(lambda: [(_Function, "__call__", _calling_copies)])
