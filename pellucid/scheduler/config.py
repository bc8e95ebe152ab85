"""The scheduler's settings: frozen, made once at engine start from the execution plan."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.core import PlanError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What bounds a step and the KV pool.

    Attributes:
        max_num_seqs: most sequences running at once, and so most decode rows in a step.
        max_num_batched_tokens: most tokens computed in one step. At least `max_num_seqs`: every running sequence
            computes a token in every step.
        max_model_len: most tokens of one sequence, prompt and output.
        num_pages: KV pages that requests can use; the scratch page 0 comes on top of them.
        page_size: tokens in a page.
        prefill_chunk_tokens: most tokens of one sequence's prefill in one step, so that a long prompt leaves budget
            to the prompts behind it. None: only the budget of the step bounds it.
        max_chunk_context: most of (tokens of a chunk x context at its end), so that a step of a long prompt takes no
            longer than one of a short prompt where attention is slow. None: unbounded.
        enable_chunked_prefill: when False, a prompt waits until a step has room for all of it; such a step must
            exist, so `max_num_batched_tokens` is then at least `max_model_len`.
        namespace: names what changes the KV besides tokens and salt (model, adapter); part of the prefix cache's key.
        force_preempt_every: debug mode that preempts the newest running sequence in every n-th step.

    Raises:
        PlanError: a value outside its range.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int = 64
    prefill_chunk_tokens: int | None = None
    max_chunk_context: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    namespace: str = ""
    force_preempt_every: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_model_len",
            "num_pages",
            "page_size",
            "prefill_chunk_tokens",
            "max_chunk_context",
            "force_preempt_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise PlanError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}):"
                " a step has no room for a token of every running sequence; raise the first or lower the second"
            )

        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise PlanError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must hold a whole"
                f" prompt of max_model_len ({self.max_model_len}) tokens; raise the first or lower the second"
            )

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.page_size
