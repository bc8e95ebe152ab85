"""Rewrites a module of an engine so that its conditions and the values that it gives to fields reach a `Recorder`.

Recorded are the operands of `if`, `elif`, ternaries and of operators in an assigned value, each with its line, and the
values given to a field by assignment, as a key of a dictionary, as a keyword of a declaring function, by `setattr`.
Lines, names, signatures and what the code computes stay as they are. Used by `instrument` when a module is imported.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import syntax
from .recorder import NO_READS, SEEN, Branches, GuardNode, Origin, Place, Reads, Recorder, SiteNode, TermNode
from .syntax import callee_of, names_in, origin_of, owner_of, reads_locals, strings_in, with_seen

RECORDER = "__recorder__"
_LONGEST_STATEMENT, _LONGEST_CONDITION = 400, 4000
_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9_]+")
_UNPACKED = "()"
"""Stands for the variable that holds a tuple while it is unpacked."""

_GROWING = frozenset({"append", "add", "extend", "update"})
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Rules:
    """What counts as a decision: names of fields, functions whose keywords give fields their values, and functions
    whose returned value is a decision of its own, with the field that it stands for."""

    fields: Container[str]
    declarers: Container[str] = ()
    returns: Mapping[str, str] = field(default_factory=dict)


def rewrite(source: str, path: str, recorder: Recorder, rules: Rules) -> ast.Module:
    """The module's tree with the calls to the recorder in it."""
    tree = ast.parse(source, path)
    original = list(tree.body)
    rewriter = _Rewriter(source, recorder.relative(path), recorder, rules, recorder.lines.setdefault(path, {}))
    tree.body = with_seen(original, rewriter.block(tree.body))
    return ast.fix_missing_locations(tree)


