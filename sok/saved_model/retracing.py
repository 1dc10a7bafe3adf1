"""Functions of a model that were traced before, for training, must not be taken for its export."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager.polymorphic_function import polymorphic_function

_Function = polymorphic_function.Function
_lock = threading.Lock()
_open = 0
_original_call: Any = None
_here = threading.local()


@contextlib.contextmanager
def functions_are_traced_anew() -> Iterator[None]:
    """Inside, in this thread, a call of a `tf.function` is one of a copy of it that has not been traced yet.

    What a function was traced to holds the ops of that time, and it would keep what it is traced to now. TensorFlow's
    class of functions is touched as long as one of these is open.
    """
    global _open, _original_call
    before, _here.copies = getattr(_here, "copies", None), {}
    with _lock:
        if _open == 0:
            _original_call = _Function.__call__
            _Function.__call__ = _call
        _open += 1
    try:
        yield
    finally:
        _here.copies = before
        with _lock:
            _open -= 1
            if _open == 0:
                _Function.__call__ = _original_call


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    copies = getattr(_here, "copies", None)
    # Of a subclass, such as a function that was loaded, there is nothing to trace. A copy is a copy already.
    if copies is not None and type(function) is _Function and not any(function is copy for _, copy in copies.values()):
        if id(function) not in copies:
            # With the function itself, so that its id stays its own.
            copies[id(function)] = (function, function._clone(None))
        function = copies[id(function)][1]
    return _original_call(function, *args, **kwargs)
