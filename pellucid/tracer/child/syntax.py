"""Questions about pieces of syntax that `rewrite` asks: names, strings, callees, and the owner of an attribute."""

from __future__ import annotations

import ast
from typing import Any

from .recorder import SEEN, Origin, Reads


def with_seen(original: list[ast.stmt], body: list[ast.stmt], value: ast.expr | None = None) -> list[ast.stmt]:
    """`__seen__ = {}`, or another new dictionary, behind the docstring and the `__future__` imports."""
    header = 0
    for statement in original:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        header += 1
    seen = ast.Assign([ast.Name(SEEN, ast.Store())], value or ast.Dict([], []))
    if original:
        ast.copy_location(seen, original[min(header, len(original) - 1)])
        # One line: a statement behind a header has no more.
        seen.end_lineno, seen.end_col_offset = seen.lineno, seen.col_offset
    return [*body[:header], seen, *body[header:]]


def reads_locals(node: ast.AST) -> bool:
    """Whether a function looks at its own variables: there `__seen__` must not be one of them."""
    readers = {"locals", "vars", "dir", "eval", "exec"}
    return any(isinstance(one, ast.Name) and one.id in readers for one in ast.walk(node))


def callee_of(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def origin_of(value: ast.expr) -> Origin | None:
    callee = callee_of(value)
    if callee is not None:
        return Origin(callee, is_local=False)
    return Origin(value.id, is_local=True) if isinstance(value, ast.Name) else None


def reads_in(value: ast.expr) -> Reads:
    """Variables, attributes and callees whose values flow into this one, as far as its text tells."""
    nodes = list(ast.walk(value))
    callees = {id(one.func) for one in nodes if isinstance(one, ast.Call)}
    names = {one.id for one in nodes if isinstance(one, ast.Name) and id(one) not in callees} - {"self", "cls"}
    attributes = {one.attr for one in nodes if isinstance(one, ast.Attribute) and id(one) not in callees}
    calls = {name for one in nodes if (name := callee_of(one)) is not None}
    return Reads(tuple(sorted(names)), tuple(sorted(attributes)), tuple(sorted(calls)))


def variables_in(target: ast.expr) -> tuple[str, ...]:
    """The local variables that an assignment to `target` sets."""
    if isinstance(target, ast.Tuple | ast.List):
        return tuple(name for one in target.elts for name in variables_in(one))
    if isinstance(target, ast.Starred):
        return variables_in(target.value)
    return (target.id,) if isinstance(target, ast.Name) else ()


def names_in(node: ast.AST) -> tuple[str, ...]:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return tuple(sorted(names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}))


def strings_in(node: ast.AST) -> tuple[str, ...]:
    texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return tuple(sorted(text for text in texts if len(text) <= 80))


def owner_of(target: ast.expr) -> tuple[list[ast.expr], tuple[str, ...] | None]:
    """For `root.a.field`: the name `root` and ("a",); for anything but attributes: nothing."""
    attributes: list[str] = []
    base = target.value if isinstance(target, ast.Attribute) else None
    while isinstance(base, ast.Attribute):
        attributes.insert(0, base.attr)
        base = base.value
    if not isinstance(base, ast.Name):
        return [], None
    return [ast.copy_location(ast.Name(base.id, ast.Load()), target)], tuple(attributes)


def call_of(owner: str, method: str, where: ast.AST, *arguments: ast.expr) -> ast.Call:
    """`owner.method(*arguments)` on the line of `where`."""
    function = ast.Attribute(ast.Name(owner, ast.Load()), method, ast.Load())
    return ast.copy_location(ast.Call(function, list(arguments), []), where)


def source_of(source: list[str], node: Any) -> str:
    """The text of a node on one line; columns of the syntax tree count bytes."""
    lines = [line.encode() for line in source[node.lineno - 1 : node.end_lineno]]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return " ".join(line.strip().decode() for line in lines)
