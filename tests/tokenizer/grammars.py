"""What the tests of structured outputs share: small vocabularies, and walks through a grammar that choose at random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from pellucid.core import StructuredOutputs
from pellucid.tokenizer.structured_output import Constraint, GrammarCompiler
from pellucid.tokenizer.tokenizer import Tokenizer
from pellucid.tokenizer.vocabulary import Vocabulary, find_control_tokens

EOS = "<|im_end|>"
EXITS = tuple(text.encode() for text in ("</think>", "</｜DSML｜parameter>"))
"""What free text may end with."""
CORPUS = [
    'the quick brown fox {"name": "value", "arguments": {"city": "Paris"}} jumps over the lazy dog',
    "    def f(x):\n        return x ** 2 + 10\n\n<div></div> true false null 3.14",
]


def make_tokenizer(
    added: Iterable[str] = ("<think>", "</think>", "<tool_call>", "</tool_call>", "    "),
    merges: int = 60,
    byte_level: bool = True,
) -> Tokenizer:
    """A byte-level BPE of few merges. 0 is <s>, 1 is the end of a turn; `added` come last and are not flagged."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + merges,
        special_tokens=["<s>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(list(added))
    special = frozenset((0, 1))
    return Tokenizer(
        Vocabulary(
            backend=backend,
            size=backend.get_vocab_size(with_added_tokens=True),
            byte_level=byte_level,
            special_token_ids=special,
            control_tokens=find_control_tokens(backend, special, "<think></think>"),
        )
    )


def allowed_ids(constraint: Constraint) -> list[int]:
    return [
        8 * index + bit
        for index, byte in enumerate(constraint.allowed())
        if byte
        for bit in range(8)
        if byte >> bit & 1
    ]


def follow(constraint: Constraint, ids: Sequence[int]) -> list[int] | None:
    """What may come after `ids`; None if they do not conform."""
    for token_id in ids:
        if token_id not in allowed_ids(constraint):
            return None
        constraint.accept(token_id)
    return allowed_ids(constraint)


def conforms(compiler: GrammarCompiler, tokenizer: Tokenizer, outputs: StructuredOutputs, text: str) -> bool:
    """Whether `text`, in the tokenizer's own tokens, is a complete output."""
    after = follow(compiler.compile(outputs), tokenizer.encode(text, add_special_tokens=False))
    return after is not None and 1 in after


def walk(constraint: Constraint, tokenizer: Tokenizer, seed: int, patience: int = 60) -> str | None:
    """A complete output made of random choices; after `patience` tokens it hastens to its end. None: it found none."""
    chance, text = random.Random(seed), b""
    for step in range(patience + 500):
        ids = allowed_ids(constraint)
        assert ids, text
        token_id = _hasten(ids, tokenizer, text, EXITS[step // 50 % 2]) if step > patience else None
        token_id = chance.choice(ids) if token_id is None else token_id
        constraint.accept(token_id)
        if constraint.finished:
            return text.decode()
        text += tokenizer.token_bytes(token_id)
    return None


def _hasten(ids: Sequence[int], tokenizer: Tokenizer, text: bytes, closing: bytes) -> int | None:
    """The token that leads to the end: out of a string, a list or, by `closing`, free text. None: any will do."""
    if 1 in ids:
        return 1
    known = {tokenizer.token_bytes(token_id): token_id for token_id in ids}
    done = next(length for length in range(len(closing), -1, -1) if text.endswith(closing[:length]))
    if done or (b"\n" in known and b"a" in known):
        rest = [token for token in known if token and closing[done:].startswith(token)]
        if rest:
            return known[max(rest, key=len)]
    return next((known[end] for end in _ENDS if end in known), None)


_ENDS = (b'"', b"}", b"]", b"0", b":", b",", b"\xbf", b"\x80")
