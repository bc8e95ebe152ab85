"""Fixtures every test folder shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pellucid.models.hub import default_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded default model, downloaded once into the user's cache.

    Skips only where PELLUCID_OFFLINE says that there is no network: CI must not lose these tests in silence.
    """
    if os.environ.get("PELLUCID_OFFLINE"):
        pytest.skip("PELLUCID_OFFLINE is set")
    return default_model()
