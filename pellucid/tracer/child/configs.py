"""Makes transformers answer in a child without the model's own code: lazy attributes, and unknown model types.

Used by the engine files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .imports import after_import

UNKNOWN_TYPE = "does not recognize this architecture"
"""What transformers says of a `model_type` that it has no class for."""


def install(stub: Callable[[str], Any]) -> None:
    """Patch transformers once it is imported: its own probes run first, then what cannot be loaded is a stub."""
    after_import("transformers.utils.import_utils", lambda module: _patch(module, stub))
    after_import("transformers.models.auto.configuration_auto", _let_engines_register)


def _patch(utilities: Any, stub: Callable[[str], Any]) -> None:
    # Asked now, they see what is installed and not what is stubbed later; the answers are cached.
    for name in dir(utilities):
        if name.startswith("is_") and name.endswith("_available"):
            with suppress(ImportError, TypeError, ValueError, AttributeError, RuntimeError):
                getattr(utilities, name)()
    lazy = utilities._LazyModule
    load = lazy.__getattr__

    def load_or_stub(self: Any, name: str) -> Any:
        try:
            return load(self, name)
        except (ImportError, RuntimeError):
            return stub(f"transformers.{name}")

    lazy.__getattr__ = load_or_stub
    dummy = getattr(utilities, "DummyObject", None)
    if dummy is not None:
        read = dummy.__getattribute__

        def read_or_stub(cls: Any, name: str) -> Any:
            try:
                return read(cls, name)
            except ImportError:
                return stub(f"transformers.{name}")

        dummy.__getattribute__ = read_or_stub


def _let_engines_register(module: Any) -> None:
    """Engines register classes for model types that a newer transformers already has: theirs win, as on import."""
    mapping = module._LazyConfigMapping
    register = mapping.register
    mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)


def add_unknown_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Give each model type of this config that transformers does not know a class; returns notes of what was done.

    Such checkpoints bring a class as remote code, which is never run here. One with a compressed latent gets the
    defaults of the known class with that attention whose fields are most like its own; others a plain class.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto import configuration_auto

    known: Any = configuration_auto
    extra = known.CONFIG_MAPPING._extra_content
    notes = []
    for values in _configs(config):
        name = values.get("model_type")
        if isinstance(name, str) and name not in known.CONFIG_MAPPING_NAMES and name not in extra:
            like = _most_alike(values, known.CONFIG_MAPPING_NAMES) if "kv_lora_rank" in values else None
            base = PretrainedConfig if like is None else known.CONFIG_MAPPING[like]
            # Constructors read some fields before they set those that the file gives.
            numbers = {key: one for key, one in values.items() if isinstance(one, int | float)}
            early = numbers if like is None else {}
            extra[name] = type("UnknownConfig", (base,), {**early, "model_type": name})
            notes.append(
                f"transformers knows no model_type {name!r} and the checkpoint's own code is not run: "
                f"its config was read as {'a plain one' if like is None else f'one of type {like!r}'}"
            )
    return tuple(notes)


def _configs(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    text = config.get("text_config")
    return (config, text) if isinstance(text, Mapping) else (config,)


def _most_alike(values: Mapping[str, Any], known: Iterable[str]) -> str | None:
    """The model type with a compressed latent whose configuration file names most of these fields."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    best, most = None, 0
    for name in sorted(known):
        for file in sorted((models / name).glob("configuration_*.py")):
            words = set(re.findall(r"\w+", file.read_text(encoding="utf-8")))
            shared = len(words & set(values))
            if "kv_lora_rank" in words and shared > most:
                best, most = name, shared
    return best


def read_config(folder: str) -> dict[str, Any]:
    """The model folder's `config.json`. Raises OSError or ValueError."""
    values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError("config.json holds no object")
    return values
