"""The PEP 517 backend: setuptools, plus the build requirements that depend on the machine.

A library of TensorFlow ops fits only the TensorFlow that it was built for. So a build takes the TensorFlow of the
environment that pip installs into, even when pip isolates the build from it, and has one downloaded only where there
is none.
"""

from __future__ import annotations

import shutil
from typing import Any

from build_environment import SUPPORTED_TENSORFLOW, environment_tensorflow
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the other hooks are setuptools' own


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Returns what pip installs into an isolated build before it makes a wheel."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _native_requires()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Returns the same for an editable install."""
    return build_meta.get_requires_for_build_editable(config_settings) + _native_requires()


def _native_requires() -> list[str]:
    requires = []
    if environment_tensorflow() is None:
        requires.append(f"tensorflow=={SUPPORTED_TENSORFLOW}.*")
    if shutil.which("cmake") is None:
        requires.append("cmake>=3.18,<4")
    return requires
