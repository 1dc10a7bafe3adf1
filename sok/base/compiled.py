"""C functions made of Python functions, by Numba."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from sok.base import arithmetic

_OPTIONS = {"nogil": True, "fastmath": False, "error_model": "numpy"}

_LOOP = """
def loop(block):
    fields = _sok_carray(block, ({fields},))
{body}
"""


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python function as it is written."""

    function: Callable[..., Any]
    tree: ast.FunctionDef  # with the numbers of its lines in the file

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(argument.arg for argument in self.tree.args.args)

    @property
    def place(self) -> str:
        """The file and line."""
        return f"{self.function.__code__.co_filename}, line {self.tree.lineno}"

    @property
    def digest(self) -> str:
        """Of what it says, comments and blank lines aside. The same in each version of Python."""
        return hashlib.blake2b(ast.unparse(self.tree).encode(), digest_size=8).hexdigest()


def source_of(function: Callable[..., Any], what: str) -> Source:
    """Reads the source of a function.

    Args:
        what: it is, for messages.

    Raises:
        TypeError: no function that is defined by `def`.
        ValueError: there is no source, or it has other parameters than by name.
    """
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise TypeError(f"{what} must be a function, made by `def`. Received: {function!r}.")
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"{what} '{function.__name__}' has no source that could be read, and is compiled from it: define it in a "
            "file, or in a cell of a notebook."
        ) from error
    (tree,) = ast.parse(textwrap.dedent(text)).body
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{what} '{function.__name__}' must be a function, made by `def`.")
    tree = ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    more = tree.args.vararg or tree.args.kwarg or tree.args.kwonlyargs or tree.args.posonlyargs
    if more:
        raise ValueError(f"{what} '{function.__name__}' must have plain parameters: no `*`, `**` or `/`.")
    tree.decorator_list, tree.args.defaults, tree.returns = [], [], None
    for argument in tree.args.args:
        argument.annotation = None
    return Source(function, tree)


def compiled(
    source: Source, kinds: Mapping[str, str], loop: str, fields: int, what: str, keep: bool = True
) -> tuple[int, Any]:
    """Compiles a function, and a C function `void (const int64_t* block)` that calls it.

    Args:
        kinds: of the parameters, see `arithmetic`.
        loop: the lines of the C function: from `fields`, the words of the block, it calls `_sok_rule`. It has
            `_sok_floats`, `_sok_doubles` and `_sok_words`, which give arrays of (address, length).
        fields: words of the block that it reads.
        what: it is, for messages.
        keep: on disk, and takes it from there.

    Returns:
        The address, and what must live as long as it is called.

    Raises:
        ImportError: there is no Numba.
        ValueError: it cannot be compiled. The message names the line.
    """
    numba = _numba(f"{what} '{source.function.__name__}'")
    function = source.function
    closure = inspect.getclosurevars(function)
    values = {**function.__globals__, **closure.nonlocals}
    _check_names(source, kinds, values, what)
    own = arithmetic.rewritten(source.tree, kinds, values)
    array, float32 = numba.types.Array(numba.float32, 1, "C"), numba.float32
    types = {arithmetic.ARRAY: array, arithmetic.CELL: array, arithmetic.FLOAT: float32, arithmetic.INT: numba.int64}
    compile_own = numba.njit(**_OPTIONS)(_function(own, source, {**values, **arithmetic.NAMES}))
    tree = ast.parse(_LOOP.format(fields=fields, body=textwrap.indent(loop, "    "))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    for node in ast.walk(tree):  # whoever looks for a line of it finds the function
        if isinstance(node, (ast.expr, ast.stmt, ast.arg)):
            ast.copy_location(node, source.tree)
    made = _function(tree, source, {**_tools(numba), "_sok_rule": compile_own})
    # Numba finds what it has kept by name, and looks only whether the file has changed.
    key = hashlib.blake2b(f"{loop} {ast.unparse(own)} {source.digest}".encode(), digest_size=8).hexdigest()
    made.__qualname__ = f"{function.__qualname__}.{key}"
    signature = numba.void(numba.types.CPointer(numba.int64))
    try:
        try:
            result = numba.cfunc(signature, cache=keep, **_OPTIONS)(made)
        except RuntimeError:  # nowhere to keep it: no file, or no folder that could be written to
            result = numba.cfunc(signature, **_OPTIONS)(made)
    except Exception as error:  # Numba has its own classes, and lets those of others through
        try:  # by itself it says what is wrong without the loop around it
            compile_own.compile(tuple(types[kinds[name]] for name in source.parameters))
        except Exception as of_own:
            raise _words(of_own, source, what) from error
        raise _words(error, source, what) from error
    return result.address, result


def _check_names(source: Source, kinds: Mapping[str, str], values: Mapping[str, Any], what: str) -> None:
    """Of names that are not there Numba does not say the line."""
    names = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name)]
    known = {*kinds, *values, *vars(builtins), *(node.id for node in names if isinstance(node.ctx, ast.Store))}
    for node in names:
        if node.id not in known:
            raise _cannot(source, what, node.lineno, f"there is no `{node.id}`.")
    for attribute in ast.walk(source.tree):
        if isinstance(attribute, ast.Attribute) and isinstance(attribute.value, ast.Name):
            owner = values.get(attribute.value.id) if attribute.value.id not in kinds else None
            if inspect.ismodule(owner) and not hasattr(owner, attribute.attr):
                raise _cannot(source, what, attribute.lineno, f"there is no `{ast.unparse(attribute)}`.")


