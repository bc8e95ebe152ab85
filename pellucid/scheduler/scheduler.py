"""Continuous batching: which tokens of which requests the next step computes. Called by the engine's step loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isqrt

from pellucid.core import FinishReason, InvalidRequestError, Request
from pellucid.scheduler.admission import resolve_max_tokens
from pellucid.scheduler.config import SchedulerConfig
from pellucid.scheduler.kv_cache_manager import KVCacheManager
from pellucid.scheduler.page_allocator import ConservationError
from pellucid.scheduler.sequence import Sequence, SequenceStatus
from pellucid.step_plan import UNKNOWN_TOKEN, ScheduledSequence, SchedulerStats, SequenceUpdate, StepPlan

__all__ = ["Scheduler", "SchedulerConfig"]

SCORED_CHUNK_TOKENS = 256
"""Most prompt tokens a step of a request that wants their logprobs: each needs logits of the whole vocabulary."""


# Sequences stand in one line, in order of arrival; it is cut once, and preemption moves the cut to the left:
#
#      oldest                                                     newest
#      [ running: dict, at most max_num_seqs )[ waiting: deque          )
#        never preempted: the first               preempted ones first
#
# Why nothing starves:
# - Decode by prefill: decode rows are planned before any prefill token, so every step decodes all of them.
# - Prefill by decode: a sequence is admitted only into budget that all running ones leave over, and what those take
#   never grows again (a chunk, then one token). So every running sequence computes a token in every step.
# - Anybody by preemption or admission: the victim is the newest running sequence, nobody passes the head of the line,
#   and each request fits the pool alone. So the oldest never loses a token, and everyone becomes the oldest.
#
# With a plan in flight, the step after it is planned as if nothing ended early (`plan_ahead`):
# - What ends for certain gets no further row. What ends early after all is FINISHED with a row in flight: the row's
#   result is dropped, and the pages that it writes to stay held until then.
# - Nothing is preempted, so a sequence with rows in flight is RUNNING or FINISHED, and its rows follow each other.
# - Only `commit` publishes: a page in the prefix cache was computed by a step before all that are in flight.
class Scheduler:
    """Plans steps and commits their results: plans are values, `commit` moves the sequences forward.

    Two plans are in flight at most, and are committed in their order. Plans depend on the calls alone (no clock, no
    randomness), so two schedulers that are called alike plan alike.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._kv = KVCacheManager(config.num_pages, config.page_size, config.enable_prefix_caching)
        self._sequences: dict[str, Sequence] = {}  # until their pages are released
        self._running: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._step = 0
        self._preemptions = 0

    def add_request(self, request: Request) -> None:
        """Queue `request`.

        `max_tokens=None` generates up to min(`max_model_len`, KV pool) tokens, prompt included, and ends with
        "length" there.

        Raises:
            InvalidRequestError: it can never be served (see `resolve_max_tokens`), or its id is still in use.
        """
        if request.request_id in self._sequences:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is still being served; use another id, or abort it first",
                "request_id",
            )
        max_tokens = resolve_max_tokens(request, self.config)
        sequence = Sequence(request, max_tokens, namespace=f"{self.config.namespace}\0{request.cache_salt}")
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is, without an update. False when there is no such request.

        Its pages, and its id, come free now, or at the commit of the last plan in flight that computes into them.
        """
        return self._end(request_id) is not None

    def finish(self, request_id: str, stop_reason: str) -> SequenceUpdate | None:
        """End a request with "stop" because the stop string `stop_reason` was found in its text.

        Returns its last update, or None when there is no such request. Pages come free as with `abort`.
        """
        sequence = self._end(request_id)
        return None if sequence is None else _update(sequence, None, ("stop", stop_reason))

    def forget_ended(self, request_id: str) -> None:
        """Free pages and id of a request that has ended, though a plan in flight may have a row of it.

        Only for who computes steps in the order of their plans: whoever gets the pages then writes after that row.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.status is SequenceStatus.FINISHED:
            self._release(sequence)

    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    def plan_step(self) -> StepPlan | None:
        """The next step: every decode row, then prefill chunks in order of arrival. None when nothing is left to do.

        Raises:
            RuntimeError: a plan is in flight.
        """
        if self._in_flight:
            raise RuntimeError(f"step {self._step} is not committed yet")
        if not self.has_unfinished():
            return None
        preempted = [self._preempt_newest()] if self._must_preempt() else []
        return self._make_plan(self._grow_decodes(preempted), preempted)

    def plan_ahead(self) -> StepPlan | None:
        """The step after the one plan in flight, as if nothing ended early in that: see `UNKNOWN_TOKEN`.

        None, and nothing changes, when there is nothing for it to compute, or when it would take a preemption:
        commit, then `plan_step`.

        Raises:
            RuntimeError: not exactly one plan is in flight.
        """
        if len(self._in_flight) != 1:
            raise RuntimeError(f"{len(self._in_flight)} plans are in flight; a step is planned ahead of exactly one")
        if self._must_preempt() or not self._kv.can_grow(self._decodes()):
            return None
        return self._make_plan(self._grow_decodes([]), [])

    def commit(self, plan: StepPlan, sampled: Mapping[str, int]) -> tuple[SequenceUpdate, ...]:
        """Take the results of `plan`: `sampled` has the next token of every row planned with `sample`.

        Returns an update for each request that got a token or ended. Requests that have ended since the plan was made
        get none: whatever `sampled` says of them is dropped, and their pages come free with their last row.

        Raises:
            RuntimeError: `plan` is not the oldest one in flight.
            KeyError: `sampled` lacks a row that was planned with `sample`, and nothing changes.
        """
        if not self._in_flight or self._in_flight[0][0].step != plan.step:
            raise RuntimeError(f"the plan of step {plan.step} is not in flight, or not the oldest that is")
        rows = list(zip(plan.scheduled, self._in_flight[0][1], strict=True))
        missing = [
            row.request_id
            for row, sequence in rows
            if row.sample and sequence.status is SequenceStatus.RUNNING and row.request_id not in sampled
        ]
        if missing:
            raise KeyError(f"no sampled token for {missing} of step {plan.step}")
        self._in_flight.popleft()
        updates = []
        for row, sequence in rows:
            sequence.in_flight -= 1
            if sequence.status is SequenceStatus.FINISHED:
                self._release_unless_in_flight(sequence)
                continue
            update = self._advance(sequence, row, sampled)
            if update is not None:
                updates.append(update)
        return tuple(updates)

    def drop_in_flight(self) -> None:
        """End every request of the plans in flight, which will give no result, and forget the plans.

        Holds also after a `commit` that was broken off half way.
        """
        self._in_flight.clear()
        counted = [sequence for sequence in self._sequences.values() if sequence.in_flight]
        for sequence in counted:
            sequence.in_flight = 0
        for sequence in counted:
            if sequence.status is SequenceStatus.FINISHED:
                self._release_unless_in_flight(sequence)
            else:
                self._end(sequence.request.request_id)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, as after a change of weights. Running requests keep the pages they read."""
        self._kv.reset_prefix_cache()

    def check_conservation(self) -> None:
        """Check at any time that free + cached + held pages make the whole pool. O(pages).

        Raises:
            ConservationError: names the page and its owner.
        """
        self._kv.check_conservation(self._sequences.values())

    def stats(self) -> SchedulerStats:
        kv = self._kv
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            free_pages=kv.allocator.num_free,
            cached_pages=kv.cache.num_evictable,
            held_pages=kv.num_held(self._sequences.values()),
            total_pages=self.config.num_pages,
            steps=self._step,
            preemptions=self._preemptions,
            prefix_cache_queries=kv.queries,
            prefix_cache_query_tokens=kv.query_tokens,
            prefix_cache_hit_tokens=kv.hit_tokens,
        )

    def _must_preempt(self) -> bool:
        """Whether the next step is one of those that `force_preempt_every` asks for."""
        every = self.config.force_preempt_every
        return every is not None and (self._step + 1) % every == 0 and len(self._running) > 1

    def _make_plan(self, decode: list[Sequence], preempted: list[str]) -> StepPlan | None:
        """Put a plan of `decode` and of what prefill fits beside it in flight; None when that is nothing at all."""
        rows = [_row(sequence, 1, is_prefill=False) for sequence in decode]
        budget = self.config.max_num_batched_tokens - len(rows)
        # A sequence that has just lost its pages must not take them back from the ones that needed them.
        prefill = self._plan_prefill(budget, may_admit=not preempted)
        rows += [_row(sequence, chunk, is_prefill=True) for sequence, chunk in prefill]
        if not rows:
            return None
        self._step += 1
        plan = StepPlan(
            step=self._step,
            scheduled=tuple(rows),
            num_decode=len(decode),
            num_tokens=len(decode) + sum(chunk for _, chunk in prefill),
            preempted=tuple(preempted),
        )
        sequences = decode + [sequence for sequence, _ in prefill]
        for row, sequence in zip(rows, sequences, strict=True):
            sequence.planned += len(row.token_ids)
            sequence.unsampled += row.sample
            sequence.in_flight += 1
        self._in_flight.append((plan, sequences))
        return plan

    def _decodes(self) -> list[Sequence]:
        """The sequences that the next step decodes, oldest first."""
        return [s for s in self._running.values() if s.is_decode and not s.is_planned_to_its_end]

    def _grow_decodes(self, preempted: list[str]) -> list[Sequence]:
        """The decode sequences, oldest first, each with a page for its newest token. Preempts from the newest on."""
        decode = []
        for sequence in self._decodes():
            while sequence.status is SequenceStatus.RUNNING and not self._kv.grow(sequence):
                preempted.append(self._preempt_newest())
            if sequence.status is not SequenceStatus.RUNNING:
                break  # it was the newest left, so nobody stands behind it
            decode.append(sequence)
        return decode

    def _plan_prefill(self, budget: int, may_admit: bool) -> list[tuple[Sequence, int]]:
        """Prefilling sequences and how many tokens each computes: the running ones, then newly admitted ones."""
        prefill = []
        for sequence in list(self._running.values()):
            if budget and not sequence.is_decode and not sequence.is_planned_to_its_end:
                prefill.append((sequence, self._chunk(sequence, budget)))
                budget -= prefill[-1][1]
        while budget and may_admit and (admitted := self._admit_head(budget)) is not None:
            prefill.append((admitted, self._chunk(admitted, budget)))
            budget -= prefill[-1][1]
        return prefill

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        chunk = min(sequence.remaining, budget, self.config.prefill_chunk_tokens or budget)
        if not self.config.enable_chunked_prefill:
            return chunk
        if sequence.request.params.prompt_logprobs is not None:
            chunk = min(chunk, SCORED_CHUNK_TOKENS)
        if self.config.max_chunk_context is not None:
            # The largest c with c * (start + c) at most the limit.
            start = sequence.planned
            fits = (isqrt(start * start + 4 * self.config.max_chunk_context) - start) // 2
            chunk = min(chunk, max(fits, 1))
        return chunk

    def _admit_head(self, budget: int) -> Sequence | None:
        """Move the head of the waiting line to running, if there is a slot and pages for it."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return None
        if not self.config.enable_chunked_prefill and len(self._waiting[0].token_ids) > budget:
            return None
        # A page in hand for each running sequence, or the next page boundary would preempt what is admitted here.
        sequence = self._waiting[0]
        if not self._kv.admit(sequence, headroom=len(self._running)):
            return None
        self._waiting.popleft()
        self._running[sequence.request.request_id] = sequence
        sequence.status = SequenceStatus.RUNNING
        return sequence

    def _preempt_newest(self) -> str:
        """Send the newest running sequence back to the head of the line; what it published stays cached for it."""
        if len(self._running) < 2:
            self.check_conservation()
            raise ConservationError("the oldest sequence finds no KV page though nothing else runs")
        request_id, sequence = self._running.popitem()
        self._kv.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(sequence)
        return request_id

    def _advance(self, sequence: Sequence, row: ScheduledSequence, sampled: Mapping[str, int]) -> SequenceUpdate | None:
        """Take the result of one row; None when the sequence neither got a token nor ended."""
        sequence.computed += len(row.token_ids)
        self._kv.publish(sequence)
        token_id = None
        if row.sample:
            token_id = sampled[row.request_id]
            sequence.token_ids.append(token_id)
            sequence.unsampled -= 1
        elif sequence.computed < len(sequence.token_ids):
            return None
        ended = sequence.finish_reason()
        if ended is not None:
            self._running.pop(row.request_id)
            sequence.status = SequenceStatus.FINISHED
            self._release_unless_in_flight(sequence)
        return _update(sequence, token_id, ended)

    def _end(self, request_id: str) -> Sequence | None:
        """Take a live sequence out of the line."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is SequenceStatus.FINISHED:
            return None
        if sequence.status is SequenceStatus.RUNNING:
            del self._running[request_id]
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._release_unless_in_flight(sequence)
        return sequence

    def _release_unless_in_flight(self, sequence: Sequence) -> None:
        """Free the pages of an ended sequence, unless a plan in flight computes into them or it is forgotten."""
        if sequence.in_flight == 0 and self._sequences.get(sequence.request.request_id) is sequence:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._kv.release(sequence)
        del self._sequences[sequence.request.request_id]


def _row(sequence: Sequence, chunk: int, is_prefill: bool) -> ScheduledSequence:
    """The next `chunk` tokens of `sequence`: known ones, or the one that a plan in flight samples."""
    start = sequence.planned
    end = start + chunk
    return ScheduledSequence(
        sequence.request.request_id,
        start,
        tuple(sequence.token_ids[start:end]) or (UNKNOWN_TOKEN,),
        sequence.pages,
        sample=end == sequence.num_tokens and sequence.max_tokens > 0,
        is_prefill=is_prefill,
    )


def _update(
    sequence: Sequence, token_id: int | None, ended: tuple[FinishReason, str | int | None] | None
) -> SequenceUpdate:
    finish_reason, stop_reason = ended or (None, None)
    return SequenceUpdate(
        sequence.request.request_id,
        token_id,
        finish_reason,
        stop_reason,
        sequence.cached_prompt_tokens,
        sequence.preemptions,
    )
