"""Installs the small engines of `engines/` into a folder: what the tracer's tests run instead of wheels.

They have every shape that the tracer must read once, under the names that it has in SGLang and vLLM: a list of
architectures, a trait, a ternary, a tuple, declared fields, an early return, a variable of the environment, a probed
package, a stub that answers, a log line and a refusal.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

VERSION = "0.0.1"

SOURCES = Path(__file__).parent / "engines"
# A compiled extension of the wheel: in RECORD only.
EXTENSIONS = {"sglang": (), "vllm": ("vllm/_C.abi3.so",)}
STUBBED_PINS = {"sglang": ("flashinfer_python==0.6.3",), "vllm": ("flashinfer-python==0.6.3",)}


def write_fake_engine(
    root: Path,
    engine: str = "sglang",
    *,
    version: str = VERSION,
    replace: dict[str, str] | None = None,
    extra: dict[str, str] | None = None,
    requires: tuple[str, ...] | None = None,
) -> Path:
    """Write the engine below `root` as pip would install it, with METADATA and RECORD; returns `root`.

    `replace` swaps texts in every file (rename a function, plant hostile code); `extra` adds or overwrites files.
    Its pin of `transformers` is the version that runs the tests, so that no environment needs to be built; `requires`
    are other requirements.
    """
    found = {path.relative_to(SOURCES).as_posix(): path for path in sorted((SOURCES / engine).rglob("*.py"))}
    files = {**{name: path.read_text(encoding="utf-8") for name, path in found.items()}, **(extra or {})}
    for old, new in (replace or {}).items():
        assert any(old in text for text in files.values()), f"no file of the fake {engine} has {old!r}"
        files = {name: text.replace(old, new) for name, text in files.items()}
    if requires is None:
        installed = importlib.metadata.version("transformers")
        requires = (f"transformers=={installed}", "numpy", "packaging", *STUBBED_PINS[engine])
    lines = ["Metadata-Version: 2.1", f"Name: {engine}", f"Version: {version}"]
    info = f"{engine}-{version}.dist-info"
    files[f"{info}/METADATA"] = "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires), ""])
    record = []
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(text.encode())}")
    record += [f"{name},," for name in EXTENSIONS[engine]]
    (root / info / "RECORD").write_text("\n".join([*record, f"{info}/RECORD,,", ""]), encoding="utf-8")
    return root


def write_fake_model(folder: Path, architecture: str = "FakeV3ForCausalLM", **config: Any) -> Path:
    """A folder with a `config.json` of an MLA model (`kv_lora_rank`); `config` replaces values, None drops one."""
    values = {
        "architectures": [architecture],
        "model_type": "fake_v3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 32,
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def line_of(root: Path, file: str, text: str, occurrence: int = 0) -> int:
    """The line (from 1) of `file` below `root` that holds `text`: the first, or the one at index `occurrence`."""
    lines = (root / file).read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line][occurrence]
