"""What both engines share in the child: one process set up for a tree and a GPU, and the outcome of one run.

`sglang` and `vllm` subclass `Engine`; `main` calls `prepare` once and `run` for every model, each in a fork.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import sys
import time
import traceback
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from . import configs, instrument, simulate, wheel
from .loglines import LogLines
from .presets import presets_for
from .recorder import Recorder
from .rewrite import Rules
from .stubs import Stubs, import_names, make_stub
from .values import plain


@dataclass(frozen=True, slots=True)
class Request:
    """What the parent asks of one child. `folder` is the only place where it may write; `pins` are requirements."""

    engine: str
    version: str
    root: str
    folder: str
    pins: dict[str, str | None]
    extension_modules: tuple[str, ...]
    gpu: simulate.GPU
    layers: bool
    runs: tuple[Run, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One model directory (only its `config.json` and other data; no code) with the engine's flags."""

    model: str
    flags: tuple[str, ...]


@dataclass(slots=True)
class Outcome:
    """What is known of one run: final values, declared defaults, what the user's flags set, every recorded assignment
    and condition, functions that ran, kinds of layers, log lines, and the engine's refusal or our own limit. It goes to
    the parent as JSON.

    `unsettled` are fields that the engine sets once more where it was not run, with the reason.
    `owners` are the classes whose attributes the fields are: an assignment to another object's is no decision.
    """

    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)
    assignments: list[dict[str, Any]] = field(default_factory=list)
    conditions: list[dict[str, Any]] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    always_set: tuple[str, ...] = ()
    unsettled: dict[str, str] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    refusal: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    stubs: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


_USAGE = 2
"""How argparse exits when it turns a command line down."""


class MovedError(Exception):
    """This version lacks what the tracer calls: its code has moved."""


def find_attribute(module: Any, name: str) -> Any:
    """Raises MovedError naming what is not there."""
    if not hasattr(module, name):
        raise MovedError(f"this version has no {module.__name__}.{name}: its code has moved out of the tracer's sight")
    return getattr(module, name)


