"""Python functions on float32 as NumPy means them, and as a compiler makes vectors of them.

Numba would do two things otherwise. It takes the `1` of `1 - beta` for an int64 and works in float64 from there on,
where NumPy 2 stays in float32. And it makes a new array of each expression on arrays, which takes longer than a row.
`rewritten` gives the same function with its numbers in float32, and with its expressions on whole arrays as loops.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# What an expression is. A number of Python's own, "int" or "number", takes the dtype of what it meets.
# CELL is an array of one number, ARRAY one as long as a row, FLOAT a float32.
ARRAY, CELL, FLOAT, INT, NUMBER, BOOL, OTHER = "array", "cell", "float", "int", "number", "bool", "other"

_FLOAT32, _MAXIMUM, _MINIMUM = "_sok_float32", "_sok_maximum", "_sok_minimum"
NAMES = {_FLOAT32: np.float32, _MAXIMUM: np.maximum, _MINIMUM: np.minimum}
"""What the rewritten function reads beside what it read before."""

_FEW = ("abs", "min", "max")  # of Python, on numbers
_REDUCTIONS = (np.sum, np.prod, np.mean, np.max, np.min, np.amax, np.amin, np.std, np.var, np.dot, np.vdot)
_PLACE = "_sok_place"


class _NotByElement(Exception):
    """A statement that is more than a loop over elements."""


def rewritten(function: ast.FunctionDef, kinds: Mapping[str, str], values: Mapping[str, Any]) -> ast.FunctionDef:
    """The function in float32, with its expressions on whole arrays as loops over their elements.

    Args:
        kinds: of the parameters. All arrays are as long as the first of them.
        values: what names that are no parameters stand for.
    """
    first = _Numbers(kinds, values, {})
    first.visit(copy.deepcopy(function))
    numbers = _Numbers(kinds, values, first.found)
    function = numbers.visit(copy.deepcopy(function))
    arrays = [name for name, kind in kinds.items() if kind == ARRAY]
    if arrays:
        function.body = _Loops(function, numbers.kinds, values, arrays[0]).block(function.body)
    return ast.fix_missing_locations(function)


def _value(node: ast.expr, kinds: Mapping[str, str], values: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of a module, stands for; None: nobody knows yet."""
    if isinstance(node, ast.Name) and node.id not in kinds:
        return values.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, kinds, values)
        return getattr(owner, node.attr, None) if isinstance(owner, type(math)) else None
    return None


def _is_by_element(function: Any) -> bool:
    return isinstance(function, np.ufunc) and function.signature is None and function.nout == 1


