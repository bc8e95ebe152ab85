"""What kind of thing an operand of a condition looks at, and whether a stub answered in it. Used by `tracer.run`.

An operand is read by the identifiers and strings in its text, by what the functions that it calls read in turn, and by
the decisions made before it: a field that was decided by a name carries that on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pellucid.tracer.record import Assignment, Evidence, Guard, Site, Term

ORDER: tuple[Evidence, ...] = ("name", "trait", "hardware", "package", "environment", "flag", "stub", "other")

_ARCHITECTURE = re.compile(r"[A-Z]\w*(For[A-Z]\w+|Model|LMHeadModel)")
_NAMES = re.compile(r"(hf_)?(model_)?arch(itecture)?s?|model_type|model_arch_name|model_name|is_\w+_arch")
_HARDWARE = frozenset(
    {
        "cuda", "hip", "rocm", "npu", "xpu", "musa", "hpu", "mps", "cpu", "tpu", "gpu", "gpus", "hopper", "blackwell",
        "ampere", "capability", "major", "minor", "device", "nvlink", "h20", "platform", "sm", "multiprocessor",
    }
)  # fmt: skip
"""Parts of identifiers: whole ones, since `input` has `npu` in it and `output` has `tpu`."""

_SM = re.compile(r"sm\d+|gfx\d+")
_PACKAGE = re.compile(
    r"find_spec|is_\w+_available|has_flashinfer\w*|__version__|\w*_version|importlib|_?is_\w+_installed"
)
_ENVIRONMENT = re.compile(r"environ|getenv|envs|get_bool_env_var|get_int_env_var|get_env\w*|(VLLM|SGLANG)_\w+")
_TRAIT = re.compile(
    r"\w*hf_\w*config\w*|\w*model_config\w*|text_config|quant(ization)?_c\w*fi?g\w*|AttentionArch|cfg_list"
)


@dataclass(slots=True)
class Evidencing:
    """Reads the raw assignments of one run in their order. `fields` are the fields of the engine's configuration,
    `config_keys` every key of the model's config."""

    fields: frozenset[str]
    config_keys: frozenset[str]
    decided: dict[str, Evidence] = field(default_factory=dict)
    stubs: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def assignment(self, raw: Mapping[str, Any], decides: bool) -> Assignment:
        """One recorded assignment; one that `decides` a field is kept for the operands that read the field later."""
        guards = tuple(self._guard(one) for one in raw["guards"])
        made = Assignment(raw["value"], _site(raw["site"]), guards, tuple(_site(one) for one in raw["stack"]))
        if decides:
            kinds = evidence_of(made)
            self.decided[raw["field"]] = kinds[0] if kinds else "flag"
            self.stubs[raw["field"]] = self.tainting(raw)
        return made

    def tainting(self, raw: Mapping[str, Any]) -> tuple[str, ...]:
        """The stubbed packages that answered in the value, in an operand on the way, or in a decision that it reads."""
        found = set(raw["stubs"])
        for guard in raw["guards"]:
            for term in guard["terms"]:
                found |= set(term["stubs"])
                if term["truth"] is not None:
                    found.update(*(self.stubs.get(name, ()) for name in term["names"]))
        return tuple(sorted(found))

    def _guard(self, raw: Mapping[str, Any]) -> Guard:
        return Guard(_site(raw["site"]), raw["taken"], tuple(self.term(one) for one in raw["terms"]))

    def term(self, raw: Mapping[str, Any]) -> Term:
        return Term(raw["expression"], raw["value"], raw["truth"], self.classify(raw))

    def classify(self, term: Mapping[str, Any]) -> Evidence:
        if term["stubs"]:
            return "stub"
        found = self._by_words([*term["names"], *term["strings"]])
        if found in (None, "trait") and term.get("through"):
            # A property of the model config may rest on a name; a function without a telling name on anything.
            through = self._by_words(term["through"])
            if found is None or through == "name":
                found = through
        return found or "other"

    def _by_words(self, words: Sequence[str]) -> Evidence | None:
        for kind, pattern in (("name", _ARCHITECTURE), ("name", _NAMES), ("environment", _ENVIRONMENT)):
            if any(pattern.fullmatch(word) for word in words):
                return kind  # type: ignore[return-value]
        earlier = [self.decided[word] for word in words if word in self.decided]
        if earlier:
            return min(earlier, key=ORDER.index)
        if any(word in self.fields for word in words):
            return "flag"
        if any(_PACKAGE.fullmatch(word) for word in words):
            return "package"
        if any(_is_hardware(word) for word in words):
            return "hardware"
        if any(_TRAIT.fullmatch(word) for word in words):
            return "trait"
        return "trait" if any(word in self.config_keys for word in words) else None


def _is_hardware(word: str) -> bool:
    parts = word.lower().split("_")
    return any(part in _HARDWARE or _SM.fullmatch(part) for part in parts)


def evidence_of(assignment: Assignment) -> tuple[Evidence, ...]:
    """The kinds of the operands that were evaluated on the way to a line, without those that tell nothing."""
    found = {term.evidence for guard in assignment.guards for term in guard.terms if term.truth is not None}
    return tuple(kind for kind in ORDER if kind in found and kind != "other")


def config_keys(config: Any) -> frozenset[str]:
    """Every key at any depth."""
    if isinstance(config, Mapping):
        return frozenset(config).union(*(config_keys(one) for one in config.values()))
    if isinstance(config, Iterable) and not isinstance(config, str | bytes):
        return frozenset().union(*(config_keys(one) for one in config))
    return frozenset()


def _site(raw: Mapping[str, Any]) -> Site:
    return Site(raw["file"], raw["line"], raw["source"], raw.get("function", ""))
