"""Grammars in llguidance's dialect of Lark, as text: quoting, renaming, limits, and the tokens that literals spell.

Used by `structured_output`, and by the server to make grammars of tool calls and of reasoning.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from fractions import Fraction
from typing import Any, NamedTuple

from pellucid.core import InvalidRequestError

MAX_CHARS = 1_000_000
MAX_PIECES = 100_000
MAX_DEPTH = 8192
"""Definitions and parentheses of a grammar: each may cost the compiler some levels of recursion."""
MAX_PROPERTIES = 1000
MAX_PATTERN_PROPERTIES = 32
"""More take the compiler time that is quadratic in their number."""
MAX_SCHEMA_VALUES = 50_000
MAX_MULTIPLE = 50_000
"""A multiple of n takes n states, and llguidance multiplies two of them in 32 bits."""

WHITESPACE_PATTERN = r"[ \t\r\n]{1,64}"
"""What may stand between the parts of JSON. Without a bound, a model may write spaces for ever."""

SpelledParts = Sequence[str | int]
"""A text as the tokenizer reads it: stretches of ordinary text, and ids of the added tokens between them."""


class Kind(Enum):
    """What a stretch of Lark text is. `JSON` is `%json`, `%llguidance` or `%regex` with its value."""

    SPACE = auto()
    NEWLINE = auto()
    NAME = auto()
    STRING = auto()
    REGEX = auto()
    SPECIAL = auto()
    JSON = auto()
    OTHER = auto()


class Piece(NamedTuple):
    kind: Kind
    text: str


class Spelling(NamedTuple):
    """A grammar in which tokens have ids. `token_ids` are those that it names, None if it names ranges of ids."""

    lark: str
    token_ids: frozenset[int] | None


_PIECE = re.compile(
    r"""(?P<SPACE>[ \t\r]+|(?://|\#)[^\n]*)
    |(?P<STRING>"(?:[^"\\\n]|\\.)*+"i?)
    |(?P<REGEX>/(?:[^/\\]|\\.)++/[imslux]*)
    |(?P<JSON>%(?:json|llguidance|regex)\b)\s*
    |(?P<SPECIAL><[^<>\s]+>)
    |(?P<NAME>[A-Za-z_][\w-]*)
    |(?P<NEWLINE>\n)
    |(?P<OTHER>%\w+|::|.)""",
    re.VERBOSE | re.DOTALL,
)
_DEEPENING = frozenset(("(", "[", ":", "~"))
_HEX_ESCAPE = re.compile(r"\\x([0-9A-Fa-f]{2})")
_DECODER = json.JSONDecoder()
_NOT_FOLLOWED = {
    "stop": "the attribute stop takes back text that is sent already; use suffix",
    "temperature": "the attribute temperature is not followed; set the request's temperature",
    "allow_invalid_utf8": "allow_invalid_utf8 is not supported: outputs are text",
}


def refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {reason}", "structured_outputs")


def quote(text: str) -> str:
    """`text` as a Lark literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def one_of(literals: Iterable[str]) -> str:
    """A Lark expression for one of these texts."""
    return " | ".join(map(quote, literals))


def text_without(literals: Iterable[str]) -> str:
    """A Lark terminal for text in which none of `literals` occurs."""
    inner = "|".join(re.escape(literal).replace("/", r"\/") for literal in literals)
    return rf"/(?s:.*)/ & ~/(?s:.*)(?:{inner})(?s:.*)/"


def json_value(schema: Any) -> str:
    """A Lark expression for JSON that is valid under `schema`; its white space is bounded unless it says otherwise.

    Raises:
        InvalidRequestError: the schema is too large, or nested too deeply.
    """
    _check_schema(schema)
    if isinstance(schema, dict) and "x-guidance" not in schema:
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE_PATTERN}}
    try:
        return f"%json {json.dumps(schema)}"
    except RecursionError:
        raise refusal("the schema is nested too deeply") from None


def rename_start(lark: str, name: str) -> str:
    """`lark` with its rule `start` called something else. Raises InvalidRequestError as `scan` does."""
    return "".join(name if piece == (Kind.NAME, "start") else piece.text for piece in scan(lark))


def names_in(lark: str) -> frozenset[str]:
    """Every name in `lark`: of rules, of terminals and of attributes."""
    return frozenset(piece.text for piece in scan(lark) if piece.kind is Kind.NAME)


def check_text(text: str) -> None:
    """Raises InvalidRequestError for text that is too long, or no Unicode."""
    if len(text) > MAX_CHARS:
        raise refusal(f"it has {len(text):,} characters; at most {MAX_CHARS:,} are compiled")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refusal("the text is not valid Unicode: it has half of a surrogate pair") from None


def scan(lark: str) -> Iterator[Piece]:
    """The pieces of `lark`; comments are spaces.

    Raises:
        InvalidRequestError: it passes a limit, has JSON that is none, or asks for what is not done here.
    """
    check_text(lark)
    pos = depth = 0
    for count in itertools.count(1):
        if not (match := _PIECE.match(lark, pos)):
            return
        kind, pos, text = Kind[str(match.lastgroup)], match.end(), match.group()
        if kind is Kind.JSON:
            text, pos = _read_json(match["JSON"], lark, pos)
        elif kind is Kind.SPACE:
            text = " "
        elif text in ('"', "/"):
            raise refusal("a literal or a regular expression in the grammar has no end")
        elif text == "%lark":
            raise refusal("grammars nested with %lark are not supported; use one grammar")
        depth += text in _DEEPENING
        if depth > MAX_DEPTH or count > MAX_PIECES:
            raise refusal(f"the grammar is too large: more than {MAX_DEPTH:,} definitions, or {MAX_PIECES:,} words")
        yield Piece(kind, text)


