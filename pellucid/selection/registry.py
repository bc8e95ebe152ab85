"""Finds every backend's `TRAITS` by walking the family packages. Called by `resolve`; imports no torch itself.

Families are named as strings: selection is below them and must not import them by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Sequence

from pellucid.traits.backend import BackendTraits, Op

FAMILIES = ("pellucid.attention", "pellucid.moe", "pellucid.quantization", "pellucid.distributed")


def discover(families: Iterable[str] = FAMILIES) -> tuple[BackendTraits, ...]:
    """All declared backends in the fixed order: by op, highest priority first, then by name.

    A family that this version does not have contributes nothing.

    Raises:
        ValueError: two backends of one op share a name, or a `TRAITS` is not `BackendTraits`.
    """
    found: dict[tuple[str, str], BackendTraits] = {}
    for family in families:
        if importlib.util.find_spec(family) is None:
            continue
        package = importlib.import_module(family)
        for module in pkgutil.iter_modules(package.__path__):
            name = f"{family}.{module.name}"
            traits = getattr(importlib.import_module(name), "TRAITS", None)
            if traits is None:
                continue
            if not isinstance(traits, BackendTraits):
                raise ValueError(f"{name}.TRAITS is not BackendTraits")
            if (traits.op, traits.name) in found:
                raise ValueError(f"{name}: a second {traits.op} backend is called {traits.name}")
            found[traits.op, traits.name] = traits
    return fixed_order(found.values())


def fixed_order(backends: Iterable[BackendTraits]) -> tuple[BackendTraits, ...]:
    """The order that decides between candidates that were not measured, or that tie."""
    return tuple(sorted(backends, key=lambda b: (b.op, -b.priority, b.name)))


def candidates(backends: Sequence[BackendTraits], op: Op) -> tuple[BackendTraits, ...]:
    """The backends of one op, in the fixed order."""
    return tuple(b for b in fixed_order(backends) if b.op == op)
