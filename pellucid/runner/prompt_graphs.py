"""Short prompts from CUDA graphs, one a number of rows: launched once by the host, and not kernel by kernel.

A chunk of a few hundred tokens takes the device less time than its hundreds of launches take the host. Its graph is
captured over fixed buffers; a prompt is padded to the rows of one, and all that tells prompts apart is copied before:

    [ token ids | positions | slots | rows with logits | slots of all keys (MLA) | page table (GQA) | query tiles )

Made by `runner.gpu_runner` where the plan has prompt graphs; all others go through `runner.model_runner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from pellucid.attention.base import AttentionBackend, AttentionMetadata, PromptTables, Span
from pellucid.attention.gathered_keys import key_starts
from pellucid.kernels.device import DeviceLimits
from pellucid.kvcache.pool import KVPool
from pellucid.layers.batch import AttentionSegment, ForwardBatch
from pellucid.models.decoder import Decoder
from pellucid.runner.cuda_graphs import capture_graph
from pellucid.runner.forward_batch import place_tokens
from pellucid.selection.bucket import bucket
from pellucid.selection.decode_path import PROMPT_TOKENS, captured_prompts
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.step_plan import ScheduledSequence
from pellucid.traits.model import MLATraits, ModelTraits

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

STEP_ROWS = 128
ROWS = (16, 32, 64, *range(STEP_ROWS, PROMPT_TOKENS + 1, STEP_ROWS))
"""Of the graphs. Padding costs what rows do: beyond `STEP_ROWS` they are never more than doubled."""

MOST_SEQUENCES = 16
"""Whose prompts are computed together."""

MOST_CONTEXT = 8192
"""Tokens of a sequence, those of its cached prefix included."""

PREFIX_ROWS, PREFIX_KEYS = 512, 4096
"""MLA rebuilds as many keys as a graph has, whether they are needed or not: so many, for chunks of up to so many rows
behind a cached prefix, and otherwise no more keys than rows."""

ALIGNED = 4
"""Each buffer begins at a multiple of 16 bytes: a kernel is compiled for what its pointers are aligned to."""


class PromptShape(NamedTuple):
    """Rows that a graph computes, and keys that it rebuilds: none where the cache has them as they are needed (GQA)."""

    rows: int
    keys: int


def prompt_shapes(traits: ModelTraits, plan: ExecutionPlan) -> tuple[PromptShape, ...]:
    """Of the plan's prompt graphs, smallest first: of buckets that are captured, up to what a step computes."""
    captured, most = captured_prompts(plan, discover()), plan.max_num_batched_tokens
    rows = [n for below, n in zip((0, *ROWS), ROWS, strict=False) if bucket(n) in captured and below < most]
    if traits.attention.kind != "mla":
        return tuple(PromptShape(n, 0) for n in rows)
    keys = min(PREFIX_KEYS, -(-plan.max_model_len // ROWS[0]) * ROWS[0])
    behind_prefix = [PromptShape(n, keys) for n in rows if n < keys and n <= PREFIX_ROWS]
    return tuple(sorted([*(PromptShape(n, n) for n in rows), *behind_prefix]))


def fitting(shapes: Iterable[PromptShape], rows: Sequence[ScheduledSequence]) -> PromptShape | None:
    """The smallest shape that holds these chunks, without doubling them where there are many."""
    contexts = [row.start + len(row.token_ids) for row in rows]
    if len(rows) > MOST_SEQUENCES or max(contexts) > MOST_CONTEXT:
        return None
    tokens = sum(len(row.token_ids) for row in rows)
    most = max(STEP_ROWS, 2 * tokens)
    holding = (s for s in shapes if tokens <= s.rows <= most and (not s.keys or sum(contexts) <= s.keys))
    return min(holding, default=None)


class PromptStep:
    """A prefill step of one shape over buffers of its own: `fill` them with up to MOST_SEQUENCES chunks, `forward`."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        shape: PromptShape,
        limits: DeviceLimits,
        device: torch.device,
    ) -> None:
        import torch

        from pellucid.kernels.triton.prefill_tiles import TILE_FIELDS, prefill_tile

        self._decoder, self._pool, self._backend, self._shape = decoder, pool, backend, shape
        a, rows = decoder.traits.attention, shape.rows
        widths = (a.qk_head_dim, a.v_head_dim) if isinstance(a, MLATraits) else (a.head_dim, a.head_dim)
        self._block_m = prefill_tile(*widths, limits, rows).block_m
        # Each sequence, and the padding, may begin one more tile.
        tiles = rows // self._block_m + MOST_SEQUENCES + 1
        self._pages = 0 if shape.keys else -(-MOST_CONTEXT // pool.page_size)
        sizes = {
            "token_ids": rows, "positions": rows, "slots": rows, "logit_rows": MOST_SEQUENCES, "key_slots": shape.keys,
            "page_table": MOST_SEQUENCES * self._pages, "tiles": tiles * TILE_FIELDS,
        }  # fmt: skip
        rounded = [-(-size // ALIGNED) * ALIGNED for size in sizes.values()]
        starts = list(accumulate(rounded, initial=0))
        self._places = {name: slice(at, at + sizes[name]) for name, at in zip(sizes, starts, strict=False)}
        self._inputs = torch.zeros(starts[-1], dtype=torch.int32, device=device)

    def fill(self, rows: Sequence[ScheduledSequence]) -> int:
        """Put chunks that the shape holds where `forward` reads them. How many of them are sampled."""
        import torch

        from pellucid.kernels.triton.prefill_tiles import tile_rows

        page = self._pool.page_size
        places = place_tokens(rows, page)
        spans, key_slots, tables = [], [], []
        begin = 0
        for row in rows:
            stop, context = begin + len(row.token_ids), row.start + len(row.token_ids)
            spans.append(Span(begin, stop, context))
            if self._shape.keys:
                whole = (slot for number in row.pages for slot in range(number * page, (number + 1) * page))
                key_slots += [slot for slot, _ in zip(whole, range(context), strict=False)]
            else:
                tables += [*row.pages[: self._pages], *[0] * (self._pages - len(row.pages))]
            begin = stop
        starts = key_starts(spans)
        if begin < self._shape.rows:
            spans, starts = [*spans, Span(begin, self._shape.rows, 0)], [*starts, 0]
        tiles = tile_rows(spans, self._block_m, starts if self._shape.keys else ())
        device = self._inputs.device
        staged = torch.zeros(len(self._inputs), dtype=torch.int32, pin_memory=device.type == "cuda")
        host = staged.numpy()
        host[self._places["slots"]] = -1
        filled = {
            "token_ids": places.token_ids, "positions": places.positions, "slots": places.slots,
            "logit_rows": places.logit_rows, "key_slots": key_slots, "page_table": tables,
            "tiles": [field for tile in tiles for field in tile],
        }  # fmt: skip
        for name, values in filled.items():
            at = self._places[name].start
            host[at : at + len(values)] = values
        self._inputs.copy_(staged, non_blocking=True)
        return len(places.logit_rows)

    def forward(self) -> torch.Tensor:
        """Logits fp32 [MOST_SEQUENCES, vocab]: of the chunks that are sampled, in their order, then of whatever."""
        from pellucid.kernels.triton.prefill_tiles import TILE_FIELDS

        wide = self._inputs[: self._places["page_table"].start].long()
        part, rows = self._places, self._shape.rows
        narrow = {name: self._inputs[part[name]] for name in ("page_table", "tiles")}
        table = narrow["page_table"].view(MOST_SEQUENCES, self._pages)
        tables = PromptTables(narrow["tiles"].view(-1, TILE_FIELDS), wide[part["key_slots"]])
        nothing = self._inputs[:0]
        metadata = AttentionMetadata(table, nothing, nothing, (Span(0, rows, rows),), tables)
        batch = ForwardBatch(
            token_ids=wide[part["token_ids"]],
            positions=wide[part["positions"]],
            slots=wide[part["slots"]],
            segments=(AttentionSegment(0, rows, self._backend, metadata),),
            pool=self._pool,
            logit_rows=wide[part["logit_rows"]],
        )
        return self._decoder.forward(batch).logits


class PromptGraphs:
    """A captured `PromptStep` of every shape, all with one buffer of logits. `make(shape)` makes one.

    `captured`: buckets of tokens whose steps these are.
    """

    def __init__(
        self, shapes: Sequence[PromptShape], captured: Sequence[int], make: Callable[[PromptShape], PromptStep]
    ) -> None:
        self._buckets = frozenset(captured)
        self._captured: dict[PromptShape, tuple[PromptStep, torch.cuda.CUDAGraph]] = {}
        pool = None
        for shape in sorted(shapes, reverse=True):
            step = make(shape)
            # Before it is captured: kernels are compiled, and libraries take what they need.
            logits = step.forward()
            if pool is None:
                self._logits = logits
            graph = capture_graph(partial(_forward_into, step, self._logits), pool)
            pool = pool or graph.pool()
            self._captured[shape] = (step, graph)

    def fitting(self, rows: Sequence[ScheduledSequence]) -> PromptShape | None:
        """The smallest graph for these chunks, if steps of so many tokens have one."""
        tokens = sum(len(row.token_ids) for row in rows)
        return fitting(self._captured, rows) if bucket(tokens) in self._buckets else None

    def replay(self, shape: PromptShape, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Logits fp32 [sampled, vocab] of the chunks that are sampled. The next replay writes over them."""
        step, graph = self._captured[shape]
        sampled = step.fill(rows)
        graph.replay()
        return self._logits[:sampled]


def _forward_into(step: PromptStep, logits: torch.Tensor) -> None:
    logits.copy_(step.forward())