def spell_tokens(lark: str, parts_of: Callable[[str], SpelledParts]) -> Spelling:
    """`lark` with each literal of a rule as the tokenizer reads it: added tokens in it are tokens, not letters.

    A terminal is a regular expression, in which nothing is a token. A rule `r[suffix="</think>"]: TEXT`, whose end is
    an added token, becomes text up to that token.

    Raises:
        InvalidRequestError: see `scan`.
    """
    pieces = list(scan(lark))
    taken = {piece.text for piece in pieces if piece.kind is Kind.NAME}
    token_ids: set[int] = set()
    by_number = False
    written = []
    for statement in _statements(pieces):
        for piece in statement:
            if piece.kind is Kind.SPECIAL:
                by_number |= piece.text.startswith("<[")
                token_ids.update(part for part in parts_of(piece.text) if isinstance(part, int))
        written.append(_spell_statement(statement, parts_of, token_ids, taken))
    return Spelling("".join(written), None if by_number else frozenset(token_ids))


def _statements(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Definitions and directives, each with the newline that ends it. A line that begins with `|` goes on."""
    solid = [*(piece for piece in pieces if piece.kind is not Kind.SPACE), Piece(Kind.NEWLINE, "\n")]
    following = iter(after for before, after in itertools.pairwise(solid) if before.kind is Kind.NEWLINE)
    statement: list[Piece] = []
    for piece in pieces:
        statement.append(piece)
        if piece.kind is Kind.NEWLINE and next(following, piece).text not in ("|", "\n"):
            yield statement
            statement = []
    yield statement


def _spell_statement(
    statement: list[Piece], parts_of: Callable[[str], SpelledParts], token_ids: set[int], taken: set[str]
) -> str:
    """The statement's text. Adds to the tokens that are named, and to the names that are taken."""
    text = "".join(piece.text for piece in statement)
    colon = next((i for i, piece in enumerate(statement) if piece == (Kind.OTHER, ":")), None)
    head = [piece for piece in statement[:colon] if piece.kind not in (Kind.SPACE, Kind.NEWLINE)]
    name = next((piece.text for piece in head if piece.kind is Kind.NAME), "")
    if colon is None or not name.lstrip("_")[:1].islower():
        return text
    attributes = {piece.text for piece in head if piece.kind is Kind.NAME} - {name}
    for attribute in attributes & _NOT_FOLLOWED.keys():
        raise refusal(_NOT_FOLLOWED[attribute])

    def spell(literal: Piece) -> list[str]:
        parts = parts_of(_unquote(literal.text)) if literal.kind is Kind.STRING else ()
        ids = {part for part in parts if isinstance(part, int)}
        token_ids.update(ids)
        return [quote(part) if isinstance(part, str) else f"<[{part}]>" for part in parts] if ids else []

    body = statement[colon + 1 :]
    if "suffix" in attributes <= {"suffix", "capture"}:
        names = [piece.text for piece in head]
        end = spell(head[names.index("suffix") + 2]) if len(names) > names.index("suffix") + 2 else []
        if not end:
            return text
        terminal = f"{name.upper()}_TEXT"
        while terminal in taken:
            terminal += "_"
        taken.add(terminal)
        before = "" if end[0].startswith("<[") else end.pop(0)
        inner = "".join(piece.text for piece in body).strip()
        return f"\n{terminal}: ({inner}) {before}\n{name}: {terminal} {' '.join(end)}\n"
    if attributes - {"capture"}:
        return text
    words = [f"({' '.join(spelled)})" if (spelled := spell(piece)) else piece.text for piece in body]
    return "".join([*(piece.text for piece in statement[: colon + 1]), *words])


def _unquote(literal: str) -> str:
    """The text of a literal; empty if it is malformed, or ignores case."""
    try:
        return str(json.loads(_HEX_ESCAPE.sub(r"\\u00\1", literal)))
    except ValueError:
        return ""


def _read_json(keyword: str, text: str, pos: int) -> tuple[str, int]:
    """The keyword and the JSON value at `pos`, as text, and where the value ends."""
    try:
        value, end = _DECODER.raw_decode(text, pos)
        if isinstance(value, dict) and keyword == "%llguidance" and value.get("allow_invalid_utf8"):
            raise refusal(_NOT_FOLLOWED["allow_invalid_utf8"])
        return (json_value(value) if keyword == "%json" else f"{keyword} {json.dumps(value)}"), end
    except (ValueError, RecursionError) as error:
        raise refusal(f"a JSON value can't be read: {error}") from None


def _check_schema(schema: Any) -> None:
    """Refuse what would take the compiler quadratic time, or more."""
    seen, waiting, multiples = 0, [schema], [Fraction(1)]
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > MAX_SCHEMA_VALUES:
            raise refusal(f"the schema has more than {MAX_SCHEMA_VALUES:,} values")
        if isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, dict):
            patterns = value.get("patternProperties")
            if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
                raise refusal(f"the schema has {len(patterns)} patternProperties; at most {MAX_PATTERN_PROPERTIES} fit")
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and 0 < multiple < math.inf:
                multiples.append(Fraction(str(multiple)))
            if len(value) > MAX_PROPERTIES:
                raise refusal(f"an object of the schema has {len(value):,} members; at most {MAX_PROPERTIES:,} fit")
            waiting.extend(value.values())
    scale = math.lcm(*(multiple.denominator for multiple in multiples))
    if math.lcm(*(int(multiple * scale) for multiple in multiples)) > MAX_MULTIPLE * scale:
        raise refusal(f"the schema's multipleOf have no common multiple up to {MAX_MULTIPLE:,}")
