"""The compiled CPU kernels, once per session, with one thread and with several."""

from __future__ import annotations

import pytest

from pellucid.kernels.cpu_library import CpuLibrary


@pytest.fixture(scope="session")
def library() -> CpuLibrary:
    """One thread: quick on a busy machine."""
    return CpuLibrary(threads=1)


@pytest.fixture(scope="session")
def threaded() -> CpuLibrary:
    """Three threads: an uneven share of tiles and tasks for each."""
    return CpuLibrary(threads=3)
