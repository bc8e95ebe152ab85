"""Machines described by JSON files, so that a plan can be explained for a machine one does not have."""

from __future__ import annotations

import json
from pathlib import Path

from pellucid.core import PellucidError
from pellucid.hardware.facts import Hardware, hardware_from_json

FOLDER = Path(__file__).parent / "fixtures"


def fixture_names() -> tuple[str, ...]:
    """Names that `load_hardware` knows besides `this`."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_hardware(name: str = "this") -> Hardware:
    """The machine called `name`: `this` is probed, otherwise a packaged fixture, or a path to a JSON file.

    Raises:
        PellucidError: unknown name (the message lists the known ones), or a file that is not a description.
    """
    if name == "this":
        from pellucid.hardware.probe import probe

        return probe()
    path = FOLDER / f"{name}.json"
    if name not in fixture_names():
        path = Path(name)
        if not path.is_file():
            known = ", ".join(("this", *fixture_names()))
            raise PellucidError(f"--hardware {name}: no such machine or file; known: {known}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PellucidError(f"--hardware {path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise PellucidError(f"--hardware {path}: not a hardware description: expected an object")
    return hardware_from_json(values, str(path))
