"""Which prompts a graph holds, and which graphs a plan has."""

from __future__ import annotations

import pytest

from pellucid.hardware import load_hardware
from pellucid.runner.prompt_graphs import MOST_CONTEXT, MOST_SEQUENCES, PREFIX_KEYS, PromptShape, fitting, prompt_shapes
from pellucid.selection.args import EngineArgs
from pellucid.selection.resolve import resolve
from pellucid.step_plan import ScheduledSequence
from pellucid.tuning.step_choices import apply_choices
from tests.selection.models import SMALL_DENSE, V2_LITE


def chunk(tokens: int, start: int = 0) -> ScheduledSequence:
    return ScheduledSequence("r", start, tuple(range(tokens)), (), True, True)


def shapes_of(traits, **flags) -> tuple[PromptShape, ...]:
    plan = resolve(EngineArgs("model", **{"num_kv_pages": 99, **flags}), traits, load_hardware("h200"))
    return prompt_shapes(traits, plan)


MLA = shapes_of(V2_LITE)
GQA = shapes_of(SMALL_DENSE)


@pytest.mark.parametrize(
    ("rows", "mla", "gqa"),
    [
        ([chunk(1)], (16, 16), 16),
        ([chunk(16)], (16, 16), 16),
        ([chunk(17)], (32, 32), 32),
        ([chunk(129)], (256, 256), 256),
        ([chunk(512)], (512, 512), 512),
        ([chunk(100), chunk(100)], (256, 256), 256),
        ([chunk(1025)], None, None),
        ([chunk(10, 2000)], (16, PREFIX_KEYS), 16),
        ([chunk(10, 2000), chunk(10, 2100)], None, 32),
        ([chunk(300, 500)], (384, PREFIX_KEYS), 384),
        ([chunk(520, 500)], (1024, 1024), 640),
        ([chunk(520, 600)], None, 640),
        ([chunk(10, MOST_CONTEXT)], None, None),
        ([chunk(1)] * MOST_SEQUENCES, (16, 16), 16),
        ([chunk(1)] * (MOST_SEQUENCES + 1), None, None),
    ],
    ids=str,
)
def test_the_smallest_graph_that_holds_them(rows, mla, gqa) -> None:
    assert fitting(MLA, rows) == (None if mla is None else PromptShape(*mla))
    assert fitting(GQA, rows) == (None if gqa is None else PromptShape(gqa, 0))


def test_no_graph_is_a_size_beyond_a_step_or_holds_more_keys_than_a_sequence() -> None:
    assert max(shape.rows for shape in shapes_of(V2_LITE, max_num_batched_tokens=300)) == 384
    assert {shape.rows for shape in shapes_of(V2_LITE, max_num_batched_tokens=48, max_num_seqs=8)} == {16, 32, 64}
    assert {shape.keys for shape in shapes_of(V2_LITE, max_model_len=100) if shape.keys != shape.rows} == {112}
    assert shapes_of(V2_LITE, enforce_eager=True) == ()
    assert shapes_of(V2_LITE, decode_path="layered") == ()


def test_where_a_bucket_is_anothers_its_sizes_have_no_graph_and_larger_ones_keep_theirs() -> None:
    plan = resolve(EngineArgs("model", num_kv_pages=99), V2_LITE, load_hardware("h200"))
    mixed = apply_choices(plan, [("attention.prefill@512", "fa3_mla")])
    assert mixed.prompt_graphs == 1024
    rows = {shape.rows for shape in prompt_shapes(V2_LITE, mixed)}
    assert not rows & {384, 512} and {256, 640, 1024} < rows
    assert "attention.prefill@512 is fa3_mla" in mixed.decision("prompt_graphs").because[1]
    # A layered path, and one without graphs, captures nothing.
    for given in (("decode_path", "layered"), ("cuda_graphs", "False")):
        assert apply_choices(plan, [given]).prompt_graphs == 0
