"""The importer of last resort: packages of the engine's requirements that are not installed become stubs.

Only imports made by the engine's own files are answered, and only for the names that its wheel requires: a stub for
anything at all would make engines believe that they run on other hardware. A stub that is asked for its truth, a
number or a comparison tells so in `Stubs.asked`: what was decided on it is tainted. Used by the engine files.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import re
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

_IMPORT_NAMES = {
    "apache-tvm-ffi": "tvm_ffi",
    "cuda-python": "cuda",
    "flash-attn-4": "flash_attn",
    "flashinfer-python": "flashinfer",
    "humming-kernels": "humming",
    "ipython": "IPython",
    "lm-format-enforcer": "lmformatenforcer",
    "nvidia-cudnn-frontend": "cudnn",
    "nvidia-cutlass-dsl": "cutlass",
    "nvidia-ml-py": "pynvml",
    "opencv-python-headless": "cv2",
    "oss-harmony": "openai_harmony",
    "pillow": "PIL",
    "protobuf": "google",
    "py-cpuinfo": "cpuinfo",
    "python-json-logger": "pythonjsonlogger",
    "python-multipart": "multipart",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "quack-kernels": "quack",
    "sgl-deep-ep": "deep_ep",
    "sgl-deep-gemm": "deep_gemm",
    "sgl-flash-mla": "flash_mla",
    "sgl-kernel": "sgl_kernel",
    "sglang-kernel": "sgl_kernel",
}
"""Where a distribution's import name is not its own name with underscores."""


def import_names(pins: Mapping[str, str | None]) -> dict[str, str | None]:
    """Top-level import name -> version, for the distributions that an engine requires."""
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    return {_IMPORT_NAMES.get(name, name.replace("-", "_")): version for name, version in names.items()}


class Stubs:
    """The stubbed packages of one process. `asked` is called with the package and the engine's frame that asked it.

    `importers` are packages that are installed for real and import kernels as the engine does.
    """

    def __init__(
        self,
        root: str,
        versions: Mapping[str, str | None],
        asked: Callable[[str, FrameType | None], None],
        *,
        absent: Container[str] = (),
        importers: Iterable[str] = (),
        presets: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._versions, self._absent, self._root = versions, absent, root
        found = [importlib.machinery.PathFinder.find_spec(name) for name in importers]
        self._importers = (root, *(str(Path(one.origin).parent) for one in found if one is not None and one.origin))
        self.presets = presets or {}
        self.asked = asked
        self.packages: set[str] = set()

    def install(self) -> None:
        """At the end of the import path, so that whatever is installed comes first."""
        sys.meta_path.append(self)
        real = importlib.metadata.version

        def version(name: str) -> str:
            try:
                return real(name)
            except importlib.metadata.PackageNotFoundError:
                found = self._versions.get(next(iter(import_names({name: None}))))
                if found is None:
                    raise
                return found

        importlib.metadata.version = version  # type: ignore[assignment]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, rest = name.partition(".")
        if top in self._absent or top in sys.stdlib_module_names:
            return None
        if rest:
            # A submodule of a real package that does not exist must fail as it would anywhere.
            if not isinstance(sys.modules.get(name.rpartition(".")[0]), StubModule):
                return None
        elif top not in self._versions or self._engine_frame() is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StubModule:
        self.packages.add(spec.name.partition(".")[0])
        return StubModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        module.__dict__.update(self.presets.get(module.__name__, {}))

    def module(self, name: str) -> StubModule:
        """A stub that stands in `sys.modules` at once: for compiled extensions that the wheel would bring."""
        made = StubModule(name, self)
        self.exec_module(made)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        made.__file__ = f"{self._root}/{name.replace('.', '/')}.so"
        sys.modules[name] = made
        return made

    def version(self, package: str) -> str:
        return self._versions.get(package) or "99.0.0"

    def ask(self, name: str) -> None:
        parts = name.split(".")
        # A stub within a real package is named as what it stands for.
        real = parts[0] in sys.modules and not isinstance(sys.modules[parts[0]], StubModule)
        self.asked(".".join(parts[:3]) if real else parts[0], self._engine_frame())

    def _engine_frame(self) -> FrameType | None:
        """The engine's frame that asks, if the question comes from its files and not from another package's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        return frame if frame is not None and frame.f_code.co_filename.startswith(self._importers) else None


def _is_machinery(file: str) -> bool:
    return (
        file == __file__ or file.startswith("<frozen ") or file.endswith(("importlib/__init__.py", "importlib/util.py"))
    )


class StubModule(types.ModuleType):
    """Any attribute is a submodule that was imported, or a stub."""

    def __init__(self, name: str, stubs: Stubs) -> None:
        super().__init__(name)
        self.__dict__["_stubs"] = stubs

    def __getattr__(self, name: str) -> Any:
        stubs: Stubs = self.__dict__["_stubs"]
        if name == "__version__":
            return stubs.version(self.__name__.partition(".")[0])
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full not in sys.modules:
            self.__dict__[name] = stubs.module(full) if full in stubs.presets else make_stub(full, stubs)
        return sys.modules.get(full) or self.__dict__[name]


def make_stub(name: str, stubs: Stubs) -> Any:
    """A class that can be called, subclassed, indexed and used as a decorator; `name` is its dotted name."""
    namespace = {"_stub_name": name, "_stubs": stubs, "__module__": name.rpartition(".")[0] or name}
    return _StubType(name.rpartition(".")[2], (_Stub,), namespace)


def _ask(stub: _StubType) -> None:
    stub._stubs.ask(stub._stub_name)


class _StubType(type):
    _stub_name: str
    _stubs: Stubs

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = make_stub(f"{cls._stub_name}.{name}", cls._stubs)
        setattr(cls, name, made)
        return made

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if "_stub_name" not in cls.__dict__:
            return super().__call__(*arguments, **keywords)
        decorated = _decorated(arguments, keywords)
        return super().__call__() if decorated is None else decorated

    def __instancecheck__(cls, instance: Any) -> bool:
        return False if "_stub_name" in cls.__dict__ else type.__instancecheck__(cls, instance)

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __bool__(cls) -> bool:
        if "_stub_name" in cls.__dict__:
            _ask(cls)
        return True

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __contains__(cls, item: Any) -> bool:
        _ask(cls)
        return False

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def _unordered(cls, other: Any) -> bool:
        _ask(cls)
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _unordered


class _Stub(metaclass=_StubType):
    """An instance of a stub: false, empty, and one where a number is wanted."""

    _stub_name = "stub"

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __init_subclass__(cls, **keywords: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return make_stub(f"{type(self)._stub_name}.{name}", type(self)._stubs)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        decorated = _decorated(arguments, keywords)
        return self if decorated is None else decorated

    def __bool__(self) -> bool:
        _ask(type(self))
        return False

    def __index__(self) -> int:
        _ask(type(self))
        return 1

    __int__ = __index__

    def __float__(self) -> float:
        _ask(type(self))
        return 1.0

    def __eq__(self, other: object) -> bool:
        _ask(type(self))
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _unordered(self, other: Any) -> bool:
        _ask(type(self))
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _unordered

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (make_stub(type(self)._stub_name, type(self)._stubs),)

    def _number(self, *others: Any) -> Any:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __or__ = __ror__ = _number


def _decorated(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The function or class that a stub is a bare decorator of."""
    only = arguments[0] if len(arguments) == 1 and not keywords else None
    return only if isinstance(only, types.FunctionType | type) and not isinstance(only, _StubType) else None
