"""The evidence store: what was measured here, a JSONL file per machine. Read and appended to by `tuning.session`.

A line is one question with the figures of all its candidates, from one run: cards of one type differ by more than
candidates do, so figures of two runs are never compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.hardware.facts import Hardware
from pellucid.selection.evidence import Measurement, is_tile_op
from pellucid.tuning.measure import Question
from pellucid.utils.cache import cache_dir
from pellucid.utils.command import shown_command

VERSION = 1

APART = "apart."
"""Prefix of the op of a projection that is timed alone."""

SOURCES = (
    *("kernels", "attention", "moe", "quantization", "layers", "models/decoder.py", "models/fused_decoder.py"),
    *("runner/forward_batch.py", "runner/prompt_graphs.py", "tuning"),
)
"""What can change a figure: the kernels, what calls them, and how they are timed."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What figures are valid for. Where `hard` (device, kernels) differs they say nothing, where `soft` (versions) does
    they are stale."""

    hard: Mapping[str, Any]
    soft: Mapping[str, str]

    @classmethod
    def of(cls, hardware: Hardware, device: str) -> Fingerprint:
        """Of this machine's first device of the kind; a question adds its traits and candidates."""
        if device == "cuda" and hardware.gpus:
            gpu = hardware.gpus[0]
            machine: dict[str, Any] = {
                "gpu": gpu.name, "sm": gpu.sm, "sm_count": gpu.sm_count, "memory": gpu.memory_bytes,
            }  # fmt: skip
        else:
            cpu = hardware.cpu
            machine = {"cpu": cpu.name, "cores": cpu.cores, "isa": list(cpu.isa)}
        soft = {name: version for name, version in hardware.packages.items() if name != "numpy"}
        soft["driver"] = hardware.driver or "none"
        soft["cuda"] = ".".join(map(str, hardware.cuda)) if hardware.cuda else "none"
        return cls({**machine, "sources": source_digest()}, dict(sorted(soft.items())))

    def changed(self, soft: Mapping[str, str]) -> str:
        """`torch 2.11.0 is 2.12.1 now`: how `soft`, of older figures, differs from this; empty when it does not."""
        names = sorted(soft.keys() | self.soft.keys())
        pairs = [(name, soft.get(name, "absent"), self.soft.get(name, "absent")) for name in names]
        return ", ".join(f"{name} {old} is {new} now" for name, old, new in pairs if old != new)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a line comes from: `when` in UTC, the command without folders, samples of each candidate, and their spread:
    the quartiles' distance in seconds."""

    when: str = ""
    command: str = ""
    samples: Mapping[str, int] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def now(cls, samples: Mapping[str, int], spread: Mapping[str, float]) -> Provenance:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(when, shown_command(), dict(samples), dict(spread))