def _cannot(source: Source, what: str, line: int, why: str) -> ValueError:
    file = source.function.__code__.co_filename
    return ValueError(
        f"{what} '{source.function.__name__}' cannot be compiled by Numba: {file}, line {line}: {why} It may use "
        "numbers, NumPy, loops, and functions that Numba compiles (numba.njit)."
    )


def _function(tree: ast.FunctionDef, source: Source, names: dict[str, Any]) -> Any:
    module = ast.Module([tree], [])
    names = {**names, "__builtins__": builtins, "__name__": source.function.__module__}
    exec(compile(module, source.function.__code__.co_filename, "exec"), names)
    return names[tree.name]


def _numba(what: str) -> Any:
    try:
        import numba
        import numba.core.errors
    except ImportError as error:
        raise ImportError(
            f"{what} is compiled by Numba, which is not installed, or does not load ({error}): pip install "
            "'sok[rules]'."
        ) from error
    return numba


def _words(error: Exception, source: Source, what: str) -> ValueError:
    """What Numba says, with the line that it means."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    name = source.function.__code__.co_filename
    lines = re.findall(r'File "([^"]*)", line (\d+)', text)
    own = [int(line) for file, line in lines if name.endswith(file.lstrip("./"))]
    said = [line.strip() for line in text.splitlines() if line.strip()]
    said = [
        line for line in said if not line.startswith(("Failed in nopython mode", "File ", "def ", "<source elided>"))
    ]
    return _cannot(source, what, max(own, default=source.tree.lineno), " ".join(said[:3]) or type(error).__name__)


def _tools(numba: Any) -> dict[str, Any]:
    """What loops reach memory by."""
    from numba.extending import intrinsic

    def pointer_to(kind: Any) -> Any:
        def pointer(typing: Any, address: Any) -> Any:
            signature = numba.types.CPointer(kind)(numba.types.int64)

            def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

            return signature, code

        return intrinsic(pointer)

    @intrinsic
    def prefetch(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            from llvmlite import ir

            word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
            called = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            # To be written, and to stay in the nearest cache; data.
            builder.call(called, [builder.inttoptr(arguments[0], pointer), *(word(value) for value in (1, 3, 1))])
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64), code

    return {
        "_sok_prefetch": prefetch,
        "_sok_carray": numba.carray,
        "_sok_floats": pointer_to(numba.float32),
        "_sok_doubles": pointer_to(numba.float64),
        "_sok_words": pointer_to(numba.int64),
        **arithmetic.NAMES,
    }
