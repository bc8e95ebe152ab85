"""Fixtures of doctor's tests: a store of figures of their own, and a model that a CPU runs in no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.tuning import store
from tests import checkpoints


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Not through the environment: kernels that are built already stay where they are.
    monkeypatch.setattr(store, "cache_dir", tmp_path.joinpath)
    return tmp_path / "evidence"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("v2lite", tmp_path_factory.mktemp("tiny"))
