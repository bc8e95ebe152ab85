"""Byte pair encoding vocabularies: the byte-level alphabet, and merges where a file gives only ranks or scores.

Called by the two loaders and, for the alphabet, by `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def _printable_bytes() -> list[int]:
    return [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_alphabet() -> list[str]:
    """GPT-2's rule: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards, in order."""
    printable = set(_printable_bytes())
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_ALPHABET: tuple[str, ...] = tuple(_byte_alphabet())
"""Byte value -> the character that stands for it in a byte-level vocabulary."""

_TO_ALPHABET = dict(enumerate(BYTE_ALPHABET))
_FROM_ALPHABET = {ord(char): byte for byte, char in enumerate(BYTE_ALPHABET)}


def spell_bytes(token: bytes) -> str:
    """The byte-level spelling of `token`: one character per byte."""
    return token.decode("latin-1").translate(_TO_ALPHABET)


def unspell_bytes(spelling: str) -> bytes:
    """The inverse of `spell_bytes`; a spelling with a character outside the alphabet is plain text."""
    try:
        return bytes(map(_FROM_ALPHABET.__getitem__, map(ord, spelling)))
    except KeyError:
        return spelling.encode("utf-8")


def merges_in_order(tokens: Iterable[str]) -> list[tuple[str, str]]:
    """Merges of a vocabulary whose encoder joins *any* two neighbours that make a token, best token first.

    tiktoken (lowest rank) and SentencePiece BPE (highest score) both encode so. `tokens` come best first; each
    contributes every split into two tokens, so pair priority is token priority.
    """
    ordered = list(tokens)
    known = set(ordered)
    merges: list[tuple[str, str]] = []
    for token in ordered:
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in known and (right := token[cut:]) in known:
                merges.append((left, right))
    return merges


def order_by_score(tokens: Sequence[str], scores: Sequence[float], ids: Iterable[int]) -> list[str]:
    """The tokens at `ids`, highest score first; equal scores keep the order of ids."""
    return [tokens[i] for i in sorted(ids, key=lambda i: -scores[i])]
