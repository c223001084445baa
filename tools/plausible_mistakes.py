"""Mistakes that a reviewer could overlook: changes of one expression, and how one takes its function's place."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "ssmscope"

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
PAIRS = (
    "min max, amin amax, minimum maximum, argmin argmax, mean sum, any all, triu tril, zeros ones, "
    "zeros_like ones_like, cumsum cumprod, floor ceil, log exp, startswith endswith, find rfind, lstrip rstrip, "
    "split rsplit, sin cos, "
    "partition rpartition, nansum nanmean, logical_and logical_or, head tail, removeprefix removesuffix"
)
EXCHANGED = {one: other for pair in PAIRS.split(", ") for one, other in (pair.split(), reversed(pair.split()))}
DROPPED = set(
    "exp log log1p expm1 sqrt rsqrt abs clamp clip softplus sigmoid silu relu tanh flip sorted reversed softmax "
    "log_softmax square cumsum round floor ceil strip lower roll masked_fill normalize cummax logsumexp mT".split()
)
"""Functions whose argument, or the object of whose method, takes the place of the result."""
SYMMETRIC = set(
    "min max minimum maximum logical_and logical_or isclose allclose equal gcd suppress promote_types".split()
)
LIBRARIES = {"torch", "math", "np", "numpy", "functional", "F", "nn"}
SILENT = set(
    "print warn cast progress advance isinstance super disable_progress_bar enable_progress_bar Sheet panel".split()
)
"""Calls that are left alone with all that is in them."""
UNTRIED = ("__repr__", "__str__")
"""Functions for people's eyes."""
NOT_RUN = ("annotation", "returns", "decorator_list")
LOOKS = set(
    "fontsize linewidth linestyle markersize markeredgewidth alpha figsize pad zorder color help indent ensure_ascii "
    "folded vector rasterized".split()
)
"""Keywords whose values are a matter of looks."""

LARGEST_TOLERANCE = 1e-6
"""Twice a number below it is as good."""

SIZE = re.compile(r"(MAX|STEPS|POSITIONS)_[A-Z_]+")
"""Constants that say how much is computed at once. What is computed from one is a size too, and changes no number."""


def skipped(node: ast.AST) -> bool:
    """Return True for code that computes nothing: messages of errors, docstrings, texts, type checking, piece sizes."""
    if isinstance(node, ast.Assign) and any(SIZE.fullmatch(called(each) or "") for each in ast.walk(node.value)):
        return True
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and called(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg in LOOKS:
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call) and called(node.left.func) == "perf_counter":
        return True
    return isinstance(node, ast.Call) and called(node.func) in SILENT


def called(function: ast.AST) -> str | None:
    """Return the last name of a name or an attribute."""
    return {ast.Name: "id", ast.Attribute: "attr"}.get(type(function)) and (
        function.id if isinstance(function, ast.Name) else function.attr  # type: ignore[attr-defined]
    )


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what could stand by mistake in a node's place."""

    def other(**fields: Any) -> Any:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield other(ops=[COMPARED[type(node.ops[0])]()])
    elif isinstance(node, ast.BinOp) and not is_text(node.left) and not is_text(node.right):
        if type(node.op) in COMPUTED:
            yield other(op=COMPUTED[type(node.op)]())
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            yield node.left
    elif isinstance(node, ast.AugAssign):
        if type(node.op) in COMPUTED and not is_text(node.value):
            yield other(op=COMPUTED[type(node.op)]())
        yield ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.BoolOp):
        yield other(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield other(values=node.values[:-1]) if len(node.values) > 2 else node.values[0]
        yield other(values=node.values[1:]) if len(node.values) > 2 else node.values[1]
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield other(test=ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test))
    elif isinstance(node, ast.For) and any(depends_on_order(each) for each in ast.walk(node)):
        listed = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
        yield other(iter=ast.copy_location(ast.Call(ast.Name("reversed", ast.Load()), [listed], []), node.iter))
    elif isinstance(node, ast.Continue):
        yield ast.copy_location(ast.Break(), node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not skipped(node.value):
        yield ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield other(value=not node.value)
        elif isinstance(node.value, int | float):
            if isinstance(node.value, int) or not 0 < abs(node.value) < LARGEST_TOLERANCE:
                yield other(value=node.value + 1 if isinstance(node.value, int) or not node.value else node.value * 2)
            if node.value:
                yield other(value=node.value - 1 if isinstance(node.value, int) else 0.0)
    elif isinstance(node, ast.Slice):
        if node.lower:
            yield other(lower=None)
        if node.upper:
            yield other(upper=None)
    elif isinstance(node, ast.Call):
        yield from calls(node, other)


def calls(node: ast.Call, other: Any) -> Iterator[ast.AST]:
    name = called(node.func)
    if name in EXCHANGED and not (name in ("split", "rsplit") and len(node.args) + len(node.keywords) < 2):
        function = copy.copy(node.func)
        setattr(function, "id" if isinstance(function, ast.Name) else "attr", EXCHANGED[name])
        yield other(func=function)
    if name in DROPPED:
        method = isinstance(node.func, ast.Attribute) and called(node.func.value) not in LIBRARIES
        if method or node.args:
            kept = node.func.value if method else node.args[0]  # type: ignore[attr-defined]
            is_list = name in ("sorted", "reversed")
            yield ast.copy_location(ast.Call(ast.Name("list", ast.Load()), [kept], []), node) if is_list else kept
    if (
        name not in SYMMETRIC
        and len(node.args) == 2
        and all(isinstance(each, ast.Name | ast.Attribute) for each in node.args)
    ):
        yield other(args=[node.args[1], node.args[0]])
    if name == "where" and len(node.args) == 3:
        yield other(args=[node.args[0], node.args[2], node.args[1]])


def depends_on_order(node: ast.AST) -> bool:
    """Return True for a node that has a loop's order in its result: what yields, appends or continues from a value."""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and not isinstance(node.value, ast.BoolOp)
    ):
        name, value = node.targets[0].id, node.value
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and called(value.left) == name
        return not is_sum and any(called(each) == name for each in ast.walk(value))
    return isinstance(node, ast.Yield) or (isinstance(node, ast.Call) and called(node.func) == "append")


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


