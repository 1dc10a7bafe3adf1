"""Finds the TensorFlow of the environment that a build is for, also from inside pip's isolated build."""

from __future__ import annotations

import importlib.metadata
import site
import sysconfig

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
