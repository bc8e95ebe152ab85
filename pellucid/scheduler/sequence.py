"""The mutable state of one request inside the scheduler. Nothing outside `pellucid.scheduler` sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from pellucid.core import FinishReason, Request
from pellucid.kvcache.radix_cache import RadixNode
from pellucid.scheduler.page_allocator import request_owner


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Refusal(NamedTuple):
    """Why there were no pages for a waiting sequence: it would have needed `pages_wanted` available ones.

    Its cached prefix ended at `node`; `next_page` has the tokens of the page after it, () if it may not be read.
    """

    pages_wanted: int
    node: RadixNode
    next_page: tuple[int, ...]


# All ranges are half open, in tokens from the start of the prompt:
#
#      0            published        computed             planned            num_tokens    len(pages) * page_size
#      |----------------|----------------|-------------------|-------------------|---------------------|
#      [ pages in the   )[ KV written,   )[ in the plans     )[ not yet          )[ reserved,          )
#      [ prefix cache   )[ pages private )[ in flight        )[ planned          )[ nothing there      )
#
# num_tokens = len(token_ids) + unsampled: the known tokens, then those that plans in flight sample.
# published <= computed < len(token_ids) and planned <= num_tokens while it lives: the newest token's KV is what the
# next step computes. With nothing in flight, computed == planned and unsampled == 0.
# published is a multiple of page_size, and the pages reach at least to planned.
# Planning moves planned forward, and only `Scheduler.commit` computed; preemption sets both to 0.
@dataclass(slots=True, eq=False)
class Sequence:
    """One request: its tokens so far, how many of them have KV, and the pages that hold it.

    `in_flight` counts the plans in flight that have a row of it, `unsampled` those of them that sample it. `node` is
    the locked end of its published prefix in the cache. `publish_at` is the value of `computed` from which publishing
    is tried again.
    """

    request: Request
    max_tokens: int
    namespace: str
    token_ids: list[int] = field(init=False)
    owner: str = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    computed: int = 0
    planned: int = 0
    unsampled: int = 0
    in_flight: int = 0
    published: int = 0
    publish_at: int = 0
    pages: tuple[int, ...] = ()
    node: RadixNode | None = None
    refusal: Refusal | None = None
    cached_prompt_tokens: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        params = self.request.params
        self.token_ids = list(self.request.prompt_token_ids)
        self.owner = request_owner(self.request.request_id)
        eos = () if params.ignore_eos else self.request.eos_token_ids
        self.end_token_ids = frozenset((*eos, *params.stop_token_ids))

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """The known tokens and those that plans in flight sample."""
        return len(self.token_ids) + self.unsampled

    @property
    def remaining(self) -> int:
        """Tokens, the unsampled ones included, whose KV no plan computes yet."""
        return self.num_tokens - self.planned

    @property
    def is_decode(self) -> bool:
        """The next token to compute is the newest one, and it is a generated one."""
        return self.planned >= self.prompt_len and self.remaining == 1

    @property
    def is_planned_to_its_end(self) -> bool:
        """It ends with the plans in flight at the latest. The KV of the last token that it may have is never needed."""
        return self.planned >= self.prompt_len + max(self.max_tokens - 1, 0)

    @property
    def reads_prefix_cache(self) -> bool:
        """False when every prompt position must be computed, for its hidden state or its logits."""
        return not self.request.capture_hidden and self.request.params.prompt_logprobs is None

    def finish_reason(self) -> tuple[FinishReason, int | None] | None:
        """Why the newest token ends the sequence and the token id to report as the stop reason; None if it goes on.

        An end-of-sequence token or a stop token counts from the `min_tokens`-th output token on, itself included.
        """
        token_id, outputs, params = self.token_ids[-1], self.num_outputs, self.request.params
        if outputs and token_id in self.end_token_ids and outputs >= params.min_tokens:
            is_eos = not params.ignore_eos and token_id in self.request.eos_token_ids
            return "stop", None if is_eos else token_id
        return ("length", None) if outputs >= self.max_tokens else None
