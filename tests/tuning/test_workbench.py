"""Real backends on the CPU: right ones pass the gate and are timed, planted mistakes are found, steps run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pellucid.attention import cpu_native
from pellucid.hardware import load_hardware
from pellucid.models.checkpoint import Checkpoint
from pellucid.moe.cpu_native import PackedExperts
from pellucid.selection.args import EngineArgs
from pellucid.selection.resolve import resolve
from pellucid.tuning.measure import Question
from pellucid.tuning.problems import _awkward, drawable
from pellucid.tuning.session import undecided
from pellucid.tuning.steps import slice_layers, slice_tensors
from pellucid.tuning.workbench import Workbench
from tests import checkpoints
from tests.selection.models import KIMI_K25, V2_LITE

SHAPES = ("v2lite", "llama")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Shape -> (plan, traits, tensors)."""
    found = {}
    for shape in SHAPES:
        checkpoint = Checkpoint.open(checkpoints.write(shape, tmp_path_factory.mktemp(shape)))
        traits = checkpoint.report().traits
        args = EngineArgs("model", threads=1, max_num_seqs=4, max_num_batched_tokens=16, num_kv_pages=40)
        found[shape] = resolve(args, traits, load_hardware("cpu")), traits, checkpoint.tensors
    return found


def questions(opened, shape: str, op: str) -> list[Question]:
    plan, traits, _ = opened[shape]
    return [q for q in undecided(plan) if q.op == op and drawable(q, traits)]


@pytest.mark.parametrize(
    ("shape", "op"),
    [(shape, op) for shape in SHAPES for op in ("attention.prefill", "attention.decode", "linear.fp32")]
    + [("v2lite", "moe")],
)
def test_every_backend_that_fits_passes_the_gate_at_every_bucket_and_takes_time(opened, shape, op):
    plan, traits, _ = opened[shape]
    bench = Workbench(traits, plan)
    found = questions(opened, shape, op)
    assert len(found) >= 3
    for question in found:
        for name in question.order:
            assert bench.check(question, name) == "", (question.key, name)
        assert bench.sample(question, question.order[0]) > 0


class Planted(cpu_native.CpuNativeAttention):
    """Attention with a mistake of the kind that only some rows show."""

    def gqa(self, q, keys, values, metadata, **options):
        return self._spoil(super().gqa(q, keys, values, metadata, **options), metadata)

    def mla(self, q, latent, metadata, **options):
        return self._spoil(super().mla(q, latent, metadata, **options), metadata)


def planted(mistake):
    kind = type("Mistaken", (Planted,), {"_spoil": lambda self, out, metadata: mistake(out, metadata)})
    return lambda context, phase: kind(context.cpu_library)


def pads_written(out, metadata):
    out = out.clone()
    out[metadata.context == 0] = 1e-3
    return out


def long_rows_wrong(out, metadata):
    return torch.where((metadata.context > 16).view(-1, 1, 1), out * 1.2, out)


def late_rows_wrong(out, metadata):
    out = out.clone()
    for span in metadata.spans:
        out[span.start + 1 : span.stop] = out[span.start : span.start + 1]
    return out


def nan_rows(out, metadata):
    out = out.clone()
    out[-1] = float("nan")
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("op", "mistake", "reason"),
    [
        ("attention.decode", pads_written, "padded row 1 is not zeros"),
        ("attention.decode", long_rows_wrong, "differs"),
        ("attention.prefill", long_rows_wrong, "differs"),
        ("attention.prefill", late_rows_wrong, "differs"),
        ("attention.decode", nan_rows, "not finite"),
    ],
)
def test_mistakes_in_padded_rows_later_positions_and_cached_prefixes_are_found(
    opened, shape, op, mistake, reason, monkeypatch
):
    monkeypatch.setattr(cpu_native, "create", planted(mistake))
    question = max(questions(opened, shape, op), key=lambda q: q.bucket)
    assert reason in Workbench(opened[shape][1], opened[shape][0]).check(question, "cpu_native")


def test_experts_that_mix_up_their_weights_are_found(opened, monkeypatch):
    right = PackedExperts.add_to
    monkeypatch.setattr(PackedExperts, "add_to", lambda self, out, x, e, w: right(self, out, x, e, w.flip(1)))
    question = max(questions(opened, "v2lite", "moe"), key=lambda q: q.bucket)
    assert "differs" in Workbench(opened["v2lite"][1], opened["v2lite"][0]).check(question, "cpu_native")


@pytest.mark.parametrize("bucket", [1, 2, 4, 16, 64])
def test_what_is_checked_has_padded_rows_rows_past_a_page_and_cached_prefixes(bucket):
    queries, contexts = _awkward("decode", bucket, 16, 4096)
    assert queries == [1] * bucket
    assert (0 in contexts) == (bucket > 1)
    queries, contexts = _awkward("prefill", bucket, 16, 4096)
    assert sum(queries) == bucket
    assert any(context > count for count, context in zip(queries, contexts, strict=True))
    assert all(context >= count for count, context in zip(queries, contexts, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", ["step.decode", "step.prefill"])
def test_a_step_runs_under_the_default_and_under_other_choices(opened, shape, op):
    plan, traits, tensors = opened[shape]
    attention = "attention.decode" if op == "step.decode" else "attention.prefill"
    question = Question(op, 4, ("default", "measured"), "", ((f"{attention}@4", "reference"),))
    bench = Workbench(traits, plan, tensors)
    for name in question.order:
        assert bench.check(question, name) == ""
        assert bench.sample(question, name) > 0


def test_a_step_whose_logits_are_not_finite_is_not_taken(opened, monkeypatch):
    plan, traits, tensors = opened["llama"]
    monkeypatch.setattr(cpu_native, "create", planted(nan_rows))
    question = Question("step.decode", 2, ("default", "measured"), "", (("attention.decode@2", "reference"),))
    assert "not finite" in Workbench(traits, plan, tensors).check(question, "default")


def test_a_slice_of_a_model_has_a_layer_of_each_kind_and_no_more_than_its_bytes():
    small = slice_layers(V2_LITE)
    assert small.moe_layers[0] is False and True in small.moe_layers
    assert 3 <= small.num_layers < V2_LITE.num_layers
    assert len(small.moe_layers) == small.num_layers
    large = slice_layers(replace(KIMI_K25, num_layers=61))
    assert large.num_layers == 3
    assert slice_layers(small) == small


def test_weights_that_cannot_be_drawn_are_those_of_the_slices_layers(opened):
    _, traits, tensors = opened["llama"]
    packed = replace(
        traits, weights=replace(traits.weights, attention=replace(traits.weights.attention, scheme="q4_0"))
    )
    cut = replace(packed, num_layers=1, moe_layers=packed.moe_layers[:1])
    kept = slice_tensors(cut, tensors, 0)
    assert any("layers.0." in name for name in kept) and not any("layers.1." in name for name in kept)
    assert {name for name in tensors if "layers." not in name} <= kept.keys()
    assert not drawable(Question("linear.q4_0", 1, ("a", "b")), packed)
