"""What a record tells of the command that made it."""

from __future__ import annotations

import pytest

from pellucid.utils.command import shown_command


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/pellucid", "serve", "/models/x/config.json"], "pellucid serve config.json"),
        (["pellucid", "serve", "m", "--api-key", "sk-1", "--port", "80"], "pellucid serve m --api-key *** --port 80"),
        (["pellucid", "serve", "m", "--api-key=sk/1"], "pellucid serve m --api-key=***"),
        (["pellucid", "--hf-token", "t", "--api-key", "a", "--api-key", "b"],
         "pellucid --hf-token *** --api-key *** --api-key ***"),
        (["pellucid", "--api-key", "--port", "80"], "pellucid --api-key --port 80"),
        (["pellucid", "bench", "--input-tokens", "512"], "pellucid bench --input-tokens 512"),
    ],
)  # fmt: skip
def test_folders_are_left_out_and_secrets_hidden(argv: list[str], shown: str) -> None:
    assert shown_command(argv) == shown


def test_the_evidence_and_results_never_hold_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from pellucid.bench.provenance import provenance
    from pellucid.tuning.store import Provenance

    monkeypatch.setattr("sys.argv", ["pellucid", "serve", "m", "--api-key", "sk-secret"])
    assert "sk-secret" not in Provenance.now({}, {}).command + provenance("pellucid.cli")["command"]
