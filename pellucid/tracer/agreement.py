"""How far traces agree with decisions that were obtained by hand: `python -m pellucid.tracer.agreement FILE CONFIGS`.

FILE holds rows (engine, version, model, gpu, tp, decisions, lines, error, layer_error); CONFIGS has a folder for each
model. Every difference is listed with its reason where one is known.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pellucid.tracer import sources
from pellucid.tracer.gpus import simulated_gpu
from pellucid.tracer.record import Decision, Site, Trace
from pellucid.tracer.run import Depth, TraceRequest, trace_many

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A value or a line that is not the expected one; `reason` where it is understood, else empty."""

    row: str
    what: str
    expected: Any
    found: Any
    reason: str = ""

    def __str__(self) -> str:
        reason = f"  [{self.reason}]" if self.reason else ""
        return f"{self.row}: {self.what}: expected {self.expected!r}, found {self.found!r}{reason}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Counts over the rows of one engine version."""

    version: str
    rows: int
    values: int
    lines: int
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        wrong = Counter(
            "line" if one.what.startswith("line of") else "value" for one in self.differences if not one.reason
        )
        explained = sum(bool(one.reason) for one in self.differences)
        return (
            f"{self.version}: {self.rows} rows; values {self.values - wrong['value']}/{self.values}, "
            f"lines {self.lines - wrong['line']}/{self.lines}; {explained} differences with a known reason"
        )


def compare(rows: Iterable[Row], configs: Path, depth: Depth, progress: Callable[[str], None]) -> Iterator[Agreement]:
    """One agreement for each engine version, after tracing all its rows. Raises PellucidError without its tree."""
    by_version: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_version[row["engine"], row["version"]].append(row)
    for (engine, version), some in by_version.items():
        tree = sources.find(sources.check_engine(engine), version, progress=progress)
        requests = [
            TraceRequest(tree, configs / row["model"], simulated_gpu(row["gpu"], row["tp"]), depth=depth)
            for row in some
        ]
        traces = trace_many(requests, progress)
        counts = Counter[str]()
        differences = []
        for row, trace in zip(some, traces, strict=True):
            for kind, difference in compare_row(row, trace, tree.root, depth):
                counts[kind] += 1
                differences += [difference] if difference else []
        yield Agreement(f"{engine} {version}", len(some), counts["value"], counts["line"], tuple(differences))


def compare_row(row: Row, trace: Trace, root: Path, depth: Depth) -> Iterator[tuple[str, Difference | None]]:
    """Each expected value and line, with the difference if there is one."""
    label = f"{row['engine']} {row['version']} {row['model']} {row['gpu']}"
    if row.get("error") or not row["decisions"]:
        agrees = trace.refusal is not None and not _finished(trace)
        said = trace.refusal.message if trace.refusal else "no refusal"
        yield "value", None if agrees else Difference(label, "refusal", row.get("error"), said)
        return
    found = found_values(trace)
    for name, expected in row["decisions"].items():
        if name in _LAYERS and depth != "layers":
            continue
        value = found.get(name)
        agrees = _same(name, value, expected)
        yield "value", None if agrees else Difference(label, name, expected, value, _why_value(row, trace, name))
    for field, place in row["lines"].items():
        if isinstance(place, str) and re.fullmatch(r"\S+:\d+", place) and field not in _LAYERS:
            yield "line", _line_difference(label, trace, field, place, root)
        elif isinstance(place, str) and depth == "layers":
            # Rows have the lines that logged what a layer chose.
            logged = {str(line.site) for line in trace.log}
            yield "line", None if place in logged else Difference(label, f"line of {field}", place, None)


_LAYERS = ("moe_layer", "attention", "attention_candidates", "mla_prefill", "linear", "moe")


def _finished(trace: Trace) -> bool:
    return any(one.how != "unknown" for one in trace.decisions)


def found_values(trace: Trace) -> dict[str, Any]:
    """The trace's values under the names of the rows."""
    values: dict[str, Any] = {one.field: one.value for one in trace.decisions}
    found: dict[str, Any] = dict(values)
    attention = values.get("attention_backend")
    found["attention_prefill"] = values.get("prefill_attention_backend") or attention
    found["attention_decode"] = values.get("decode_attention_backend") or attention
    found["moe_runner_config"] = values.get("moe_runner_backend")
    found["flashinfer_allreduce_fusion"] = values.get(
        "flashinfer_allreduce_fusion_backend", values.get("enable_flashinfer_allreduce_fusion")
    )
    graphs = values.get("cuda_graph_config")
    if isinstance(graphs, Mapping):
        found["cuda_graph_decode_max_bs"] = graphs["decode"]["max_bs"]
        found["cuda_graph_decode_n"] = len(graphs["decode"]["bs"] or [])
        found["cuda_graph_prefill"] = {name: graphs["prefill"][name] for name in ("backend", "max_bs")}
    else:
        found["cuda_graph_decode_max_bs"] = values.get("cuda_graph_max_bs")
        found["cuda_graph_decode_n"] = len(values.get("cuda_graph_bs") or [])
    found.update(_layer_values(trace))
    if trace.engine == "vllm":
        found["n_capture"] = len(values.get("cudagraph_capture_sizes") or [])
        found["prefix_caching"] = values.get("enable_prefix_caching")
        found["all2all"] = values.get("all2all_backend")
    return found


