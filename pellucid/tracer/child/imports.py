"""Acts on a module as soon as it has been imported: how the simulation reaches torch and transformers, and only then.

Used by `simulate` and `configs`; an engine that never imports torch never waits for it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module when its import has ended; now, where it has been imported before."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, act))


class _Waiting:
    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        position = sys.meta_path.index(self)
        spec = None
        for finder in sys.meta_path[position + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return None
        loader, exec_module = spec.loader, spec.loader.exec_module

        def exec_then_act(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            exec_module(module)
            self._act(module)

        loader.exec_module = exec_then_act  # type: ignore[method-assign]
        return spec
