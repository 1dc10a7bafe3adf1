"""Parameters of public functions have types: `Any` alone is left where no library has a type for what may come."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sok", "sparse_operation_kit", "openembedding", "distributed_embeddings")

# Function, parameter: why no type says more.
UNTYPED = {
    ("inside", "value"): "whatever a thread enters",
    ("row_of", "keys"): "numbers or arrays of any library; what comes back is of the same type",
    ("num_samples", "batch"): "a nest of tensors",
    ("gradient", "target"): "a nest of tensors, as tf.GradientTape takes it",
    ("gradient", "sources"): "a nest of variables, as tf.GradientTape takes it",
    ("gradient", "output_gradients"): "a nest of tensors, as tf.GradientTape takes it",
    ("export_saved_model", "signatures"): "a nest of specs, or a dict of functions",
    ("served_by", "signatures"): "a nest of specs, or a dict of functions",
    ("__init__", "signatures"): "a nest of specs, or a dict of functions",
    ("writer", "frozen"): "what stands for a table, of the kind that the target is for",
}


def public_functions(tree: ast.AST, is_public: bool = True) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if is_public and (not node.name.startswith("_") or node.name.endswith("__")):
                yield node
        elif isinstance(node, ast.ClassDef):
            yield from public_functions(node, is_public and not node.name.startswith("_"))
        elif isinstance(node, (ast.If, ast.Try)):
            yield from public_functions(node, is_public)


def untyped_in(source: str) -> list[tuple[str, str]]:
    return [
        (function.name, argument.arg)
        for function in public_functions(ast.parse(source))
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation) == "Any"
    ]


def test_public_functions_say_what_they_take():
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert len(files) > 200
    found = {(str(path.relative_to(ROOT)), *of) for path in files for of in untyped_in(path.read_text("utf-8"))}
    assert sorted(of for of in found if of[1:] not in UNTYPED) == []
    assert {of[1:] for of in found} == set(UNTYPED)


def test_a_parameter_without_a_type_is_seen():
    source = """
class A:
    def __init__(self, a: Any, b: int): ...
    def _own(self, c: Any): ...
class _B:
    def f(x: Any): ...
if True:
    def g(y: Any, *, z: Any = None, **more: Any): ...
"""
    assert untyped_in(source) == [("__init__", "a"), ("g", "y"), ("g", "z")]
