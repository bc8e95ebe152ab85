"""What a wheel requires, as pip on Linux x86-64 reads it. Used by `sources` and `environment`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Parsed
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

MARKERS = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
    "python_full_version": ".".join(map(str, sys.version_info[:3])),
    "extra": "",
}
"""Where the engine is taken to run: on Linux x86-64, with the running Python, without its extras."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package and the versions that are allowed: `name` is normalised, `specifier` as in `>=1.2,<2`, or empty."""

    name: str
    specifier: str = ""

    @property
    def pin(self) -> str | None:
        """The version asked for exactly, else the least."""
        for symbol in ("==", "~=", ">="):
            if found := re.search(rf"(?<!=){symbol}\s*(\d[^,\s*]*)", self.specifier):
                return found[1].rstrip(".")
        return None

    def allows(self, version: str) -> bool:
        """Does `version`, which may be a candidate, meet every clause? A specifier that can't be read is not met."""
        try:
            return SpecifierSet(self.specifier).contains(version, prereleases=True)
        except (InvalidSpecifier, InvalidVersion):
            return False

    def __str__(self) -> str:
        return self.name + self.specifier


def parse_requirement(text: str) -> Requirement | None:
    """A `Requires-Dist` line without its extras; None where its marker does not hold, it names an address, or it
    can't be read."""
    try:
        parsed = Parsed(text)
    except InvalidRequirement:
        return None
    if parsed.url is not None or not (parsed.marker is None or _holds(parsed.marker)):
        return None
    return Requirement(canonicalize_name(parsed.name), str(parsed.specifier))


def _holds(marker: Marker) -> bool:
    try:
        return marker.evaluate(MARKERS)
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName):
        # A requirement too many costs an installation, one too few an answer.
        return True


def version_key(version: str) -> tuple[bool, Version]:
    """Orders versions as PEP 440 does; what is no version comes first."""
    try:
        return True, Version(version)
    except InvalidVersion:
        return False, Version("0")
