"""The engine's logits against the fp64 reference, at every position, however the work is cut into batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pellucid.models.decoder import Decoder
from tests import checkpoints, harness
from tests.reference import Reference

Array = npt.NDArray[np.float64]
Prompts = dict[int, list[int]]

TOLERANCE = 2e-4


def _full(prompts: Prompts) -> tuple[int, list[harness.Step]]:
    return 64, [[(0, prompts[0])]]


def _chunked(prompts: Prompts) -> tuple[int, list[harness.Step]]:
    """Odd sizes over pages of 16, so that chunks begin and end inside pages, on their bounds, and span several."""
    bounds = np.cumsum([0, 7, 9, 1, 32, 3, 61, 37])
    return 16, [[(0, prompts[0][start:stop])] for start, stop in pairwise(bounds)]


def _decode(prompts: Prompts) -> tuple[int, list[harness.Step]]:
    return 4, [[(0, prompts[0][:110])], *([(0, [token])] for token in prompts[0][110:])]


def _mixed(prompts: Prompts) -> tuple[int, list[harness.Step]]:
    """Three sequences join one by one, prefill beside decode rows, then decode together; padded rows throughout."""
    a, b, c = prompts.values()
    steps: list[harness.Step] = [
        [(0, a[:83])],
        [(0, a[83:84]), harness.PAD, (1, b[:30])],
        [(1, b[30:51]), (0, a[84:140]), (2, c[:23]), harness.PAD],
    ]
    steps += [[(0, [x]), harness.PAD, (1, [y]), (2, [z])] for x, y, z in zip(a[140:], b[51:], c[23:], strict=True)]
    return 8, steps


CUTS = {"full": _full, "chunked": _chunked, "decode": _decode, "mixed": _mixed}
PAIRS = [
    (name, backend)
    for name in checkpoints.CONFIGS
    for backend in harness.BACKENDS
    if backend != "reference-expanded" or name in checkpoints.MLA_SHAPES
]


@pytest.fixture(scope="module")
def decoder(checkpoint: Callable[[str], Path]) -> Callable[[str, str], Decoder]:
    """The decoder of a shape for one of the harness's backends, loaded once."""
    return cache(lambda name, backend: harness.load(checkpoint(name), backend))


def _run(decoder: Decoder, backend: str, name: str, cut: str) -> tuple[harness.Session, dict[int, Array]]:
    page_size, steps = CUTS[cut](checkpoints.prompts(name))
    session = harness.Session(decoder, harness.attention_backend(backend), page_size)
    return session, session.run(steps)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_logits_equal_the_reference_at_every_position(
    name: str,
    backend: str,
    cut: str,
    decoder: Callable[[str, str], Decoder],
    expected: Callable[[str], dict[int, Array]],
) -> None:
    session, found = _run(decoder(name, backend), backend, name, cut)

    for sequence, rows in found.items():
        assert rows.shape == expected(name)[sequence].shape
        assert np.abs(rows - expected(name)[sequence]).max() <= TOLERANCE
    _assert_only_own_pages_were_written(session)


@pytest.mark.parametrize("name", ["v2", "v3", "unequal-mscale"])
def test_prefill_may_expand_the_latent_while_decode_absorbs(
    name: str, decoder: Callable[[str, str], Decoder], expected: Callable[[str], dict[int, Array]]
) -> None:
    """In one batch, over one cache: the plan picks a backend per phase."""
    page_size, steps = _mixed(checkpoints.prompts(name))
    session = harness.Session(
        decoder(name, "reference-expanded"),
        harness.attention_backend("reference-expanded"),
        page_size,
        harness.attention_backend("cpu_native"),
    )
    for sequence, rows in session.run(steps).items():
        assert np.abs(rows - expected(name)[sequence]).max() <= TOLERANCE


