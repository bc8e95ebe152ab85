"""What the command line decides for the processes that it starts, and what it leaves to the user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pellucid.utils.process import SPINS, spin_briefly


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_has_chosen_stays(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    spin_briefly()
    assert {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} == {
        "OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None, **chosen,
    }  # fmt: skip


def test_the_command_line_sets_it_before_torch_is_there() -> None:
    code = (
        "import os, sys\n"
        "from pellucid.cli.main import main\n"
        "try:\n    main(['--version'])\n"
        "except SystemExit:\n    print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{SPINS} False"
