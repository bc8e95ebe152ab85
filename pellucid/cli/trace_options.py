"""Options of the verbs of `pellucid trace`, and the traces that they ask for. Used by `trace` and `trace_many`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pellucid.core import PellucidError

if TYPE_CHECKING:
    from pellucid.tracer.pip import Progress
    from pellucid.tracer.record import Trace
    from pellucid.tracer.run import TraceRequest
    from pellucid.tracer.sources import SourceTree

Command = Callable[..., Any]
Depth = Literal["static", "configuration", "layers"]

_PARALLEL_FLAGS = ("--tp-size", "--tp", "--tensor-parallel-size", "-tp")

ENGINE = "sglang or vllm, with a version as in sglang==0.5.9, or a folder as in sglang@SITE_PACKAGES."
EPILOG = f"ENGINE is {ENGINE}"
MODEL_HELP = "Folder with a config.json, or a hub name."
GPU_HELP = "Machine: h200x8, sm120x8-pcie, h200x8,cuda=12.8, or a JSON file."


def complete_gpu(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from pellucid.tracer.gpus import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


engine_argument = click.argument("engine", metavar="ENGINE")
model_option = click.option("--model", required=True, metavar="FOLDER", help=MODEL_HELP)
gpu_option = click.option(
    "--gpu", default="this", show_default=True, metavar="NAME", help=GPU_HELP, shell_complete=complete_gpu
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _variables(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.BadParameter(f"{name!r}: give NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _engine_flags(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    if values and not values[0].startswith("-"):
        raise click.BadParameter(f"{values[0]!r} is no flag; the engine's own flags go behind `--`")
    return values


_SHARED = (
    click.option("--tp", type=click.IntRange(1), help="GPUs that share each layer; all of the machine's by default."),
    click.option(
        "--level",
        "depth",
        type=click.Choice(("static", "configuration", "layers")),
        default="layers",
        show_default=True,
        help="How deep: read the source only, run its argument resolution, or build the model's layers too.",
    ),
    click.option(
        "--env", multiple=True, callback=_variables, metavar="NAME=VALUE", help="Variable that the engine sees."
    ),
    click.argument("flags", nargs=-1, type=click.UNPROCESSED, callback=_engine_flags, metavar="[-- ENGINE FLAGS]"),
)


def shared_options(command: Command) -> Command:
    """--tp, --level, --env, and the engine's own flags behind `--`; they arrive as the fields of `Asked`."""
    return reduce(lambda decorated, option: option(decorated), reversed(_SHARED), command)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the shared options say. `flags` go to the engine as they are."""

    tp: int | None = None
    depth: Depth = "layers"
    env: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    def request(
        self, engine: str, model: str | Path, gpu: str, progress: Progress, architecture: str | None = None
    ) -> TraceRequest:
        """Raises PellucidError for an unknown GPU, a model that is not there, or an engine that can't be had."""
        from pellucid.tracer.gpus import simulated_gpu
        from pellucid.tracer.run import TraceRequest

        # A mistake in these is told before anything is downloaded.
        machine, folder = simulated_gpu(gpu, self.tp or _gpus_of(self.flags)), model_folder(str(model))
        return TraceRequest(
            tree=tree_of(engine, progress),
            model=folder,
            gpu=machine,
            flags=self.flags,
            tensor_parallel=self.tp,
            architecture=architecture,
            depth=self.depth,
            environment=self.env,
        )


def _gpus_of(flags: Sequence[str]) -> int | None:
    """GPUs that an engine's flags ask of the one machine; None where they do not say."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    number = next((after for word, after in pairwise(words) if word.replace("_", "-") in _PARALLEL_FLAGS), "")
    return int(number) if number.isdecimal() and int(number) > 0 and "--nnodes" not in words else None


def tree_of(engine: str, progress: Progress) -> SourceTree:
    """The tree of `sglang`, `sglang==0.5.9` or `sglang@FOLDER`. Raises PellucidError where there is none."""
    from pellucid.tracer.sources import check_engine, find

    name, at, folder = engine.partition("@")
    name, _, version = name.partition("==")
    return find(check_engine(name.strip()), version.strip() or None, Path(folder.strip()) if at else None, progress)


def traced(requests: Sequence[TraceRequest], progress: Progress) -> tuple[Trace, ...]:
    from pellucid.tracer.run import trace_many

    return trace_many(requests, progress)


@contextmanager
def status() -> Iterator[Progress]:
    """A status line on stderr while something long goes on."""
    from pellucid.utils.progress import StatusLine

    line = StatusLine("trace")
    try:
        yield line.update
    finally:
        line.close()


def show(text: str) -> None:
    """Print text that quotes an engine or a model: what a terminal would obey is shown instead."""
    click.echo("".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text))


def model_folder(name: str) -> Path:
    """The folder of a model, or of one that the hub has; its `config.json` has been read, and is one.

    Raises:
        PellucidError: there is none.
    """
    from pellucid.cli.targets import local_path
    from pellucid.models.hub import DEMO_MLA, HUB_NAME
    from pellucid.tracer.sandbox import read_config

    path = Path(name).expanduser()
    if not path.exists():
        if name != DEMO_MLA and (name.startswith(".") or not HUB_NAME.fullmatch(name)):
            raise PellucidError(f"no such model: {name}; give a folder with a config.json, or a hub name")
        path = local_path(name)
    folder = path.parent if path.name == "config.json" else path
    read_config(folder)
    return folder


def model_folders(names: Sequence[str]) -> tuple[Path, ...]:
    """Folders of models; a folder of such folders stands for all of them, in the order of their names.

    Raises:
        PellucidError: one has no config.json, nor have its folders.
    """
    found: dict[Path, None] = {}
    for name in names:
        folder = Path(name)
        inside = [folder] if (folder / "config.json").is_file() else []
        inside = inside or sorted(path.parent for path in folder.glob("*/config.json"))
        if not inside:
            raise PellucidError(f"{name}: no config.json in it, nor in a folder of it; give folders of models")
        found |= dict.fromkeys(inside)
    return tuple(found)