class _Numbers(ast.NodeTransformer):
    """Turns numbers of Python's own into float32 where they meet float32, as NumPy 2 does."""

    def __init__(self, kinds: Mapping[str, str], values: Mapping[str, Any], found: Mapping[str, set[str]]) -> None:
        # Of a name that is given numbers and float32: float32 from the first.
        mixed = {name: FLOAT for name, of in found.items() if FLOAT in of and of <= {FLOAT, INT, NUMBER}}
        others = {name: OTHER for name, of in found.items() if len(of) > 1}
        self.kinds: dict[str, str] = {**others, **mixed, **kinds}
        self.found: dict[str, set[str]] = {}  # what names are given
        self._fixed = frozenset(self.kinds)
        self._values = values

    def _give(self, name: str, kind: str) -> None:
        self.found.setdefault(name, set()).add(kind)
        if name not in self._fixed:
            self.kinds[name] = kind

    def visit(self, node: ast.AST) -> Any:
        return self._of(node)[0] if isinstance(node, ast.expr) else super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        node.value, kind = self._of(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                if kind in (INT, NUMBER) and target.id in self._fixed and self.kinds[target.id] == FLOAT:
                    node.value = _float32(node.value)
                self._give(target.id, kind)
            elif isinstance(target, ast.Tuple):
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        self._give(name.id, OTHER)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        target = ast.parse(ast.unparse(node.target), mode="eval").body
        whole, kind = self._of(ast.copy_location(ast.BinOp(target, node.op, node.value), node))
        if isinstance(node.target, ast.Name) and self.kinds.get(node.target.id) != ARRAY:
            self._give(node.target.id, kind)
        node.value = whole.right
        return node

    def visit_For(self, node: ast.For) -> Any:
        called = node.iter.func if isinstance(node.iter, ast.Call) else node.iter
        if isinstance(node.target, ast.Name):
            self._give(node.target.id, INT if _value(called, self.kinds, self._values) is range else OTHER)
        return self.generic_visit(node)

    def _of(self, node: ast.expr) -> tuple[Any, str]:
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is not None:
            return method(node)
        return self.generic_visit(node), OTHER

    def _meet(self, nodes: list[ast.expr]) -> tuple[list[ast.expr], str]:
        """Operands, and the kind of what comes of them."""
        found = [self._of(node) for node in nodes]
        kinds = {kind for _, kind in found}
        if OTHER in kinds:
            return [node for node, _ in found], OTHER
        if not kinds & {ARRAY, FLOAT}:
            return [node for node, _ in found], NUMBER if NUMBER in kinds else INT
        nodes = [node if kind in (ARRAY, FLOAT) else _float32(node) for node, kind in found]
        return nodes, ARRAY if ARRAY in kinds else FLOAT

    def _Constant(self, node: ast.Constant) -> tuple[Any, str]:
        return node, _kind_of(node.value)

    def _Name(self, node: ast.Name) -> tuple[Any, str]:
        return node, self.kinds.get(node.id) or _kind_of(_value(node, self.kinds, self._values))

    def _Attribute(self, node: ast.Attribute) -> tuple[Any, str]:
        return node, _kind_of(_value(node, self.kinds, self._values))

    def _BinOp(self, node: ast.BinOp) -> tuple[Any, str]:
        if isinstance(node.op, ast.Pow):
            right, of_right = self._of(node.right)
            if of_right == INT and isinstance(right, ast.Constant):  # x ** 2 is x * x
                node.left, kind = self._of(node.left)
                return node, kind
        (node.left, node.right), kind = self._meet([node.left, node.right])
        return node, NUMBER if kind == INT and isinstance(node.op, ast.Div) else kind

    def _UnaryOp(self, node: ast.UnaryOp) -> tuple[Any, str]:
        node.operand, kind = self._of(node.operand)
        return node, BOOL if isinstance(node.op, ast.Not) else kind

    def _Compare(self, node: ast.Compare) -> tuple[Any, str]:
        (node.left, *node.comparators), kind = self._meet([node.left, *node.comparators])
        return node, ARRAY if kind == ARRAY else BOOL if kind != OTHER else OTHER

    def _IfExp(self, node: ast.IfExp) -> tuple[Any, str]:
        node.test = self.visit(node.test)
        (node.body, node.orelse), kind = self._meet([node.body, node.orelse])
        return node, kind

    def _Subscript(self, node: ast.Subscript) -> tuple[Any, str]:
        kind = self.kinds.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if kind not in (ARRAY, CELL):
            return node, OTHER
        return node, kind if isinstance(node.slice, ast.Slice) else FLOAT

    def _Call(self, node: ast.Call) -> tuple[Any, str]:
        called = _value(node.func, self.kinds, self._values)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if called is np.where and len(node.args) == 3:
            test, of_test = self._of(node.args[0])
            others, kind = self._meet(node.args[1:])
            if not {kind, of_test} & {ARRAY, OTHER}:
                return ast.copy_location(ast.IfExp(test, *others), node), kind
            if of_test == ARRAY and kind in (INT, NUMBER):
                others = [_float32(other) for other in others]
            node.args = [test, *others]
            return node, ARRAY if of_test == ARRAY else kind
        if called is np.float32:
            node.args, kind = self._meet(node.args)
            return node, ARRAY if kind == ARRAY else FLOAT
        if _is_by_element(called) or called is np.clip or (name in _FEW and called is getattr(builtins, name)):
            node.args, kind = self._meet(node.args)
            if called is np.clip and kind == FLOAT and len(node.args) == 3:
                return _clipped(node), kind
            # NumPy's functions make float64 of Python's numbers, and that stays.
            return node, kind if kind in (ARRAY, FLOAT) or name in _FEW else OTHER
        node.args = [self.visit(argument) for argument in node.args]
        if any(called is reduction for reduction in _REDUCTIONS) and not node.keywords:
            return _float32(node), FLOAT
        if called is len or called is int:
            return node, INT
        if getattr(called, "__module__", None) == "math":
            return _float32(node), FLOAT
        return node, OTHER


def _kind_of(value: Any) -> str:
    kinds: dict[type, str] = {bool: BOOL, int: INT, float: NUMBER, np.float32: FLOAT}
    return kinds.get(type(value), OTHER)


def _clipped(node: ast.Call) -> ast.expr:
    """np.clip for one number, which Numba lacks."""

    def call(name: str, *arguments: ast.expr) -> ast.expr:
        return ast.copy_location(
            ast.Call(ast.copy_location(ast.Name(name, ast.Load()), node), list(arguments), []), node
        )

    value, low, high = node.args
    return call(_MINIMUM, call(_MAXIMUM, value, low), high)


def _float32(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.copy_location(ast.Name(_FLOAT32, ast.Load()), node), [node], []), node)


