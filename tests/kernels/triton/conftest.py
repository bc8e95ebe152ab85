"""Triton kernels against fp64: on the card where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

HAS_CARD = torch.cuda.is_available()
if not HAS_CARD:
    # Read when a function is decorated, Triton's own included: so before it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is for Linux")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_CARD else "cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """The interpreter's `dot` cannot do bf16."""
    return torch.bfloat16 if HAS_CARD else torch.float16


@pytest.fixture
def wide_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a program costs milliseconds whatever its size: a few large ones, instead of hundreds."""
    if device.type == "cuda":
        return
    from pellucid.kernels.triton import head, linear

    choose = linear.linear_tile
    monkeypatch.setattr(linear, "linear_tile", lambda *shape: choose(*shape)._replace(block_n=64))
    monkeypatch.setattr(head, "head_tile", lambda *shape: choose(*shape)._replace(block_n=32))
