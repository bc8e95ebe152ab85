"""`Grammars`: one model's structured outputs. The engine compiles with it, the API process checks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pellucid.core import InvalidRequestError, StructuredOutputs
from pellucid.tokenizer.structured_output import Constraint, GrammarCompiler
from pellucid.tokenizer.tokenizer import Tokenizer


class Grammars:
    """The compiler of a vocabulary, made at first use: most engines never see such a request. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer, self._eos_token_ids, self._vocab_size = tokenizer, eos_token_ids, vocab_size

    def prepare(self) -> None:
        """Make the compiler now, so that no request waits for it; does nothing where there can be none."""
        if self._tokenizer is not None and self._eos_token_ids:
            self._compiler.prepare()

    def compile(self, outputs: StructuredOutputs) -> Constraint:
        """See `GrammarCompiler.compile`. Samples of one request, and equal requests, share the compilation.

        Raises:
            InvalidRequestError: it can't be followed, or the model came without a tokenizer.
            PellucidError: llguidance is not installed.
        """
        return self._compiler.compile(outputs)

    def check(self, outputs: StructuredOutputs) -> None:
        """Raises what `compile` would, at no risk to this process; see `GrammarCompiler.check`."""
        self._compiler.check(outputs)

    def close(self) -> None:
        """End the process that `check` began, if it did."""
        if "_compiler" in self.__dict__:
            self._compiler.close()

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "structured outputs need a tokenizer, and this model came without one", "structured_outputs"
            )
        return GrammarCompiler(self._tokenizer, self._eos_token_ids, self._vocab_size)
