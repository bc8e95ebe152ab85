"""Environments of the child: linked from the running Python where its versions fit, else installed by pip."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from pellucid.tracer import environment
from pellucid.tracer.environment import environment_for
from pellucid.tracer.sources import SourceTree, installed
from tests.tracer.fake_engine import write_fake_engine

PROBE = """
import json, sys
from importlib.metadata import distributions
from importlib.util import find_spec
names = ("torch", "transformers", "numpy", "triton", "pip", "pytest", "hypothesis")
print(json.dumps([name for name in names if find_spec(name)]))
print(sys.prefix)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_tree(folder: Path, *requires: str) -> SourceTree:
    return installed("sglang", write_fake_engine(folder / "site-packages", requires=requires or None))


def test_versions_that_are_here_are_linked_and_nothing_else_is_seen(tmp_path: Path, cache: Path) -> None:
    found = environment_for(write_tree(tmp_path))
    probe = subprocess.run([found.python, "-I", "-c", PROBE], capture_output=True, text=True, check=True)
    names, prefix = probe.stdout.splitlines()
    assert json.loads(names) == ["torch", "transformers", "numpy"]
    assert Path(prefix).is_relative_to(cache)
    assert found.packages["transformers"] == importlib.metadata.version("transformers")
    assert found.packages["torch"] == importlib.metadata.version("torch")
    assert not {"triton", "pip", "pytest"} & set(found.packages)


def test_one_environment_serves_every_tree_of_its_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = environment_for(write_tree(tmp_path / "a"))
    monkeypatch.setattr(environment, "_build", lambda *_: pytest.fail("built again"))
    assert environment_for(write_tree(tmp_path / "b")) == first


def test_an_environment_whose_links_are_dead_is_built_again(tmp_path: Path) -> None:
    tree = write_tree(tmp_path)
    found = environment_for(tree)
    (link,) = found.python.parents[1].rglob("_linked/torch")
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    assert environment_for(tree) == found
    assert link.exists()


def test_an_environment_whose_links_lead_to_another_version_now_is_built_again(tmp_path: Path) -> None:
    tree = write_tree(tmp_path)
    found = environment_for(tree)
    version = importlib.metadata.version("transformers")
    (link,) = found.python.parents[1].rglob(f"_linked/transformers-{version}.dist-info")
    link.unlink()
    upgraded = link.with_name("transformers-99.0.dist-info")
    upgraded.mkdir()
    (upgraded / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n")
    assert environment_for(tree) == found
    assert not upgraded.exists()


def write_package(folder: Path, name: str, version: str, *requires: str) -> None:
    """A wheel with one empty module."""
    info = f"{name}-{version}.dist-info"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires), ""]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\n" + "\n".join(lines))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in environment.ALWAYS:
        write_package(folder, name, "4.1")
    return folder


def test_other_versions_are_installed_and_torch_still_is_the_linked_one(tmp_path: Path, index: Path) -> None:
    write_package(index, "compressed_tensors", "0.18.0", "torch>=99", "loguru", "nvidia-ml-py")
    write_package(index, "loguru", "0.7")
    tree = write_tree(tmp_path, "transformers==4.1", "compressed-tensors==0.18.0", "flashinfer-python==0.6")
    lines: list[str] = []
    found = environment_for(tree, lines.append)
    assert found.packages["transformers"] == "4.1"
    assert found.packages["compressed-tensors"] == "0.18.0"
    assert found.packages["loguru"] == "0.7"
    assert found.packages["torch"] == importlib.metadata.version("torch")
    assert "flashinfer-python" not in found.packages
    assert lines[0] == "building an environment for sglang 0.0.1"


def test_pins_that_pip_cannot_install_are_told_and_leave_nothing(tmp_path: Path, index: Path, cache: Path) -> None:
    tree = write_tree(tmp_path, "transformers==5.99")
    with pytest.raises(
        PellucidError, match=r"pip can't install what sglang 0\.0\.1 is traced with .*transformers==5\.99"
    ):
        environment_for(tree)
    assert list((cache / "trace" / "environments").iterdir()) == []


def test_a_python_without_torch_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = write_tree(tmp_path)
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(PellucidError, match=r"needs torch in this Python .*pip install 'pellucid\[engine\]'"):
        environment_for(tree)
