"""The machine as facts: probed, or read from a fixture. Called by the CLI and by engine start-up."""

from __future__ import annotations

from pellucid.hardware.facts import CPU, GPU, Fingerprint, Hardware
from pellucid.hardware.fixtures import fixture_names, load_hardware

__all__ = ["CPU", "GPU", "Fingerprint", "Hardware", "fixture_names", "load_hardware"]
