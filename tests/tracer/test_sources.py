"""Trees from wheels and from installed copies; pip runs for real, on an index of this machine."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from pellucid.tracer import sources
from pellucid.tracer.sources import add_wheel, cached, check_engine, fetch, find, installed
from tests.tracer.fake_engine import VERSION, write_fake_engine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_wheel(folder: Path, engine: str = "sglang", version: str = VERSION, **options: object) -> Path:
    root = write_fake_engine(folder / f"{engine}-{version}", engine, version=version, **options)  # type: ignore[arg-type]
    wheel = folder / f"{engine}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(root.rglob("*")):
            archive.write(path, path.relative_to(root).as_posix())
        archive.writestr(f"{engine}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def test_a_fetched_wheel_leaves_its_python_files_and_metadata_alone(index: Path, cache: Path) -> None:
    wheel = write_wheel(index, extra={"sglang/kernels.so": "binary", "sglang/table.json": "{}"})
    lines: list[str] = []
    tree = fetch("sglang", VERSION, lines.append)
    kept = {path.relative_to(tree.root).as_posix() for path in tree.root.rglob("*") if path.is_file()}
    assert "sglang/srt/server_args.py" in kept
    assert any(name.startswith("sglang/srt/__pycache__/server_args.") for name in kept)
    assert not [name for name in kept if name.endswith((".so", "table.json", ".whl"))]
    assert tree.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert str(tree) == f"sglang {VERSION}"
    assert any(line.startswith(f"downloading sglang {VERSION}") for line in lines)
    assert [path.name for path in (cache / "trace" / "sources").iterdir()] == [f"sglang-{VERSION}"]


def test_a_version_in_the_cache_needs_no_index(index: Path) -> None:
    write_wheel(index).rename(index.parent / f"sglang-{VERSION}-py3-none-any.whl")
    first = add_wheel(index.parent / f"sglang-{VERSION}-py3-none-any.whl")
    assert fetch("sglang", VERSION) == first


def test_a_version_that_was_never_released_is_told_with_the_newest(index: Path) -> None:
    write_wheel(index, version="0.5.8")
    write_wheel(index, version="0.5.9")
    with pytest.raises(PellucidError, match=r"no wheel of sglang 9\.9 .* newest are 0\.5\.8, 0\.5\.9$"):
        fetch("sglang", "9.9")


def test_without_an_index_the_way_through_another_machine_is_told(index: Path, cache: Path) -> None:
    with pytest.raises(
        PellucidError, match=r"can't be reached; where it can, run `pip download --no-deps vllm==0\.15\.1`"
    ):
        fetch("vllm", "0.15.1")
    assert list((cache / "trace" / "sources").iterdir()) == []


@pytest.mark.parametrize("version", ["", "latest", "--index-url=http://127.0.0.1", "../0.5.9"])
def test_what_is_no_version_never_reaches_pip(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "download", lambda *_: pytest.fail("pip was asked"))
    with pytest.raises(PellucidError, match="is no version"):
        fetch("sglang", version)


def test_a_broken_wheel_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    wheel = tmp_path / "sglang-0.5.9-py3-none-any.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(PellucidError, match="can't be unpacked"):
        add_wheel(wheel)
    assert list((cache / "trace" / "sources").iterdir()) == []


def test_a_wheel_cannot_write_outside_its_tree(tmp_path: Path, cache: Path) -> None:
    wheel = write_wheel(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("../../../escaped.py", "")
        archive.writestr("/escaped.py", "")
    tree = add_wheel(wheel)
    assert {path.parent for path in tmp_path.rglob("escaped.py")} <= {tree.root}
    assert not Path("/escaped.py").exists()


def test_adding_a_wheel_again_replaces_its_tree(tmp_path: Path) -> None:
    add_wheel(write_wheel(tmp_path / "a"))
    tree = add_wheel(write_wheel(tmp_path / "b", replace={'"trtllm_mla"': '"other"'}))
    assert '"other"' in (tree.root / "sglang/srt/server_args.py").read_text()


@pytest.mark.parametrize("name", ["numpy-2.0-py3-none-any.whl", "sglang-0.5.9-py3-none-any.whl", "sglang"])
def test_only_wheels_of_engines_are_added(name: str, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match=r"no engine that can be traced|no such wheel"):
        add_wheel(tmp_path / name)


def test_requirements_that_hold_elsewhere_are_left_out(tmp_path: Path) -> None:
    requires = (
        "transformers==4.57.1",
        'av; sys_platform == "linux" and platform_machine == "aarch64"',
        'pytest; extra == "test"',
        "flashinfer_python[cu13]>=0.6.3",
    )
    tree = add_wheel(write_wheel(tmp_path, requires=requires))
    assert tree.pins == {"transformers": "4.57.1", "flashinfer-python": "0.6.3"}


def test_compiled_extensions_are_known_from_the_record(tmp_path: Path) -> None:
    assert add_wheel(write_wheel(tmp_path, "vllm")).extension_modules == ("vllm._C",)


def test_an_installed_copy_is_seen_alone_with_the_versions_beside_it(tmp_path: Path) -> None:
    site_packages = write_fake_engine(tmp_path / "site-packages")
    for name, version in (("transformers", "5.19.0"), ("unrelated", "1.0")):
        (site_packages / name).mkdir()
        info = site_packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site_packages / "broken-1.0.dist-info").mkdir()
    tree = installed("sglang", site_packages)
    assert tree.requires["transformers"].specifier == "==5.19.0"
    assert "unrelated" not in tree.requires
    assert sorted(path.name for path in tree.root.iterdir()) == ["sglang", f"sglang-{VERSION}.dist-info"]
    assert (tree.root / "sglang/srt/server_args.py").is_file()
    assert installed("sglang", site_packages) == tree


def test_an_upgraded_copy_is_read_anew(tmp_path: Path) -> None:
    site_packages = write_fake_engine(tmp_path / "site-packages")
    assert installed("sglang", site_packages).version == VERSION
    (site_packages / f"sglang-{VERSION}.dist-info").rename(tmp_path / "old")
    write_fake_engine(site_packages, version="0.0.2")
    tree = installed("sglang", site_packages)
    assert tree.version == "0.0.2"
    assert sorted(path.name for path in tree.root.iterdir()) == ["sglang", "sglang-0.0.2.dist-info"]


def test_a_checkout_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    with pytest.raises(PellucidError, match=r"no sglang-\*\.dist-info; give the folder that `pip install --no-deps"):
        installed("sglang", tmp_path)
    with pytest.raises(PellucidError, match="no folder vllm/"):
        installed("vllm", tmp_path)


def test_what_is_at_hand_is_the_newest_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = [write_wheel(tmp_path / version, version=version) for version in ("0.5.10", "0.5.9", "0.5.9.post1")]
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(PellucidError, match="no sglang is here: name a version"):
        find("sglang")
    for wheel in wheels:
        add_wheel(wheel)
    assert cached("sglang") == ("0.5.10", "0.5.9.post1", "0.5.9")
    assert find("sglang").version == "0.5.10"
    assert find("sglang", "0.5.9").version == "0.5.9"


def test_the_copy_of_the_running_python_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_wheel(write_wheel(tmp_path, version="0.5.10"))
    monkeypatch.setattr("sys.path", [str(write_fake_engine(tmp_path / "site-packages", version="0.5.9"))])
    assert find("sglang").version == "0.5.9"


def test_a_folder_that_holds_another_version_than_asked_is_refused(tmp_path: Path) -> None:
    folder = write_fake_engine(tmp_path / "site-packages")
    with pytest.raises(PellucidError, match=rf"holds sglang {VERSION}, not version 9\.9"):
        find("sglang", "9.9", folder)


def test_a_damaged_cache_says_which_folder_to_remove(tmp_path: Path) -> None:
    tree = add_wheel(write_wheel(tmp_path))
    (tree.root / "source.json").write_text(json.dumps({"engine": "sglang"}))
    with pytest.raises(PellucidError, match="remove that folder and try again"):
        fetch("sglang", VERSION)


def test_an_unknown_engine_is_refused_with_the_known() -> None:
    with pytest.raises(PellucidError, match="known: sglang, vllm"):
        check_engine("llama.cpp")
