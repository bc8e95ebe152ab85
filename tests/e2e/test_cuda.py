"""The reference backends on a CUDA device: the same greedy text as on the CPU, and a probe that sees the card."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid import LLM, SamplingParams
from pellucid.hardware import load_hardware
from tests import checkpoints
from tests.engine.tiny import write_tokenizer
from tests.server.running import run_server

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [list(range(3, 60)), list(range(100, 140)), [7, 8, 9]]


@pytest.mark.parametrize("shape", ["v2lite", "v3", "kimi", "glm-flash", "llama", "qwen3-moe"])
def test_greedy_text_is_that_of_the_cpu(shape: str, tmp_path: Path) -> None:
    """In fp32, where both devices agree to rounding, through chunked prefill, prefix cache and batched decode."""
    path = checkpoints.write(shape, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = {
        "dtype": "float32",
        "num_kv_pages": 64,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "max_model_len": 256,
    }
    texts = {}
    for device in ("cpu", "cuda"):
        llm = LLM(path, device=device, **options)
        texts[device] = [
            tuple(output.outputs[0].token_ids) for _ in range(2) for output in llm.generate(PROMPTS, params)
        ]
        llm.engine.check_conservation()
    assert texts["cuda"] == texts["cpu"]


def test_bf16_runs_and_is_finite(tmp_path: Path) -> None:
    path = checkpoints.write_sharded("v3", tmp_path, "bfloat16")
    llm = LLM(path, device="cuda", num_kv_pages=64, max_num_seqs=8, max_model_len=256)
    assert llm.plan.dtype == "bf16"
    output = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1))
    assert all(len(one.outputs[0].token_ids) == 16 for one in output)


def test_the_probe_sees_what_torch_sees() -> None:
    hardware = load_hardware("this")
    properties = torch.cuda.get_device_properties(0)
    gpu = hardware.gpus[0]
    assert gpu.name == properties.name
    assert gpu.sm == properties.major * 10 + properties.minor
    assert gpu.sm_count == properties.multi_processor_count
    assert gpu.smem_optin_bytes == properties.shared_memory_per_block_optin
    assert len(hardware.gpus) == torch.cuda.device_count()


def test_the_server_gives_the_text_that_the_engine_gives(tmp_path: Path) -> None:
    """Through the engine process, streamed, with a constraint beside it in the batch."""
    path = write_tokenizer(checkpoints.write("v3", tmp_path))
    options = {"dtype": "float32", "num_kv_pages": 64, "max_num_seqs": 8, "max_model_len": 256}
    expected = LLM(path, **options).chat(
        [{"role": "user", "content": "the lazy dog"}], SamplingParams(temperature=0, max_tokens=24)
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with run_server(path, *flags, "--log-level", "warning") as server:
        assert server.chat("the lazy dog", max_tokens=24).json["choices"][0]["message"]["content"] == (
            expected[0].outputs[0].text
        )
        answer = server.chat("the lazy dog", max_tokens=24, regex="(yes|no)").json
        assert answer["choices"][0]["message"]["content"] in ("yes", "no")
        assert {d["value"] for d in server.get("/plan").json["plan"]["decisions"] if d["op"] == "device"} == {"cuda"}
        assert server.stop() == 0