def import_or_moved(name: str) -> Any:
    """The module. Raises MovedError when the tree has no such module, and whatever else its import raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise MovedError(
                f"this version has no module {name}: its code has moved out of the tracer's sight"
            ) from None
        raise


class Engine:
    """One engine in this process. Subclasses name its modules and fields, import it, and resolve a configuration."""

    name: str
    shown: tuple[str, ...]
    """Fields that a trace shows whatever their value, in this order, where the tree has them."""

    hidden: frozenset[str] = frozenset()
    """Fields that name things or are drawn by chance: paths, ports, seeds."""

    parsers: tuple[str, ...] = ("add_cli_args",)
    """Functions that declare the command line."""

    always_set: tuple[str, ...] = ()
    """Fields that no finished configuration leaves unset: where one is, the code that resolves it was not reached."""

    optional_packages: frozenset[str] = frozenset()
    """Import names that the wheel brings or relies on without requiring them."""

    absent_packages: frozenset[str] = frozenset()
    kernel_packages: tuple[str, ...] = ("humming",)
    """Packages of the environment that decide with the engine and import kernels that are not there."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.recorder = Recorder(request.root)
        self._layers_failed: Exception | None = None
        versions = {**dict.fromkeys(self.optional_packages), **import_names(request.pins)}
        self.stubs = Stubs(
            request.root,
            versions,
            self._asked,
            absent=self.absent_packages,
            importers=self.kernel_packages,
            presets=presets_for(request.gpu),
        )

    @classmethod
    def rewrites(cls, module: str, layers: bool) -> bool:
        """Whether a module decides something; with `layers`, also of what constructors of layers choose."""
        raise NotImplementedError

    @classmethod
    def rules(cls, root: str) -> Rules:
        """The fields of the tree at `root`, and how its code gives them values."""
        raise NotImplementedError

    @classmethod
    def attributes_of(cls, field: str) -> frozenset[str]:
        """The names under which the engine's code sets a shown field."""
        return frozenset({field})

    def load(self) -> None:
        """Import what resolves a configuration. Raises what the engine raises."""
        raise NotImplementedError

    def load_layers(self) -> None:
        """Import what builds the models of the request. Raises what the engine raises."""
        raise NotImplementedError

    def resolve(self, run: Run, outcome: Outcome) -> Any:
        """The engine's configuration for one run; fills values, defaults and given flags of `outcome`."""
        raise NotImplementedError

    def build_layers(self, configuration: Any, outcome: Outcome) -> None:
        """Build the engine's model class without memory, and fill the layers of `outcome`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Simulate the machine, stub packages, rewrite decision modules, and import the engine."""
        layers = self.request.layers
        # Read before files that only RECORD names seem to be there.
        rules = self.rules(self.request.root)
        sys.path.insert(0, self.request.root)
        wheel.install(self.request.root)
        simulate.install(self.request.gpu, lambda name: make_stub(name, self.stubs))
        configs.install(lambda name: make_stub(name, self.stubs))
        self.stubs.install()
        for module in self.request.extension_modules:
            self.stubs.module(module)
        instrument.install(self.recorder, lambda module: self.rewrites(module, layers), rules)
        self.load()
        if layers:
            try:
                self.load_layers()
            except Exception as error:  # noqa: BLE001 - the configuration can be traced all the same
                self._layers_failed = error

    def run(self, run: Run) -> Outcome:
        """Never raises for what the engine does: a refusal or a limit of ours is part of the outcome."""
        outcome = Outcome()
        handler = LogLines(self.request.root)
        handler.attach(self.name)
        self.recorder.start()
        started = time.perf_counter()
        printed, configured = io.StringIO(), sys.maxsize
        try:
            with contextlib.redirect_stderr(printed):
                configuration = self._resolve(run, outcome)
            outcome.seconds["configuration"] = time.perf_counter() - started
            configured = len(self.recorder.assignments)
            if self._layers_failed is not None:
                raise self._layers_failed
            if self.request.layers:
                started = time.perf_counter()
                self.build_layers(configuration, outcome)
                outcome.seconds["layers"] = time.perf_counter() - started
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever foreign code raises is the answer
            outcome.refusal = self.refusal(error, printed.getvalue())
        self.recorder.on = False
        for one in self.recorder.assignments[configured:]:
            one["level"] = "layers"
        outcome.assignments = [one for one in self.recorder.assignments if not self._parses(one)]
        outcome.conditions = self.recorder.conditions()
        outcome.entered = sorted(self.recorder.entered)
        outcome.always_set = self.always_set
        outcome.log = handler.lines
        outcome.stubs = sorted(self.stubs.packages)
        return outcome

    def _resolve(self, run: Run, outcome: Outcome) -> Any:
        try:
            return self.resolve(run, outcome)
        except Exception as error:
            if configs.UNKNOWN_TYPE not in str(error):
                raise
            # Once more, with a class for the type that its checkpoint would bring as code.
            outcome.notes += configs.add_unknown_types(configs.read_config(run.model))
            self.recorder.start()
            return self.resolve(run, outcome)

    def _parses(self, assignment: dict[str, Any]) -> bool:
        """Whether a recorded value is only part of how the command line is read."""
        places = (assignment["site"], *assignment["stack"])
        return any(place["function"].rpartition(".")[2] in self.parsers for place in places)

    def refusal(self, error: BaseException, printed: str = "") -> dict[str, Any]:
        """The engine's own reason, when a line of its files raised it; a limit of ours otherwise.

        A parser that turns a flag down says why on stderr, which `printed` is, before it exits.
        """
        error = _innermost(error)
        if isinstance(error, MovedError):
            return {"message": str(error), "site": None, "ours": True}
        frames = traceback.extract_tb(error.__traceback__)
        engine_frames = [one for one in frames if one.filename.startswith(self.request.root)]
        site, ours = None, True
        if engine_frames:
            frame = engine_frames[-1]
            line = frame.lineno or 0
            site = {"file": self.recorder.relative(frame.filename), "line": line, "source": (frame.line or "").strip()}
            site["function"] = frame.name
            ours = frame is not frames[-1] or not _raises(frame.filename, line)
        if isinstance(error, SystemExit) and error.code == _USAGE and printed.strip():
            return {"message": printed.strip().splitlines()[-1], "site": site, "ours": False}
        message = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {' '.join(message)}" if message else type(error).__name__
        return {"message": text[:2000], "site": site, "ours": ours}

    def _asked(self, package: str, frame: FrameType | None) -> None:
        self.recorder.stubs.append(package)
        if frame is not None and frame.f_code.co_name != "<module>":
            self.recorder.stubbed_functions.setdefault(frame.f_code.co_name, set()).add(package)


def declared_fields(root: str, files: tuple[str, ...], within: Container[str] | None = None) -> set[str]:
    """Names annotated in the classes of these files (globs below `root`); with `within`, of those classes only."""
    names: set[str] = set()
    for pattern in files:
        for path in sorted(Path(root).glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and (within is None or node.name in within):
                    named = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                    names |= {one.id for one in named if isinstance(one, ast.Name)}
    return names


def values_of(fields: tuple[str, ...], record: Any) -> dict[str, Any]:
    """The fields that a dictionary or an object has, as plain values."""
    values = record if isinstance(record, dict) else vars(record)
    return {name: plain(values[name]) for name in fields if name in values}


def _innermost(error: BaseException) -> BaseException:
    """The error that a validator of pydantic wrapped, if it did."""
    errors = getattr(error, "errors", None)
    if callable(errors) and type(error).__name__ == "ValidationError":
        for one in errors():
            inner = (one.get("ctx") or {}).get("error")
            if isinstance(inner, BaseException):
                return inner
    return error


def _raises(file: str, line: int) -> bool:
    """Whether the statement at this line is a `raise` or an `assert`."""
    statements = (ast.Raise, ast.Assert)
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = (one for one in ast.walk(tree) if isinstance(one, statements))
    return any(one.lineno <= line <= (one.end_lineno or one.lineno) for one in found)