@dataclass(frozen=True, slots=True)
class Record:
    """The answer to a question. `skipped` says why there is none: it counts as answered, so that two starts agree."""

    question: Question
    fingerprint: Fingerprint
    results: Mapping[str, Measurement]
    provenance: Provenance
    skipped: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "op": self.question.op,
            "bucket": self.question.bucket,
            "order": list(self.question.order),
            "traits": self.question.traits,
            "given": [list(pair) for pair in self.question.given],
            "hard": dict(self.fingerprint.hard),
            "soft": dict(self.fingerprint.soft),
            "results": {name: _figures(m) for name, m in self.results.items()},
            "skipped": self.skipped,
            "when": self.provenance.when,
            "command": self.provenance.command,
            "samples": dict(self.provenance.samples),
            "spread": dict(self.provenance.spread),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """Raises KeyError, TypeError or ValueError on anything that `to_json` did not write."""
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']}, this is {VERSION}")
        given = tuple((str(op), str(name)) for op, name in values["given"])
        question = Question(
            str(values["op"]), int(values["bucket"]), tuple(map(str, values["order"])), str(values["traits"]), given
        )
        return cls(
            question,
            Fingerprint(dict(values["hard"]), dict(values["soft"])),
            {str(name): _measurement(figures) for name, figures in values["results"].items()},
            Provenance(values["when"], values["command"], dict(values["samples"]), dict(values["spread"])),
            str(values["skipped"]),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What the store knows of a question. `stale` says which versions changed since; empty when none did."""

    record: Record
    stale: str


class EvidenceStore:
    """One file. Reading never fails: `notes` say what could not be used. The last line on a question counts."""

    def __init__(self, path: Path, fingerprint: Fingerprint) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.notes: list[str] = []
        self._records: dict[str, list[Record]] = {}
        for record in self._read():
            # Of other kernels, or of another device that has the same file: nothing will ask for it.
            if record.fingerprint.hard == fingerprint.hard:
                self._keep(record)

    @classmethod
    def of(cls, hardware: Hardware, device: str) -> EvidenceStore:
        """This machine's file in the user's cache folder."""
        fingerprint = Fingerprint.of(hardware, device)
        machine = {name: value for name, value in fingerprint.hard.items() if name != "sources"}
        label = re.sub(r"[^a-z0-9]+", "-", str(machine.get("gpu", machine.get("cpu"))).lower()).strip("-")
        return cls(cache_dir("evidence", f"{label}-{_digest(machine)}.jsonl"), fingerprint)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether nobody else measures on this machine, nor may meanwhile: two at once would time each other."""
        import fcntl

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_suffix(".lock").open("a")
        except OSError:
            # Where nothing can be kept, nobody can be told either.
            yield True
            return
        with lock:
            alone = True
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
            except OSError:
                # A folder without locks: likewise.
                pass
            yield alone

    def find(self, question: Question) -> Found | None:
        """The latest figures from such a device, kernels, traits and candidates: of the same versions if there are."""
        records = self._records.get(_key(question, self.fingerprint.hard), [])
        fresh = [r for r in records if r.fingerprint.soft == self.fingerprint.soft]
        measured = [r for r in fresh if r.results]
        if fresh:
            return Found((measured or fresh)[-1], "")
        stale = [r for r in records if r.results]
        if is_tile_op(question.op) or question.op.startswith(APART):
            # Tiles are cut to what one compiler makes of them: another may need more shared memory.
            stale = [r for r in stale if r.fingerprint.soft.get("triton") == self.fingerprint.soft.get("triton")]
        return Found(stale[-1], self.fingerprint.changed(stale[-1].fingerprint.soft)) if stale else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of these kernels on this device."""
        return not self._records

    def known_order(self, op: str, bucket: int, traits: str) -> tuple[str, ...]:
        """The candidates of the latest such question, for who can't make them up: none when there was none."""
        for records in reversed(self._records.values()):
            question = records[-1].question
            if (question.op, question.bucket, question.traits) == (op, bucket, traits):
                return question.order
        return ()

    def add(self, record: Record) -> None:
        """Keep it, and append it to the file. A file that can't be written is a note: the figures still hold now."""
        self._keep(record)
        line = json.dumps(record.to_json(), separators=(",", ":")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, line)
        except OSError as error:
            note = f"measurements can't be kept in {self.path} ({error.strerror}); set PELLUCID_CACHE to a folder"
            if note not in self.notes:
                self.notes.append(note)

    def _keep(self, record: Record) -> None:
        self._records.setdefault(_key(record.question, record.fingerprint.hard), []).append(record)

    def _read(self) -> Iterable[Record]:
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            self.notes.append(f"measurements in {self.path} can't be read: {error.strerror}")
            return
        corrupt = []
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield Record.from_json(json.loads(line))
            except (KeyError, TypeError, ValueError, AttributeError):
                corrupt.append(number)
        if corrupt:
            self.notes.append(f"{self.path}: {_lines(corrupt)} skipped: not what this version writes")


def append_line(path: Path, line: str) -> None:
    """In one write, behind what other processes append, each in its turn; a torn last line is ended first."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        # Without it, a line that another process is writing now would look torn.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (b"\n" if torn else b"") + line.encode())
    finally:
        os.close(descriptor)


def source_digest() -> str:
    """Of the files of `SOURCES`, and so of everything that is compiled on this machine."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in SOURCES:
        root = package / name
        files = [root] if root.is_file() else [p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".h")]
        for path in sorted(files):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _key(question: Question, hard: Mapping[str, Any]) -> str:
    parts = (question.op, question.bucket, question.order, question.traits, question.given, hard)
    return json.dumps(parts, sort_keys=True)


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _figures(m: Measurement) -> dict[str, Any]:
    # JSON has no infinity: a candidate that is not right has no time.
    times = {"seconds": m.seconds, "error": m.error} if math.isfinite(m.seconds) else {}
    return {**times, "right": m.right, "detail": m.detail}


def _measurement(values: Mapping[str, Any]) -> Measurement:
    right = values["right"]
    seconds, error = float(values.get("seconds", math.inf)), float(values.get("error", 0.0))
    if right is not True and right is not False:
        raise ValueError("`right` is a boolean")
    if right and not (0 < seconds < math.inf and 0 <= error < math.inf):
        raise ValueError("a right candidate has a time")
    return Measurement(seconds, error, right, str(values["detail"]))


def _lines(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{more}"