class Mutant(NamedTuple):
    file: str
    function: str
    tree: ast.Module
    node: ast.AST
    replacement: ast.AST
    parents: tuple[ast.AST, ...]
    lines: range
    """Lines of the statement's own part, without the statements in it."""
    number: int = 1
    """Number, in the order of the source, among the function's mutants that are written alike."""

    @property
    def name(self) -> str:
        before, after = (ast.unparse(each).partition("\n")[0] for each in (self.node, self.replacement))
        if isinstance(self.node, ast.Constant | ast.Slice):  # which says little by itself
            kinds = (ast.Call, ast.Subscript, ast.Compare, ast.BinOp, ast.stmt)
            within = next(each for each in reversed(self.parents) if isinstance(each, kinds))
            after = f"{after} in {ast.unparse(within).partition(chr(10))[0]}"
        return f"{self.file}:{self.function}: {before} -> {after}" + f" #{self.number}" * (self.number > 1)


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yield every mutant of a file's functions, in the order of the source."""
    tree = ast.parse((PACKAGE / file).read_text())

    def functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                yield from functions(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, ast.FunctionDef) and statement.name not in UNTRIED:
                yield prefix + statement.name, statement

    def within(node: ast.AST, parents: tuple[ast.AST, ...], lines: range, name: str) -> Iterator[Mutant]:
        if skipped(node):
            return
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            lines = range(node.lineno, (body[0].lineno if body else node.end_lineno + 1))
        for replacement in variants(node):
            yield Mutant(file, name, tree, node, replacement, parents, lines)
        for field, value in ast.iter_fields(node):
            if field in NOT_RUN or (field == "args" and isinstance(node, ast.FunctionDef)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from within(child, (*parents, node), lines, name)

    alike: Counter[str] = Counter()
    for name, function in functions(tree.body, ""):
        for statement in function.body:
            for mutant in within(statement, (function,), range(0), name):
                alike[mutant.name] += 1
                yield mutant._replace(number=alike[mutant.name])


def put_in_place(mutant: Mutant) -> None:
    """Give the function, wherever it is referred to, the mutant's code; raise ValueError if it cannot take it."""

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return mutant.replacement if node is mutant.node else self.generic_visit(node)

    importlib.import_module("ssmscope." + mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    path, function = str(PACKAGE / mutant.file), mutant.parents[0]
    assert isinstance(function, ast.FunctionDef)
    start = min(each.lineno for each in (*function.decorator_list, function))

    def is_function(code: CodeType) -> bool:
        return code.co_name == function.name and start <= code.co_firstlineno <= function.lineno

    def codes(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from codes(constant)

    changed = ast.fix_missing_locations(Replace().visit(mutant.tree))
    new = next(filter(is_function, codes(compile(changed, path, "exec"))))
    within = {(each.co_name, each.co_firstlineno): each for each in codes(new) if not each.co_name.startswith("<")}
    gc.unfreeze()  # frozen objects are in no list
    found = [each for each in gc.get_objects() if type(each) is FunctionType and each.__code__.co_filename == path]
    gc.freeze()
    own = [each for each in found if is_function(each.__code__)]
    if not own:
        raise ValueError("no such function")
    for each in own:
        each.__code__ = new
    for each in found:  # Decorators have made functions of those within it.
        place = each.__code__.co_name, each.__code__.co_firstlineno
        if each not in own and place in within:
            each.__code__ = within[place]
