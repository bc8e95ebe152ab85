"""Questions about pieces of syntax that `rewrite` asks: names, strings, callees, and the owner of an attribute."""

from __future__ import annotations

import ast

from .recorder import SEEN, Origin


def with_seen(original: list[ast.stmt], body: list[ast.stmt]) -> list[ast.stmt]:
    """`__seen__ = {}` behind the docstring and the `__future__` imports."""
    header = 0
    for statement in original:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        header += 1
    seen = ast.Assign([ast.Name(SEEN, ast.Store())], ast.Dict([], []))
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
