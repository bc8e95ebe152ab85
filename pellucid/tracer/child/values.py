"""Values of the engine as text and as JSON, without running code of theirs. Used in the child by all that records."""

from __future__ import annotations

import linecache
from enum import Enum
from typing import Any

_LONGEST = 160


def brief(value: Any) -> str:
    """One short line for a value; objects are shown by their type, so that no code of theirs runs."""
    if value is None or isinstance(value, bool | int | float):
        text = repr(value)
    elif isinstance(value, str):
        text = repr(str(value)) if not isinstance(value, Enum) else f"{type(value).__name__}.{value.name}"
    elif isinstance(value, Enum):
        text = f"{type(value).__name__}.{value.name}"
    elif isinstance(value, list | tuple | set | frozenset):
        few = ", ".join(brief(one) for one in list(value)[:8]) + (", ..." if len(value) > 8 else "")
        text = f"({few})" if isinstance(value, tuple) else f"[{few}]" if isinstance(value, list) else f"{{{few}}}"
    elif isinstance(value, dict):
        few = ", ".join(f"{brief(key)}: {brief(one)}" for key, one in list(value.items())[:6])
        text = f"{{{few}}}" if len(value) <= 6 else f"{{{few}, ...}}"
    elif isinstance(value, type):
        text = value.__qualname__
    elif type(value).__module__ == "torch":
        text = str(value)
    else:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def plain(value: Any, depth: int = 4) -> Any:
    """The value as JSON can hold it: enums and dtypes by name, records as dictionaries, other objects by type."""
    if isinstance(value, Enum) and not isinstance(value, str):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if depth == 0:
        return brief(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one, depth - 1) for key, one in value.items()}
    names = getattr(type(value), "__dataclass_fields__", None) or getattr(type(value), "__struct_fields__", None)
    if names:
        return {name: plain(getattr(value, name, None), depth - 1) for name in names}
    return brief(value)


def holds(unpacked: Any, value: Any) -> bool:
    return isinstance(unpacked, tuple) and any(one is value for one in unpacked)


def stub_in(value: Any) -> tuple[str, ...]:
    """The package of a value that is a stub itself."""
    name = vars(value if isinstance(value, type) else type(value)).get("_stub_name")
    return (str(name).partition(".")[0],) if name else ()


def truth_of(value: Any) -> bool | None:
    # Not `hasattr`: a stub has every attribute. The truth of an array is not asked, it may have none.
    if any("shape" in vars(one) for one in type(value).__mro__):
        return None
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def type_name(owner: Any, attributes: tuple[str, ...] | None) -> str | None:
    """The class of the object whose attribute is set: `owner.a.b.field` has `attributes` ("a", "b")."""
    if attributes is None:
        return None
    for name in attributes:
        owner = getattr(owner, name, None)
    return type(owner).__name__


def source_line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()
