"""What reading a model turned up besides its traits: notes, conflicts and missing traits. Filled by the readers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MissingTrait:
    """Something the model needs and Pellucid has not. `shown_by` is the config key or tensor that says so."""

    trait: str
    shown_by: str

    def __str__(self) -> str:
        return f"{self.trait} ({self.shown_by})"


@dataclass(slots=True)
class Findings:
    """Collects, in reading order and without repetition, what the report will show.

    A note is neutral. A conflict is a place where two sources disagree, with the one that was followed.
    """

    notes: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    missing: list[MissingTrait] = field(default_factory=list)

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def conflict(self, line: str) -> None:
        if line not in self.conflicts:
            self.conflicts.append(line)

    def miss(self, trait: str, shown_by: str) -> None:
        """Add a missing trait; the first sign of each trait is kept."""
        if all(known.trait != trait for known in self.missing):
            self.missing.append(MissingTrait(trait, shown_by))
