"""Structured outputs: from what a request asks for to a mask over the vocabulary, with the llguidance package.

`GrammarCompiler` is made by the engine process, which samples under its `Constraint`s, and by the API process, which
refuses a bad request before the engine sees it.

A grammar comes from a stranger. What it may cost is bounded by size (`lark`), by llguidance's own limits, and by time;
and what passes all of them, and still is too much, is met by a `GrammarGuard` first.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from pellucid.core import PellucidError, StructuredOutputs
from pellucid.tokenizer import lark
from pellucid.tokenizer.grammar_guard import LIMITS, GrammarGuard, Vocabulary, run_deep
from pellucid.tokenizer.json_schema import close_objects
from pellucid.tokenizer.lark import SpelledParts, refusal
from pellucid.tokenizer.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 2.0
"""In this process; the guard takes half of it."""
MAX_COMPILED = 32
"""Compiled grammars that a compiler keeps; a large one takes megabytes."""
MAX_TOKEN_BYTES = 1000
"""llguidance's index of the vocabulary has no room for longer tokens; a constrained output goes without them."""

MAX_GBNF_CHARS = 32_768
MAX_GBNF_RULES = 400
"""llguidance's converter takes quadratic time."""

_SPECIAL = b"\xff"
"""How llguidance marks a token that is no text: no UTF-8 text has that byte."""

_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_CAUSE = re.compile(r"^error: (.+)", re.MULTILINE)
_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): ")
_MAX_REASON_CHARS = 300


def to_lark(outputs: StructuredOutputs) -> str:
    """What `outputs` asks for as a Lark grammar with the rule `start`.

    A regular expression is one of Rust's regex crate, in which \\d, \\w and their opposites mean ASCII, as in JSON
    Schema; it must match the whole output.

    Raises:
        InvalidRequestError: it is malformed, or too large.
    """
    if outputs.json is not None:
        return f"start: {lark.json_value(close_objects(_parse_schema(outputs.json)))}\n"
    if outputs.json_object:
        return f"start: {lark.json_value({'type': 'object'})}\n"
    if outputs.choice is not None:
        return f"start: CHOICE\nCHOICE: {lark.one_of(outputs.choice)}\n"
    if outputs.regex is not None:
        return f"start: OUTPUT\nOUTPUT: /{_escape_regex(outputs.regex)}/\n"
    grammar = outputs.grammar or ""
    if _GBNF_ROOT.search(grammar):
        grammar = _convert_gbnf(grammar)
    # Text that begins with a brace would be read as another format.
    return f"%llguidance {{}}\n{grammar}\n"


def check_grammar(grammar: str) -> None:
    """Raises InvalidRequestError for a Lark grammar that is malformed, whatever tokens the vocabulary may have."""
    guidance, spelled = _llguidance(), "".join(piece.text for piece in lark.scan(grammar))
    limits = guidance.LLParserLimits(**LIMITS)
    message = run_deep(lambda: guidance.LLMatcher.validate_grammar(spelled, limits=limits), COMPILE_TIMEOUT_S)
    if message != "":
        raise refusal(_reason(message))


