"""An import hook: the decision modules of an engine are rewritten as they are imported, so that they tell a `Recorder`.

Used by the engine files of this folder, before the engine is imported.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType

from .recorder import Recorder
from .rewrite import RECORDER, Rules, rewrite


def install(recorder: Recorder, rewrites: Callable[[str], bool], rules: Rules) -> None:
    """Rewrite every module whose name `rewrites` accepts, from its import on."""
    setattr(builtins, RECORDER, recorder)
    sys.meta_path.insert(0, _Finder(recorder, rewrites, rules))


class _Finder:
    def __init__(self, recorder: Recorder, rewrites: Callable[[str], bool], rules: Rules) -> None:
        self._recorder, self._rewrites, self._rules = recorder, rewrites, rules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self._rewrites(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        spec.loader = _Loader(name, spec.origin, self._recorder, self._rules)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, recorder: Recorder, rules: Rules) -> None:
        super().__init__(name, path)
        self._recorder, self._rules = recorder, rules

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode("utf-8")
        return compile(rewrite(source, self.path, self._recorder, self._rules), self.path, "exec", dont_inherit=True)