@dataclasses.dataclass
class _Loops:
    """Puts what is done to each element of arrays into loops, neighbours into one."""

    function: ast.FunctionDef
    kinds: Mapping[str, str]
    values: Mapping[str, Any]
    first: str  # of the arrays

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        group: list[ast.stmt] = []  # of neighbours that can be one loop
        for statement in statements:
            if self._element_of(statement, set()) is not None:
                group.append(statement)
                continue
            done += self._loop(group)
            group = []
            for field in ("body", "orelse"):
                inner = getattr(statement, field, None)
                if inner:
                    setattr(statement, field, self.block(inner))
            done.append(statement)
        return done + self._loop(group)

    def _loop(self, group: list[ast.stmt]) -> list[ast.stmt]:
        """The group as one loop; assignments to arrays that others read stay what they are, before and after."""
        made = [name for s in group if (name := _assigned(s)) is not None]
        outside = [name for name in made if _uses(self.function, name) != sum(_uses(s, name) for s in group)]
        if outside:
            at = next(i for i, s in enumerate(group) if _assigned(s) in outside)
            return [*self._loop(group[:at]), group[at], *self._loop(group[at + 1 :])]
        if not group:
            return []
        head = ast.parse(f"for {_PLACE} in range(len({self.first})): pass").body[0]
        assert isinstance(head, ast.For)
        for node in ast.walk(head):
            ast.copy_location(node, group[0])
        body = [self._element_of(statement, set(made)) for statement in group]
        head.body = [statement for statement in body if statement is not None]
        return [head]

    def _element_of(self, statement: ast.stmt, numbers: set[str]) -> ast.stmt | None:
        """The statement for one element; None: there is no such statement.

        Args:
            numbers: names of arrays that are numbers within the loop.
        """
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        elif isinstance(statement, ast.AugAssign):
            target = statement.target
        else:
            return None
        name = target.value if isinstance(target, ast.Subscript) and _is_whole(target.slice) else target
        if not isinstance(name, ast.Name) or self.kinds.get(name.id) != ARRAY:
            return None
        if isinstance(statement.value, (ast.Name, ast.Subscript)) and isinstance(target, ast.Name):
            return None  # another name of the same array
        is_new = isinstance(statement, ast.Assign) and isinstance(target, ast.Name)
        if is_new and name.id in {argument.arg for argument in self.function.args.args}:
            return None  # names another array from here on
        try:
            value = self._element(statement.value, numbers)
        except _NotByElement:
            return None
        if is_new and not _has_array(statement.value, self.kinds):
            return None
        here = self._element(ast.copy_location(ast.Name(name.id, ast.Load()), name), numbers)
        assert isinstance(here, (ast.Name, ast.Subscript))
        here.ctx = ast.Store()
        if isinstance(statement, ast.Assign):
            return ast.copy_location(ast.Assign([here], value), statement)
        return ast.copy_location(ast.AugAssign(here, statement.op, value), statement)

    def _element(self, node: ast.expr, numbers: set[str]) -> ast.expr:
        node = copy.copy(node)
        if isinstance(node, ast.Subscript) and _is_whole(node.slice):
            return self._element(node.value, numbers)
        if isinstance(node, ast.Name):
            if self.kinds.get(node.id) != ARRAY or node.id in numbers:
                return node
            place = ast.copy_location(ast.Name(_PLACE, ast.Load()), node)
            return ast.copy_location(ast.Subscript(node, place, ast.Load()), node)
        if not _has_array(node, self.kinds):
            if any(isinstance(inner, ast.Call) and self._is_unknown(inner) for inner in ast.walk(node)):
                raise _NotByElement
            return node
        if isinstance(node, ast.BinOp):
            node.left, node.right = self._element(node.left, numbers), self._element(node.right, numbers)
            return node
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            node.operand = self._element(node.operand, numbers)
            return node
        if isinstance(node, ast.Compare) and len(node.comparators) == 1:
            node.left = self._element(node.left, numbers)
            node.comparators = [self._element(node.comparators[0], numbers)]
            return node
        if isinstance(node, ast.Call) and not node.keywords and not self._is_unknown(node):
            called = _value(node.func, self.kinds, self.values)
            node.args = [self._element(argument, numbers) for argument in node.args]
            if called is np.where:
                return ast.copy_location(ast.IfExp(*node.args), node)
            if called is np.clip:
                return _clipped(node)
            return node
        raise _NotByElement

    def _is_unknown(self, node: ast.Call) -> bool:
        called = _value(node.func, self.kinds, self.values)
        if called is np.where or called is np.clip:
            return len(node.args) != 3
        return not (
            _is_by_element(called)
            or called is np.float32
            or (isinstance(node.func, ast.Name) and node.func.id == _FLOAT32)
            or (any(called is known for known in (abs, min, max)) and not _has_array(node, self.kinds))
            or getattr(called, "__module__", None) == "math"
        )


def _is_whole(place: ast.expr) -> bool:
    return isinstance(place, ast.Slice) and place.lower is place.upper is place.step is None


def _has_array(node: ast.AST, kinds: Mapping[str, str]) -> bool:
    if isinstance(node, ast.Name):
        return kinds.get(node.id) == ARRAY
    return any(_has_array(inner, kinds) for inner in ast.iter_child_nodes(node))


def _assigned(statement: ast.stmt) -> str | None:
    """The name that an assignment gives an array."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _uses(node: ast.AST, name: str) -> int:
    return sum(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))