def _assert_only_own_pages_were_written(session: harness.Session) -> None:
    """Neither the scratch page, nor a free page, nor the rest of a sequence's last page."""
    written = np.zeros((session.num_pages + 1, session.page_size), dtype=bool)
    for sequence, pages in session.pages.items():
        for position in range(session.lengths[sequence]):
            written[pages[position // session.page_size], position % session.page_size] = True
    for layer in range(session.decoder.traits.num_layers):
        for cache_rows in (session.pool.keys(layer), session.pool.values(layer)):
            assert (cache_rows.numpy()[~written] == harness.POISON).all()


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_cpu_native_gives_the_same_bits_however_the_work_is_cut(
    name: str, decoder: Callable[[str, str], Decoder]
) -> None:
    _, whole = _run(decoder(name, "cpu_native"), "cpu_native", name, "full")
    for cut in ("chunked", "decode", "mixed"):
        _, found = _run(decoder(name, "cpu_native"), "cpu_native", name, cut)
        np.testing.assert_array_equal(found[0], whole[0], err_msg=cut)


@pytest.mark.parametrize("name", ["v2lite", "v2", "v3", "llama", "qwen3-moe"])
def test_logits_equal_those_of_transformers(
    name: str, decoder: Callable[[str, str], Decoder], transformers_logits: Callable[[str], Array]
) -> None:
    """Directly, for shapes whose inner eps is the same in both."""
    _, found = _run(decoder(name, "cpu_native"), "cpu_native", name, "full")
    assert np.abs(found[0] - transformers_logits(name)).max() <= TOLERANCE


@pytest.mark.parametrize("backend", ["reference", "cpu_native"])
@pytest.mark.parametrize(("name", "dtype"), [("v3", "bfloat16"), ("kimi25", "bfloat16"), ("qwen2", "float16")])
def test_rounded_and_sharded_checkpoints_compute_with_the_values_they_store(
    name: str, dtype: str, backend: str, tmp_path: Path
) -> None:
    path = checkpoints.write_sharded(name, tmp_path, dtype)
    token_ids = checkpoints.prompts(name)[1]
    wanted = Reference.open(path).logits(token_ids)
    assert np.abs(harness.logits(path, [[(0, token_ids)]], backend)[0] - wanted).max() <= TOLERANCE


def test_moe_layers_may_alternate_with_dense_ones(tmp_path: Path) -> None:
    """`moe_layer_freq` as DeepSeek's own code reads it; transformers passes it over, so only the reference judges."""
    path = checkpoints.write_every_other_layer_moe(tmp_path)
    token_ids = checkpoints.prompts("v2lite")[1]
    wanted = Reference.open(path).logits(token_ids)
    assert np.abs(harness.logits(path, [[(0, token_ids)]], "reference")[0] - wanted).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        ("v3", "bfloat16", "reference"),
        ("v3", "float16", "reference-expanded"),
        ("unequal-mscale", "bfloat16", "reference-expanded"),
        ("qwen2", "bfloat16", "reference"),
        ("qwen3-moe", "bfloat16", "reference"),
        ("llama", "float16", "reference"),
    ],
)
def test_sixteen_bit_computation_stays_near(name: str, dtype: str, backend: str, tmp_path: Path) -> None:
    """Half of the positions within 0.5 of logits that spread over +-6; a router may flip at the others."""
    path = checkpoints.write_sharded(name, tmp_path, dtype)
    token_ids = checkpoints.prompts(name)[0]
    session = harness.Session(harness.load(path, backend, dtype), harness.attention_backend(backend), 16)
    found = session.run([[(0, token_ids[:100])], [(0, token_ids[100:])]])
    worst = np.abs(found[0] - Reference.open(path).logits(token_ids)).max(-1)
    assert np.median(worst) < (0.5 if dtype == "bfloat16" else 0.1)


@pytest.mark.parametrize("backend", ["reference", "cpu_native"])
def test_only_the_wanted_rows_and_captured_layers_come_back(
    backend: str, decoder: Callable[[str, str], Decoder], checkpoint: Callable[[str], Path]
) -> None:
    import torch

    token_ids, wanted = checkpoints.prompts("v3")[1], [0, 7, 60]
    session = harness.Session(decoder("v3", backend), harness.attention_backend(backend))
    batch = replace(session.batch([[(0, token_ids)]]), logit_rows=torch.tensor(wanted))

    output = session.decoder.forward(batch, capture=(2, 0))

    reference = Reference.open(checkpoint("v3"))
    np.testing.assert_allclose(output.logits, reference.logits(token_ids)[wanted], rtol=0, atol=TOLERANCE)
    residuals = reference.residuals(token_ids)
    for captured, layer in zip(output.hidden, (2, 0), strict=True):
        np.testing.assert_allclose(captured, residuals[layer], rtol=0, atol=TOLERANCE)
