"""API keys that change while the server runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.core import PlanError
from pellucid.server.http import keys
from pellucid.server.http.keys import KeyRing


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "CHECK_INTERVAL_S", 0.0)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the batch jobs\none\n\ntwo\n")
    ring = KeyRing(("flag",), str(file))
    assert ring.current() == (b"flag", b"one", b"two")
    file.write_text("two\nthree\nfour\n")
    assert ring.current() == (b"flag", b"two", b"three", b"four")


def test_a_file_that_is_gone_or_empty_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    ring = KeyRing((), str(file))
    file.write_text("# nothing yet\n")
    assert ring.current() == (b"one",)
    file.unlink()
    assert ring.current() == (b"one",)
    file.write_text("new one\n")
    assert ring.current() == (b"new one",)


@pytest.mark.parametrize("text", ["", "\n# one\n"])
def test_a_server_that_is_meant_to_be_locked_does_not_start_open(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(PlanError, match="holds no key"):
        KeyRing((), str(file))
    with pytest.raises(PlanError, match="can't be read"):
        KeyRing((), str(tmp_path / "none"))