class GrammarCompiler:
    """Makes constraints over one vocabulary. Thread-safe. Takes half a second to make for a large vocabulary.

    The grammars that were asked for last stay compiled, so that the samples of a request, and requests that ask for the
    same, cost one compilation.

    Added tokens with a symbol in them (control tokens, `<think>`, `<tool_call>`) are no text: none stands in a JSON
    string, or where a regular expression matches; what looks like one there is spelled with ordinary tokens. A grammar
    has one where it names it, as `<tool_call>` or within a literal of a rule: `"<tool_call>{"`.

    `eos_token_ids` end an output. `vocab_size` is the rows of the model's embedding: tokens beyond it are never asked
    for. None: as many as the tokenizer has.

    Raises:
        PellucidError: llguidance is not installed.
        InvalidRequestError: the model has no end-of-sequence token, so no output could ever be complete.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int | None = None) -> None:
        guidance = _llguidance()
        size = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
        self._ends = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < size)
        if not self._ends:
            raise refusal("this model has no end-of-sequence token, and structured outputs need one")
        self._tokenizer = tokenizer
        self._markers = _find_markers(tokenizer, size)
        self._marker = re.compile(_longest_of(self._markers))
        special = {*self._ends, *tokenizer.special_token_ids, *self._markers.values()}
        self._tokens = [_trie_bytes(tokenizer, token_id, token_id in special) for token_id in range(size)]
        self._limits = guidance.LLParserLimits(**LIMITS)
        self._text_bits = _bits(i for i in range(size) if i not in special)
        self._end_bits = _bits(self._ends)
        self._guard = GrammarGuard(self._tokens, sorted(self._ends))
        self._compiled: OrderedDict[StructuredOutputs, Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, outputs: StructuredOutputs) -> None:
        """Refuse what `compile` would, at no risk: another process compiles it. Takes a millisecond or two, as a rule.

        Raises:
            InvalidRequestError: see `compile`.
            PellucidError: that process can't be started.
        """
        grammar, _ = lark.spell_tokens(to_lark(outputs), self._parts_of)
        message = self._guard.compile(grammar)
        if message != "":
            raise refusal(_reason(message))

    def compile(self, outputs: StructuredOutputs) -> Constraint:
        """A constraint for one output, at its beginning.

        Raises:
            InvalidRequestError: it is malformed, too large, asks for what is not supported, or nothing satisfies it.
        """
        with self._lock:
            if outputs in self._compiled:
                self._compiled.move_to_end(outputs)
                return self._compiled[outputs].copy()
        constraint = self._build(outputs)
        with self._lock:
            self._compiled[outputs] = constraint
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            # What is kept goes nowhere: it is there to be copied.
            return constraint.copy()

    def _build(self, outputs: StructuredOutputs) -> Constraint:
        grammar, named = lark.spell_tokens(to_lark(outputs), self._parts_of)
        vocabulary = self._vocabulary

        def build() -> tuple[Any, bytes]:
            matcher = _llguidance().LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits)
            return matcher, b"" if matcher.is_error() else matcher.compute_bitmask()

        built = run_deep(build, COMPILE_TIMEOUT_S)
        if built is None:
            raise refusal(_reason(None))
        matcher, first = built
        # A grammar may also name ranges of ids, and then means them.
        inside = -1 if named is None else self._text_bits | _bits(named)
        constraint = Constraint(matcher, first, inside, self._end_bits, self._ends)
        if not any(constraint.allowed()):
            raise refusal("no output that this model can write satisfies it")
        return constraint

    def prepare(self) -> None:
        """Index the vocabulary now, which the first `compile` would do."""
        _ = self._vocabulary

    def close(self) -> None:
        """End the process that `check` began."""
        self._guard.close()

    @cached_property
    def _vocabulary(self) -> Any:
        """llguidance's index of the tokens, which takes half a second for a large vocabulary."""
        ends = sorted(self._ends)
        return _llguidance().LLTokenizer(Vocabulary(self._tokens, ends[0], self._tokenize), eos_token=ends)

    def _parts_of(self, text: str) -> SpelledParts:
        parts: list[str | int] = []
        pos = 0
        for match in self._marker.finditer(text):
            if match.start() > pos:
                parts.append(text[pos : match.start()])
            parts.append(self._markers[match.group()])
            pos = match.end()
        return [*parts, text[pos:]] if pos < len(text) else parts

    def _tokenize(self, text: str) -> list[int]:
        """Text that a grammar leaves no choice about, in the tokens in which the model knows it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        spelled = b"".join(self._tokens[token_id] if token_id < len(self._tokens) else _SPECIAL for token_id in ids)
        # A vocabulary that puts a space before the first word can't encode the middle of a text.
        return ids if spelled == text.encode() else list(self._vocabulary.greedy_tokenize(text))


class Constraint:
    """One output's place in its grammar; a `runner.sampler.Constraint`."""

    def __init__(self, matcher: Any, first: bytes, inside: int, end_bits: int, ends: frozenset[int]) -> None:
        self._matcher, self._bits = matcher, first
        self._inside, self._end_bits, self._ends = inside, end_bits, ends
        self._finished = False

    def copy(self) -> Constraint:
        """Another output at the same place, which goes its own way from here."""
        other = Constraint(self._matcher.deep_copy(), self._bits, self._inside, self._end_bits, self._ends)
        other._finished = self._finished
        return other

    @property
    def finished(self) -> bool:
        """Whether an end token was accepted."""
        return self._finished

    def allowed(self) -> bytes:
        """Bit i % 8 of byte i // 8 says whether token i may come next; end tokens may where the output may end.

        Raises:
            InvalidRequestError: the grammar is too complex to go on.
        """
        self._bits = self._bits or self._matcher.compute_bitmask()
        self._check()
        # In the complement of a regular expression (`~`), special tokens pass for bytes.
        permitted = self._inside | self._end_bits if self._matcher.is_accepting() else self._inside
        return (int.from_bytes(self._bits, "little") & permitted).to_bytes(len(self._bits), "little")

    def accept(self, token_id: int) -> None:
        """Go on by a token that was allowed. Raises InvalidRequestError as `allowed` does."""
        self._bits = b""
        self._matcher.consume_token(token_id)
        self._check()
        self._finished = token_id in self._ends and self._matcher.is_stopped()

    def _check(self) -> None:
        # In error, the matcher says that only the end is allowed.
        if self._matcher.is_error():
            raise refusal(_reason(self._matcher.get_error()))