class _Rewriter(ast.NodeTransformer):
    """Knows at each statement of one module the conditions around it, and the functions and classes."""

    def __init__(
        self, source: str, file: str, recorder: Recorder, rules: Rules, line_table: dict[int, Branches]
    ) -> None:
        self._lines, self._file, self._recorder, self._rules = source.split("\n"), file, recorder, rules
        self._line_table = line_table
        self._around: list[tuple[int, bool | None]] = []
        self._scopes: list[tuple[str, bool]] = []
        # Ternaries and operators met in the value that is being assigned or returned.
        self._in_value: list[tuple[int, bool | None]] = []
        self._guard_of: dict[ast.If, int] = {}

    # Statements and the conditions around them.

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """A body, where a branch that leaves it is a condition on all that follows."""
        depth = len(self._around)
        done: list[ast.stmt] = []
        for statement in statements:
            head = statement.test if isinstance(statement, ast.If | ast.While) else statement
            is_simple = head is not statement or not hasattr(statement, "body")
            last = (head.end_lineno if is_simple else None) or statement.lineno
            self._line_table.update(dict.fromkeys(range(statement.lineno, last + 1), tuple(self._around)))
            result = self.visit(statement)
            done += result if isinstance(result, list) else [result]
        del self._around[depth:]
        return done

    @contextmanager
    def _under(self, guard: int, branch: bool) -> Iterator[None]:
        self._around.append((guard, branch))
        yield
        self._around.pop()

    def visit_If(self, node: ast.If) -> ast.If:
        guard, node.test = self._condition(node.test)
        self._guard_of[node] = guard
        with self._under(guard, True):
            node.body = self.block(node.body)
        with self._under(guard, False):
            node.orelse = self.block(node.orelse)
        self._around += self._left_by(node)
        return node

    def _left_by(self, node: ast.If) -> list[tuple[int, bool | None]]:
        """The conditions of an `if`/`elif` chain whose bodies leave the block: false for what follows."""
        if not isinstance(node.body[-1], _LEAVING):
            return []
        chained = node.orelse[0] if len(node.orelse) == 1 else None
        rest = self._left_by(chained) if isinstance(chained, ast.If) else []
        return [(self._guard_of[node], False), *rest]

    def visit_While(self, node: ast.While) -> ast.While:
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        reads = syntax.reads_in(node.iter)
        node.iter = self.visit(node.iter)
        if self._in_function():
            node.iter = self._kept(syntax.variables_in(node.target), node.iter, tuple(self._around), reads)
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        node.body = self.block(node.body)
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        node.body = self.block(node.body)
        for handler in node.handlers:
            text = "except" if handler.type is None else f"except {self._text(handler.type)}"
            with self._under(self._guard(handler.lineno, text, ()), True):
                handler.body = self.block(handler.body)
        node.orelse, node.finalbody = self.block(node.orelse), self.block(node.finalbody)
        return node

    def visit_Match(self, node: ast.Match) -> ast.Match:
        for case in node.cases:
            text = f"match {self._text(node.subject)}: case {self._text(case.pattern)}"
            with self._under(self._guard(case.pattern.lineno, text, ()), True):
                case.body = self.block(case.body)
        return node

    def _visit_function(self, node: _Function) -> _Function:
        around, self._around = self._around, []
        for decorator in node.decorator_list:
            # A registry keyed by names, such as `@register("SomeForCausalLM")`, is a condition too.
            if isinstance(decorator, ast.Call) and any(_CLASS_NAME.fullmatch(one) for one in strings_in(decorator)):
                text = "@" + self._text(decorator)
                term = self._term(decorator, text, holds=True)
                self._around.append((self._guard(decorator.lineno, text, (term,)), True))
        self._scopes.append((node.name, True))
        original = list(node.body)
        body = self.block(node.body)
        entered = self._enter(node)
        plain = [ast.copy_location(ast.Expr(entered), node), *body]
        node.body = plain if reads_locals(node) else with_seen(original, body, entered)
        self._scopes.pop()
        self._around = around
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self._scopes.append((node.name, False))
        node.body = self.block(node.body)
        self._scopes.pop()
        return node

    def visit_Lambda(self, node: ast.AST) -> ast.AST:
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_JoinedStr = visit_Assert = visit_Lambda

    # Conditions.

    def _condition(self, test: ast.expr) -> tuple[int, ast.expr]:
        """The guard of a test, and the test with its operands wrapped."""
        line, text = test.lineno, self._text(test, _LONGEST_CONDITION)
        terms: list[int] = []
        wrapped = self._operands(test, terms)
        return self._guard(line, text, tuple(terms)), wrapped

    def _operands(self, test: ast.expr, terms: list[int]) -> ast.expr:
        if isinstance(test, ast.BoolOp):
            test.values = [self._operands(one, terms) for one in test.values]
            return test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand = self._operands(test.operand, terms)
            return test
        index = self._term(test, self._text(test, _LONGEST_CONDITION))
        terms.append(index)
        outside, self._in_value = self._in_value, []
        inner = self.visit(test)
        self._in_value = outside
        if isinstance(inner, ast.Compare) and not isinstance(inner.left, ast.Constant):
            inner.left = self._call("operand", inner.left, ast.Constant(index), inner.left)
        elif isinstance(inner, ast.Compare) and len(inner.comparators) == 1:
            inner.comparators[0] = self._call("operand", test, ast.Constant(index), inner.comparators[0])
        return self._call("term", test, ast.Constant(index), self._mark(test), inner)

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        guard, test = self._condition(node.test)
        node.test = self._call("test", node.test, ast.Constant(guard), test)
        self._in_value.append((guard, None))
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def _value(self, value: ast.expr) -> tuple[ast.expr, Branches]:
        """An assigned value, and the conditions that decide which value it is: those around it and those in it."""
        outside, self._in_value = self._in_value, []
        negated = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
        if negated or isinstance(value, ast.BoolOp | ast.Compare):
            guard, wrapped = self._condition(value)
            self._in_value.append((guard, None))
            wrapped = self._call("test", value, ast.Constant(guard), wrapped)
        else:
            wrapped = self.visit(value)
        branches = (*self._around, *self._in_value)
        self._in_value = outside
        return wrapped, branches

    # Values given to fields.

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list[ast.stmt]:
        if not self._in_function():
            return node
        text, called = self._text(node), callee_of(node.value)
        pair = node.targets[0]
        if isinstance(pair, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(pair.elts) == len(node.value.elts):
            values = zip(pair.elts, list(node.value.elts), strict=True)
            node.value.elts = [self._assigned([target], value, node.lineno, text) for target, value in values]
            return node
        node.value = self._assigned(node.targets, node.value, node.lineno, text)
        if called is not None and isinstance(pair, ast.Name | ast.Tuple):
            # The variable may be given to a field later: what was returned into it decided.
            variable = pair.id if isinstance(pair, ast.Name) else _UNPACKED
            arguments = (ast.Constant(variable), ast.Constant(called), node.value)
            node.value = self._call("local", node.value, *arguments)
        if isinstance(pair, ast.Tuple):
            return [node, *self._reads(pair.elts, node, text, Origin(_UNPACKED, is_local=True))]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if self._in_function() and node.value is not None:
            node.value = self._assigned([node.target], node.value, node.lineno, self._text(node))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        if isinstance(node.target, ast.Name) and self._in_function():
            reads = syntax.reads_in(ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value))
            node.value = self._kept((node.target.id,), node.value, tuple(self._around), reads)
        return [node, *(self._reads([node.target], node, self._text(node)) if self._in_function() else ())]

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.NamedExpr:
        node.value = self.visit(node.value)
        return node

    def _assigned(self, targets: list[ast.expr], value: ast.expr, line: int, text: str) -> ast.expr:
        origin, reads = origin_of(value), syntax.reads_in(value)
        wrapped, branches = self._value(value)
        for target in targets:
            wrapped = self._kept(syntax.variables_in(target), wrapped, branches, reads)
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                wrapped = self._kept((target.value.id,), wrapped, branches, reads, "grown")
            name = self._field_of(target)
            if name is not None:
                root, attributes = owner_of(target)
                index = self._site(line, text, branches, name, origin, attributes, reads)
                wrapped = self._call("assign", value, ast.Constant(index), self._mark(value), wrapped, *root)
        return wrapped

    def _reads(
        self, targets: list[ast.expr], node: ast.stmt, text: str, origin: Origin | None = None
    ) -> list[ast.stmt]:
        """Statements that read fields back, behind one whose value cannot be wrapped."""
        read: list[ast.stmt] = []
        for target in targets:
            name = self._field_of(target)
            root, attributes = owner_of(target)
            if name is not None and root:
                index = self._site(node.lineno, text, tuple(self._around), name, origin, attributes)
                value = copy.deepcopy(target)
                value.ctx = ast.Load()  # type: ignore[attr-defined]
                call = self._call("assign", node, ast.Constant(index), self._mark(node), value, *root)
                read.append(ast.copy_location(ast.Expr(call), node))
        return read

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        for position, (key, value) in enumerate(zip(node.keys, list(node.values), strict=True)):
            name = key.value if isinstance(key, ast.Constant) else None
            if self._in_function() and isinstance(name, str) and name in self._rules.fields:
                node.values[position] = self._declared(name, value, f"{name!r}: {self._text(value)}")
            else:
                node.values[position] = self.visit(value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        callee = callee_of(node)
        if callee == "setattr" and isinstance(node.func, ast.Name) and len(node.args) == 3 and self._in_function():
            origin, reads = origin_of(node.args[2]), syntax.reads_in(node.args[2])
            index = self._site(node.lineno, self._text(node), tuple(self._around), None, origin, None, reads)
            arguments = [self.visit(one) for one in node.args]
            return self._call("set_attribute", node, ast.Constant(index), self._mark(node), *arguments)
        text, grows = self._text(node), callee in _GROWING and len(node.args) == 1 and self._in_function()
        reads = syntax.reads_in(node.args[0]) if grows else NO_READS
        growing = node.func.value if grows and isinstance(node.func, ast.Attribute) else None
        node.func = self.visit(node.func)
        node.args = [self.visit(one) for one in node.args]
        if isinstance(growing, ast.Name) and not isinstance(node.args[0], ast.Starred):
            node.args[0] = self._kept((growing.id,), node.args[0], tuple(self._around), reads, "grown")
        for keyword in node.keywords:
            name = keyword.arg
            if name in self._rules.fields and callee in self._rules.declarers and name and self._in_function():
                short = text if len(text) < _LONGEST_STATEMENT else f"{callee}({name}={self._text(keyword.value)})"
                keyword.value = self._declared(name, keyword.value, short)
            else:
                keyword.value = self.visit(keyword.value)
        return node

    def _declared(self, name: str, value: ast.expr, text: str) -> ast.expr:
        line, origin, reads = value.lineno, origin_of(value), syntax.reads_in(value)
        wrapped, branches = self._value(value)
        index = self._site(line, text, branches, name, origin, None, reads)
        return self._call("assign", value, ast.Constant(index), self._mark(value), wrapped)

    def visit_Return(self, node: ast.Return) -> ast.Return:
        if node.value is None or not self._in_function():
            return node
        text, origin, reads = self._text(node), origin_of(node.value), syntax.reads_in(node.value)
        self._recorder.reads.setdefault(self._scopes[-1][0], set()).update(names_in(node.value), strings_in(node.value))
        wrapped, branches = self._value(node.value)
        name = self._rules.returns.get(self._scopes[-1][0])
        index = self._site(node.lineno, text, branches, name, origin, None, reads)
        self._read_by_branches(branches)
        node.value = self._call("returned", node, ast.Constant(index), self._mark(node), wrapped)
        return node

    def _read_by_branches(self, branches: Branches) -> None:
        """What a function returns depends on the conditions around its returns."""
        read = self._recorder.reads[self._scopes[-1][0]]
        for guard, _ in branches:
            for term in self._recorder.guards[guard].terms:
                node = self._recorder.terms[term]
                read.update(node.names, node.strings)

    def _kept(
        self, names: tuple[str, ...], value: ast.expr, branches: Branches, reads: Reads, method: str = "kept"
    ) -> ast.expr:
        """The value of local variables: what decided it is known where they are read."""
        if not names:
            return value
        index = self._site(value.lineno, "", branches, None, None, None, reads)
        known: Any = names if method == "kept" else names[0]
        return self._call(method, value, ast.Constant(index), self._mark(value), ast.Constant(known), value)

    # Nodes of the tables, and pieces of syntax.

    def _in_function(self) -> bool:
        return bool(self._scopes) and self._scopes[-1][1]

    def _field_of(self, target: ast.expr) -> str | None:
        name: Any = target.attr if isinstance(target, ast.Attribute) else None
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            name = target.slice.value
        return name if isinstance(name, str) and name in self._rules.fields else None

    def _place(self, line: int, text: str) -> Place:
        return Place(self._file, line, text, ".".join(name for name, _ in self._scopes))

    def _guard(self, line: int, text: str, terms: tuple[int, ...]) -> int:
        self._recorder.guards.append(GuardNode(self._place(line, text), terms))
        return len(self._recorder.guards) - 1

    def _term(self, node: ast.AST, text: str, holds: bool = False) -> int:
        self._recorder.terms.append(TermNode(text, names_in(node), strings_in(node), holds))
        return len(self._recorder.terms) - 1

    def _site(
        self,
        line: int,
        text: str,
        branches: Branches,
        name: str | None,
        origin: Origin | None,
        owner: tuple[str, ...] | None,
        reads: Reads = NO_READS,
    ) -> int:
        self._recorder.sites.append(SiteNode(self._place(line, text), branches, name, origin, owner, reads))
        return len(self._recorder.sites) - 1

    def _call(self, method: str, where: ast.AST, *arguments: ast.expr) -> ast.Call:
        return syntax.call_of(RECORDER, method, where, ast.Name(SEEN, ast.Load()), *arguments)

    def _enter(self, where: ast.AST) -> ast.Call:
        place = f"{self._file}:{'.'.join(name for name, _ in self._scopes)}"
        return syntax.call_of(RECORDER, "enter", where, ast.Constant(place))

    def _mark(self, where: ast.AST) -> ast.Call:
        return syntax.call_of(RECORDER, "mark", where)

    def _text(self, node: Any, longest: int = _LONGEST_STATEMENT) -> str:
        """The source of a node on one line."""
        text = syntax.source_of(self._lines, node)
        return text if len(text) <= longest else text[: longest - 3] + "..."
