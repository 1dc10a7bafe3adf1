"""Processes that are forked from this one, for tests that kill them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any


def begun(body: Callable[..., Any], *arguments: Any) -> int:
    """The id of a process that runs body(*arguments). Its status is 0, or 1 after it has printed what was raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def ended(body: Callable[..., Any], *arguments: Any) -> int:
    """The status of such a process, as `os.waitpid` has it, when it has ended."""
    return os.waitpid(begun(body, *arguments), 0)[1]
