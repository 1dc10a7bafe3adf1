"""The PEP 517 backend: setuptools, plus the build requirements that depend on the machine.

A library of TensorFlow ops fits only the TensorFlow that it was built for. So a build takes the TensorFlow of the
environment that pip installs into, even when pip isolates the build from it, and has one downloaded only where there
is none.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import site
import sysconfig
from typing import Any

from setuptools.build_meta import *  # noqa: F403  the other hooks are setuptools' own
from setuptools.build_meta import (
    get_requires_for_build_editable as _setuptools_requires_editable,
)
from setuptools.build_meta import (
    get_requires_for_build_wheel as _setuptools_requires_wheel,
)

SUPPORTED_TENSORFLOW = "2.21"
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tf-nightly")


def environment_paths() -> list[str]:
    """The site-packages of the environment itself, which an isolated build does not have on its sys.path."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return list(dict.fromkeys(paths))


def environment_tensorflow() -> tuple[str, str] | None:
    """Name and version of the distribution that provides TensorFlow, or None."""
    for search in ({}, {"path": environment_paths()}):
        for name in _DISTRIBUTIONS:
            for found in importlib.metadata.distributions(name=name, **search):
                return name, found.version
    return None


def tensorflow_requirement() -> str:
    """The TensorFlow that a package built here needs at run time."""
    found = environment_tensorflow()
    if found is None:
        return f"tensorflow=={SUPPORTED_TENSORFLOW}.*"
    name, version = found
    return f"{name}=={'.'.join(version.split('.')[:2])}.*"


def _native_requires() -> list[str]:
    requires = []
    if environment_tensorflow() is None:
        requires.append(f"tensorflow=={SUPPORTED_TENSORFLOW}.*")
    if shutil.which("cmake") is None:
        requires.append("cmake>=3.18,<4")
    return requires


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _setuptools_requires_wheel(config_settings) + _native_requires()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _setuptools_requires_editable(config_settings) + _native_requires()
