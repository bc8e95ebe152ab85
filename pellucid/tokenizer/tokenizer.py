"""`Tokenizer`: text to ids, ids to text, chats to ids. Used by the server and by `LLM`; needs no GPU and no weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pellucid.core import InvalidRequestError
from pellucid.tokenizer.bpe import unspell_bytes
from pellucid.tokenizer.chat_template import ChatTemplate
from pellucid.tokenizer.control_tokens import MARK, ControlTokenShield
from pellucid.tokenizer.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One checkpoint's tokenizer. Thread-safe; `encode` releases the GIL, so run it off the event loop.

    Attributes:
        vocab_size: one more than the highest id that has a token. A model's embedding may have more rows.
        bos_token_id: None where the model has none.
        special_token_ids: ids that `decode` leaves out by default.
        strips_leading_space: the vocabulary puts a space before the first word, and `decode` takes it away.
        chat_template: Jinja source, or None.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.size
        self.bos_token_id = vocabulary.bos_token_id
        self.special_token_ids = vocabulary.special_token_ids
        self.strips_leading_space = vocabulary.strips_leading_space
        self.chat_template = vocabulary.chat_template
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._added = {i: token.content for i, token in self._backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """From a checkpoint directory, in Hugging Face's layout or Kimi's; see `from_directory.read_directory`.

        Raises:
            CheckpointError: files missing, damaged or of different models.
            UnsupportedModelError: a kind of tokenizer that this version does not have.
        """
        from pellucid.tokenizer.from_directory import read_directory

        return cls(read_directory(Path(path), chat_template))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], chat_template: str | None = None) -> Tokenizer:
        """From GGUF key/value metadata (`tokenizer.ggml.*`, `tokenizer.chat_template`) as plain Python values.

        Raises:
            CheckpointError: a key is missing, or the arrays disagree.
            UnsupportedModelError: an unknown `tokenizer.ggml.model` or `tokenizer.ggml.pre`.
        """
        from pellucid.tokenizer.from_gguf import read_gguf_metadata

        return cls(read_gguf_metadata(metadata, chat_template))

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special_tokens` puts BOS and EOS around it as the model was trained; never a second BOS.

        With `allow_special=False` a control token spelled in `text` is encoded as the ordinary text it looks like.

        Raises:
            InvalidRequestError: `text` holds half of a surrogate pair, which no encoding of Unicode can carry.
        """
        if allow_special:
            ids = self._encode(self._backend, text)
        else:
            ids = self._encode(self._shield.backend, self._shield.spoil(text))
        if add_special_tokens:
            before, after = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
            if before and tuple(ids[: len(before)]) == before:
                before = ()
            return [*before, *ids, *after]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`: their bytes as UTF-8, with U+FFFD for what is not UTF-8. Spaces are never "cleaned up"."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skipped])
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token. An id without a token (a padding row of the embedding) has none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._spell(token_id)
            if known:
                self._bytes[token_id] = known
        return known

    @cached_property
    def eos_sources(self) -> dict[int, str]:
        """Id of each token that ends a generation -> how that was decided.

        All that any file names, plus the token that the chat template writes right after an assistant's turn,
        found by rendering one: Kimi's config names [EOS], while its template, so the model, ends with <|im_end|>.
        """
        sources = dict(self._vocabulary.eos_sources)
        if self.chat_template is not None:
            text = self._template.find_end_of_turn(self._added.values())
            token_id = None if text is None else self._backend.token_to_id(text)
            if token_id is not None:
                sources.setdefault(token_id, f"the chat template ends an assistant's turn with {text}")
        return sources

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The keys of `eos_sources`."""
        return tuple(self.eos_sources)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat; see `ChatTemplate.render`."""
        return self._template.render(messages, tools, add_generation_prompt, **kwargs)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        allow_special_in_content: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt ids of a chat. The template writes BOS itself, so none is added.

        Control tokens spelled by a user or a tool, in definitions of tools or in `kwargs` are ordinary text unless
        `allow_special_in_content`; system and assistant messages are the operator's and the model's own, and keep
        theirs.

        Raises:
            InvalidRequestError: there is no template, or it refuses the messages.
        """
        return list(
            self.encode_chat(
                messages,
                tools,
                add_generation_prompt,
                allow_special_in_content=allow_special_in_content,
                **kwargs,
            )[1]
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        allow_special_in_content: bool = False,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        """The prompt of a chat as text and as ids; see `apply_chat_template`.

        With `continue_final_message` the prompt ends where the last message's text ends, so that the model goes on
        with it; see `ChatTemplate.render_unfinished`.

        Raises:
            InvalidRequestError: there is no template, it refuses the messages, or it does not show the last one.
        """
        if not allow_special_in_content:
            try:
                messages = self._shield.spoil_messages(messages)
                tools, kwargs = self._shield.spoil_value(tools), self._shield.spoil_value(kwargs)
            except RecursionError:
                raise InvalidRequestError("the messages or tools are nested too deeply", "messages") from None
        if continue_final_message:
            text = self._template.render_unfinished(messages, tools, **kwargs)
        else:
            text = self.render_chat(messages, tools, add_generation_prompt, **kwargs)
        if not allow_special_in_content:
            text = self._shield.restore_marks(text)
        return text, self._encode(self._shield.backend if MARK in text else self._backend, text)

    @property
    def shows_tools(self) -> bool:
        """Does the chat template write the tools of a request into its prompt?"""
        return self._template.shows_tools

    @property
    def added_tokens(self) -> frozenset[str]:
        """Spellings of the tokens beside the vocabulary proper: control tokens, and markers of calls and reasoning."""
        return frozenset(self._added.values())

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use the completions endpoint, or give a template with "
                "--chat-template FILE",
                "messages",
            )
        return ChatTemplate(self.chat_template, self._vocabulary.named_tokens)

    @cached_property
    def _shield(self) -> ControlTokenShield:
        return ControlTokenShield(self._backend, self._vocabulary.control_tokens)

    def _encode(self, backend: Any, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: half of a surrogate pair at character {error.start}", "prompt"
            ) from error
        # The batch call is the one that releases the GIL and skips offsets.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _spell(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode("utf-8")
        spelling = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if spelling is None:
            return b""
        if self._vocabulary.byte_level:
            return unspell_bytes(spelling)
        if match := _BYTE_TOKEN.fullmatch(spelling):
            return bytes([int(match.group(1), 16)])
        return spelling.replace("\u2581", " ").encode("utf-8")