def _find_markers(tokenizer: Tokenizer, size: int) -> dict[str, int]:
    """Text -> id of the added tokens that are no text. Runs of spaces, and words, are."""
    found = {}
    for text in tokenizer.added_tokens:
        ids = tokenizer.encode(text, add_special_tokens=False)
        has_symbol = any(not char.isalnum() and not char.isspace() for char in text)
        if len(ids) == 1 and ids[0] < size and (has_symbol or ids[0] in tokenizer.special_token_ids):
            found[text] = ids[0]
    return found


def _longest_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of `texts` at a place: a tree, since there may be a thousand."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], []).append(text)
    branches = []
    for first, group in tails.items():
        if first:
            pairs = zip(min(group), max(group), strict=False)
            shared = "".join(char for char, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            branches.append(re.escape(shared) + _longest_of([text[len(shared) :] for text in group]))
    if not branches:
        return "" if tails else "(?!)"
    return f"(?:{'|'.join(branches)})" + "?" * ("" in tails)


def _trie_bytes(tokenizer: Tokenizer, token_id: int, is_special: bool) -> bytes:
    """A token as llguidance wants it; empty for one that no constrained output has."""
    spelled = tokenizer.token_bytes(token_id)
    if is_special:
        return _SPECIAL + (spelled[:MAX_TOKEN_BYTES] or b"<%d>" % token_id)
    return b"" if len(spelled) > MAX_TOKEN_BYTES or spelled.startswith(_SPECIAL) else spelled


def _bits(token_ids: Iterable[int]) -> int:
    ids = list(token_ids)
    packed = bytearray(max(ids, default=0) // 8 + 1)
    for token_id in ids:
        packed[token_id >> 3] |= 1 << (token_id & 7)
    return int.from_bytes(packed, "little")


def _parse_schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(f"json is not a JSON schema: {error}") from None


def _escape_regex(pattern: str) -> str:
    lark.check_text(pattern)
    trailing = len(pattern) - len(pattern.rstrip("\\"))
    if trailing % 2:
        raise refusal("the regular expression ends in a backslash that escapes nothing")
    return str(_llguidance().regex_to_lark(pattern, "dw"))


def _convert_gbnf(grammar: str) -> str:
    lark.check_text(grammar)
    if len(grammar) > MAX_GBNF_CHARS or grammar.count("::=") > MAX_GBNF_RULES:
        raise refusal(f"a GBNF grammar may have {MAX_GBNF_CHARS:,} characters and {MAX_GBNF_RULES} rules")
    try:
        return str(_llguidance().grammar_from("gbnf", grammar))
    except ValueError as error:
        raise refusal(str(error)) from None


def _llguidance() -> Any:
    """The package, imported at first use: the API process starts without it, and it is no part of the base install."""
    try:
        import llguidance
    except ImportError:
        raise PellucidError("structured outputs need llguidance: pip install 'pellucid[serve]'") from None
    return llguidance


def _reason(message: str | None) -> str:
    """What llguidance says, in a line. None: it has said nothing in time."""
    if message is None:
        return "the grammar takes too long to compile, or too much memory; simplify it"
    if message.startswith("NoExtension"):
        return "no output that this model can write satisfies it"
    if message.startswith("panic"):
        return "the grammar is too complex"
    cause = _CAUSE.search(message)
    first = message.strip().partition("\n")[0]
    return (cause[1] if cause else _POSITION.sub("", first).replace("<non-verbose/>", ""))[:_MAX_REASON_CHARS]