def _layer_values(trace: Trace) -> dict[str, Any]:
    """What the rows say of layers: of the first expert layer, of all linear ones, and in the engine's log."""

    def first(name: str) -> Any:
        value = next((one.value for one in trace.decisions if one.field == name), "None")
        return value[0] if isinstance(value, list) else value

    found: dict[str, Any] = {}
    if trace.engine == "sglang":
        scheme = first("moe_layer_scheme")
        found["moe_layer"] = {
            "method": first("moe_layer_method"),
            "scheme": "NoneType" if scheme == "None" else scheme,
            "runner": first("moe_layer_runner"),
        }
        return found
    found["moe_layer"] = {"method": first("moe_layer_method"), "backend": first("moe_layer_backend")}
    attention = next((one.value for one in trace.decisions if one.field == "attention_layer_backend"), None)
    found["attention"] = attention if isinstance(attention, list) else [attention]
    parts = (f"linear_layer_{part}" for part in ("method", "scheme", "kernel"))
    chosen = [one.value for part in parts for one in trace.decisions if one.field == part]
    flat = {text for value in chosen for text in (value if isinstance(value, list) else [value])}
    found["linear"] = sorted(text for text in flat if "Unquant" not in text)
    for line in trace.log:
        if said := re.fullmatch(r"Using (\S+) attention backend out of potential backends: (.*?)\.?", line.text):
            found["attention_candidates"] = said[2]
            if attention is None:
                # A model that was refused further on has no layers to ask.
                found["attention"] = [said[1]]
        if "MLA prefill backend" in line.text or "prefill for MLA" in line.text:
            found.setdefault("mla_prefill", line.text)
    return found


def _same(name: str, found: Any, expected: Any) -> bool:
    if name == "linear" and isinstance(found, list):
        # A row joins method, scheme and kernel of each linear layer.
        return set(found) == {part for one in expected for part in one.split(":")}
    if isinstance(expected, float) and isinstance(found, float):
        return abs(found - expected) < 1e-9
    return bool(found == expected)


def _line_difference(label: str, trace: Trace, field: str, place: str, root: Path) -> Difference | None:
    decision = next((one for one in trace.decisions if one.field == field), None)
    sites = [] if decision is None else [site for one in decision.history for site in (one.site, *one.stack)]
    if any(str(site) == place for site in sites):
        return None
    found = str(decision.site) if decision is not None else None
    return Difference(label, f"line of {field}", place, found, _why_line(place, root, field))


def _why_value(row: Row, trace: Trace, name: str) -> str:
    if name in _LAYERS and row.get("layer_error"):
        return f"the expectation stopped at: {row['layer_error'][:80]}"
    decision = next((one for one in trace.decisions if one.field == name), None)
    earlier = () if decision is None else tuple(one.value for one in decision.history)
    if name == "block_size" and decision is not None and row["decisions"][name] in earlier:
        if decision.how == "unknown":
            return "the expectation is the value before layers were built; the engine sets it once more"
        if any("block_size" in site.function for site in _sites_of(decision)):
            return "the expectation is the value before layers were built; the backends of the layers need another"
    return ""


def _sites_of(decision: Decision) -> list[Site]:
    return [site for one in decision.history[-1:] for site in (one.site, *one.stack)]


def _why_line(place: str, root: Path, field: str) -> str:
    """The expected line reads the field into a local variable: it gives the configuration nothing."""
    file, _, line = place.rpartition(":")
    for node in _statements(root / file):
        if node.lineno <= int(line) <= (node.end_lineno or node.lineno):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id == field:
                return "that line only reads the field into a variable"
    return ""


@cache
def _statements(path: Path) -> tuple[ast.stmt, ...]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body"))


def main() -> None:
    """The command: prints each version's figures, then its differences."""
    import click

    @click.command(help=__doc__)
    @click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
    @click.argument("configs", type=click.Path(exists=True, file_okay=False, path_type=Path))
    @click.option("--engine", help="Only this engine version, such as sglang==0.5.9.")
    @click.option("--gpu", help="Only rows of this GPU.")
    @click.option("--model", help="Only rows of this model.")
    @click.option("--depth", type=click.Choice(["configuration", "layers"]), default="layers")
    def command(
        file: Path, configs: Path, engine: str | None, gpu: str | None, model: str | None, depth: Depth
    ) -> None:
        rows = [
            row
            for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
            if engine in (None, f"{row['engine']}=={row['version']}")
            and gpu in (None, row["gpu"])
            and model in (None, row["model"])
        ]
        for agreement in compare(rows, configs, depth, lambda line: click.echo(line, err=True)):
            click.echo(str(agreement))
            for difference in agreement.differences:
                click.echo(f"  {difference}")

    command()


if __name__ == "__main__":
    main()
