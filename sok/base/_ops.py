"""The only file that loads the native library; everything else asks `lib()` for it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sok.base.patching import Here

if TYPE_CHECKING:
    import numpy as np

LIBRARY_NAME = "libsok_ops.so"
SERVING_LIBRARY_NAME = "libsok_serving.so"
BUILD_INFO_NAME = "build_info.json"

# SOK_NATIVE_DIR names another build of the libraries, for tests of those.
_NATIVE_DIR = Path(os.environ.get("SOK_NATIVE_DIR") or Path(__file__).resolve().parents[1] / "_native")
# What gives TensorFlow the gradients of our ops, tables their lookup and another placement, TensorFlow's checkpoints
# the rows of tables, and exports the sessions of v1; and what AutoGraph is told of us. They are built on this module
# and on tables, so they are loaded by name with the library, which every table needs.
_REGISTERED = (
    "sok.base.autograph",
    "sok.lookup.gradients",
    "sok.lookup.lookup",
    "sok.table.resharding",
    "sok.checkpoint.tf_checkpoints",
    "sok.compat.session_export",
)

# Reentrant: the gradient module may call lib() while lib() imports it.
_lock = threading.RLock()
_library: Any = None
_serving_library: Any = None
_is_ready = False
_substitutes = Here()


class NativeLibraryError(ImportError):
    """The native library is missing, broken, or built for another TensorFlow. The message says how to fix it."""


def lib() -> Any:
    """Returns the module of native ops, loading the library and registering its gradients on the first call.

    Op `Sok>TableLookup` is its function `sok_table_lookup`, and so on. Safe from several threads.

    Raises:
        NativeLibraryError: the library is missing, cannot be loaded, or was built for another TensorFlow
            (major.minor). A subclass of `ImportError`.

    Example:
        >>> from sok.base import _ops
        >>> _ops.lib() is _ops.lib()
        True
    """
    global _library, _is_ready
    if _substitutes.value is not None:
        return _substitutes.value
    # Callers without the lock must not see the library before its gradients are registered.
    if _is_ready:
        return _library
    with _lock:
        if _library is None:
            _library = _load(library_path())
            try:
                for module in _REGISTERED:
                    importlib.import_module(module)
            except BaseException:
                _library = None
                raise
            _is_ready = True
        return _library


def serving_lib() -> Any:
    """Returns the module of ops that a native export is made of, loading `libsok_serving.so` on the first call.

    Raises:
        NativeLibraryError: as with `lib()`.
    """
    global _serving_library
    with _lock:
        if _serving_library is None:
            _serving_library = _load(serving_library_path())
        return _serving_library


def crc32c(data: np.ndarray, before: int = 0) -> int:
    """Returns the CRC32C of the bytes of a contiguous NumPy array that follow bytes of CRC `before`.

    Example:
        >>> import numpy as np
        >>> from sok.base import _ops
        >>> hex(_ops.crc32c(np.frombuffer(b"123456789", np.uint8)))
        '0xe3069283'
    """
    serving_lib()  # says what is wrong with a library that does not load
    function = ctypes.CDLL(str(serving_library_path())).SokCrc32c
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32), ctypes.c_uint32
    return function(data.ctypes.data, data.nbytes, before)


def crc32c_each(rows: np.ndarray, before: int) -> np.ndarray:
    """Returns the CRC32C of each of `rows` [n, m] uint8, of bytes that follow bytes of CRC `before`: [n] uint32."""
    import numpy as np

    serving_lib()
    crcs = np.empty(len(rows), np.uint32)
    function = ctypes.CDLL(str(serving_library_path())).SokCrc32cEach
    sizes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint32)
    function.argtypes, function.restype = (ctypes.c_void_p, *sizes, ctypes.c_void_p), None
    function(rows.ctypes.data, rows.shape[1], len(rows), before, crcs.ctypes.data)
    return crcs


def has_redis() -> bool:
    """Whether libsok_serving.so was built with hiredis, and reads rows from Redis."""
    serving_lib()
    return bool(ctypes.CDLL(str(serving_library_path())).SokHasRedis())


def forget_collectives() -> None:
    """From now on `collectives` says what this worker begins after this."""
    lib()
    ctypes.CDLL(str(library_path())).SokForgetCollectives()


def collectives() -> str:
    """Returns as JSON what `SokCollectives` (ops/trace_ops.cc) says: what this worker has begun and waits for."""
    lib()  # before anything else loads the file, or its ops would have no functions
    function = ctypes.CDLL(str(library_path())).SokCollectives
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_int64), ctypes.c_int64
    size = 1 << 16
    while True:
        text = ctypes.create_string_buffer(size)
        needed = function(text, size)
        if needed <= size:
            return text.raw[:needed].decode()
        size = 2 * needed


def close_mail() -> None:
    """Ends what workers of one host tell one another, for all of them. Does not ask TensorFlow, which may hang."""
    ctypes.CDLL(str(library_path())).SokCloseMail()


class _RuleLayout(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_int64),
        ("hyper", ctypes.c_char_p),
        ("starts", ctypes.c_char_p),
        ("prefetches", ctypes.c_int64),
        ("reads_keys", ctypes.c_int64),
    )


def register_rule(name: str, hyper: str, starts: str, function: int, prefetches: bool, reads_keys: bool) -> None:
    """Calls `SokRegisterRule` (include/sok/rules/own_rule.h). Raises ValueError."""
    layout = _RuleLayout(ctypes.sizeof(_RuleLayout), hyper.encode(), starts.encode(), prefetches, reads_keys)
    _register("SokRegisterRule", name, ctypes.addressof(layout), function)


def register_initializer(name: str, function: int) -> None:
    """Calls `SokRegisterInitializer` (include/sok/own_initializer.h). Raises ValueError."""
    _register("SokRegisterInitializer", name, function)


def _register(function: str, name: str, *addresses: int) -> None:
    lib()
    register = getattr(ctypes.CDLL(str(library_path())), function)
    register.argtypes, register.restype = (ctypes.c_char_p, *[ctypes.c_void_p] * len(addresses)), ctypes.c_char_p
    error = register(name.encode(), *addresses)
    if error is not None:
        raise ValueError(error.decode())


def rules() -> list[dict[str, Any]]:
    """What native code knows of the update rules of this process: `SokRules`."""
    lib()
    function = ctypes.CDLL(str(library_path())).SokRules
    function.restype = ctypes.c_char_p
    return json.loads(function())


def substituted(library: object) -> contextlib.AbstractContextManager[None]:
    """Inside, and in this thread alone, `lib()` gives `library`: how a model is traced without our ops to export it."""
    return _substitutes.inside(library)


def is_substituted() -> bool:
    """Whether `lib()` gives a substitute, which stands for all workers, here and now."""
    return _substitutes.value is not None


def library_path() -> Path:
    """Where the native library is expected, whether it exists or not."""
    return _NATIVE_DIR / LIBRARY_NAME


def serving_library_path() -> Path:
    """Where the library for servers is expected, whether it exists or not."""
    return _NATIVE_DIR / SERVING_LIBRARY_NAME


def build_info() -> dict[str, Any] | None:
    """What the native library was built with, or None if that is not recorded.

    Returns:
        `sok_version`, `tensorflow_version`, `tensorflow_git_version`, `cxx11_abi`, `compiler`, `system`,
        `git_version` and `date`, as the build wrote them.
    """
    try:
        return json.loads((_NATIVE_DIR / BUILD_INFO_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def remedy() -> str:
    """How to get a native library that fits, for this kind of installation."""
    source = _NATIVE_DIR.parent.parent
    if (source / "CMakeLists.txt").exists():
        return f"Build it for this Python: run `PYTHON=$(command -v python) make native` in {source}"
    build = (
        "uild it for this TensorFlow: run `pip install --no-build-isolation --no-deps --no-cache-dir "
        "--force-reinstall` on the sok source (its folder or sdist); it needs g++ and make"
    )
    built_for = str((build_info() or {}).get("tensorflow_version", ""))
    if not built_for:
        return f"B{build}"
    return f"Install that TensorFlow: `pip install 'tensorflow=={'.'.join(_major_minor(built_for))}.*'`. Or b{build}"


def check() -> None:
    """Raises `NativeLibraryError` if the library is missing or built for another TensorFlow than the installed one.

    Loads neither the library nor TensorFlow, so that `import sok` can afford it on the first public name.
    """
    tensorflow_version = ""
    for distribution in ("tensorflow", "tensorflow-cpu"):
        try:
            tensorflow_version = importlib.metadata.version(distribution)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    _check_file(library_path(), tensorflow_version)


def _check_file(path: Path, tensorflow_version: str) -> str:
    """The TensorFlow that the library was built for ("" if not recorded), after refusing one that cannot fit."""
    if not path.exists():
        raise NativeLibraryError(f"The native library of sok is missing: {path} does not exist. {remedy()}.")
    built_for = str((build_info() or {}).get("tensorflow_version", ""))
    # TensorFlow's C++ interface changes with each minor version. Loading across one may crash instead of failing.
    if built_for and tensorflow_version and _major_minor(built_for) != _major_minor(tensorflow_version):
        raise NativeLibraryError(
            f"The native library of sok was built for TensorFlow {built_for}, but this is TensorFlow "
            f"{tensorflow_version}: {path}. {remedy()}."
        )
    return built_for


def _load(path: Path) -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise NativeLibraryError(
            f"sok needs TensorFlow, which this Python cannot import ({error}). "
            "Install it: pip install 'tensorflow==2.21.*'"
        ) from error

    built_for = _check_file(path, tf.__version__)
    # One that was built by others may pass strings of another layout, which links where few symbols have strings.
    cxx11_abi = (build_info() or {}).get("cxx11_abi", tf.sysconfig.CXX11_ABI_FLAG)
    if cxx11_abi != tf.sysconfig.CXX11_ABI_FLAG:
        raise NativeLibraryError(
            f"The native library of sok was built with _GLIBCXX_USE_CXX11_ABI={cxx11_abi}, but this TensorFlow "
            f"{tf.__version__} with {tf.sysconfig.CXX11_ABI_FLAG}: {path}. {remedy()}."
        )
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise NativeLibraryError(
            f"The native library of sok does not load into TensorFlow {tf.__version__} (built for "
            f"{built_for or 'an unknown version'}): {error}. {remedy()}."
        ) from error


def _major_minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
