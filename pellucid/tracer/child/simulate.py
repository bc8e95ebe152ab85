"""A simulated machine, as engines look at theirs: torch.cuda, NVML, nvidia-smi, the host's memory, compiled answers.

`GPU` says what the parent described; nothing here looks at the real machine. Used by the engine files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from .imports import after_import


@dataclass(frozen=True, slots=True)
class GPU:
    """`count` equal GPUs of one host. `memory_mib` is what nvidia-smi shows; `sm` is 90 for compute capability 9.0."""

    name: str
    sm: int
    memory_mib: int
    sm_count: int
    count: int
    cuda: str
    driver: str
    nvlink: bool
    shared_memory_bytes: int
    l2_bytes: int
    host_memory_gib: int

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.sm, 10)

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


def gpu_from_json(values: dict[str, Any]) -> GPU:
    return GPU(**{one.name: values[one.name] for one in fields(GPU)})


def install(gpu: GPU, stub: Callable[[str], Any]) -> None:
    """Simulate the machine. `stub` makes a stand-in for a compiled operator that is only named, never run."""
    sys.modules["pynvml"] = nvml_module("pynvml", gpu)
    _simulate_programs(gpu)
    after_import("torch", lambda torch: _simulate_torch(torch, gpu, stub))
    after_import("psutil", lambda psutil: _simulate_host(psutil, gpu))


# nvidia-smi.


def _simulate_programs(gpu: GPU) -> None:
    """`nvidia-smi` answers from the description; Python ends at once, with a failure; no other program is installed."""
    which = shutil.which

    def find_program(command: Any, *arguments: Any, **keywords: Any) -> Any:
        return "/usr/bin/nvidia-smi" if command == "nvidia-smi" else which(command, *arguments, **keywords)

    class Popen(_Process):
        def __init__(self, args: Any, *others: Any, **keywords: Any) -> None:
            words = args.split() if isinstance(args, str) else [str(one) for one in args]
            program = words[0] if words else ""
            is_smi = program.rpartition("/")[2] == "nvidia-smi"
            if not is_smi and program != sys.executable:
                raise FileNotFoundError(2, "No such file or directory", program)
            is_text = any(keywords.get(one) for one in ("text", "universal_newlines", "encoding", "errors"))
            super().__init__(args, _nvidia_smi(gpu, words[1:]) if is_smi else "", is_text, returncode=int(not is_smi))

    shutil.which = find_program  # type: ignore[assignment]
    subprocess.Popen = Popen  # type: ignore[misc, assignment]


class _Process:
    """A program that has ended with `output`."""

    def __init__(self, args: Any, output: str, is_text: bool, returncode: int) -> None:
        self.args, self.returncode, self.pid = args, returncode, 0
        self.stdin = self.stderr = None
        self._output: Any = output if is_text else output.encode()
        self._none: Any = "" if is_text else b""
        self.stdout: Iterable[Any] = iter(self._output.splitlines(keepends=True))

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def communicate(self, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        return self._output, self._none

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def kill(self) -> None:
        pass

    terminate = kill


def _nvidia_smi(gpu: GPU, arguments: list[str]) -> str:
    """What `--query-gpu=...` prints: one line for each GPU; the topology for `topo`; nothing else is known."""
    if arguments[:1] == ["topo"]:
        names = [f"GPU{index}" for index in range(gpu.count)]
        link = "NV18" if gpu.nvlink else "SYS"
        rows = ["\t".join([a, *("X" if a == b else link for b in names)]) for a in names]
        return "\n".join(["\t" + "\t".join(names), *rows, ""])
    query = next((one.partition("=")[2] for one in arguments if one.startswith("--query-gpu=")), "")
    units = "" if any("nounits" in one for one in arguments) else " MiB"
    major, minor = gpu.capability
    answers = {
        "memory.total": f"{gpu.memory_mib}{units}",
        "memory.free": f"{gpu.memory_mib}{units}",
        "memory.used": f"0{units}",
        "name": gpu.name,
        "gpu_name": gpu.name,
        "compute_cap": f"{major}.{minor}",
        "driver_version": gpu.driver,
        "count": str(gpu.count),
    }
    lines = []
    for index in range(gpu.count if query else 0):
        here = {**answers, "index": str(index), "uuid": f"GPU-{index}"}
        lines.append(", ".join(here.get(one, "[N/A]") for one in query.split(",")))
    return "\n".join([*lines, ""])


# torch.


def _simulate_torch(torch: Any, gpu: GPU, stub: Callable[[str], Any]) -> None:
    major, minor = gpu.capability
    properties = types.SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sm_count,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=gpu.shared_memory_bytes,
        shared_memory_per_multiprocessor=gpu.shared_memory_bytes + 1024,
        L2_cache_size=gpu.l2_bytes,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="GPU-0",
        pci_bus_id=1,
        pci_device_id=0,
        pci_domain_id=0,
        gcnArchName="",
    )
    answers = {
        "is_available": True,
        "device_count": gpu.count,
        "_device_count_nvml": gpu.count,
        "current_device": 0,
        "set_device": None,
        "get_device_capability": (major, minor),
        "get_device_name": gpu.name,
        "get_device_properties": properties,
        "mem_get_info": (int(gpu.memory_bytes * 0.985), gpu.memory_bytes),
        "is_initialized": False,
        "_is_compiled": True,
        "get_arch_list": [f"sm_{gpu.sm}"],
        "synchronize": None,
        "empty_cache": None,
        "is_bf16_supported": major >= 8,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answering(answer))
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = _answering(_Stream())
    for name, answer in (("current_device_index", 0), ("synchronize", None), ("empty_cache", None)):
        if hasattr(torch, "accelerator"):
            setattr(torch.accelerator, name, _answering(answer))
    torch.version.cuda = gpu.cuda
    torch.backends.cuda.is_built = _answering(True)
    torch.get_device_module = _answering(torch.cuda)
    for name in ("getCurrentRawStream", "getDevice", "setStream", "exchangeDevice", "maybeExchangeDevice"):
        if not hasattr(torch._C, f"_cuda_{name}"):
            setattr(torch._C, f"_cuda_{name}", _answering(0))
    torch.compile = lambda model=None, *arguments, **keywords: (lambda one: one) if model is None else model
    _tolerate_operators(torch)
    _simulate_operators(torch, gpu, stub)


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *arguments, **keywords: answer


class _Stream:
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _answering(None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


_OPERATOR_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError)


def _tolerate_operators(torch: Any) -> None:
    """No kernel runs here, so one that can't be registered must not stop the import of the code that decides."""
    library = torch.library
    for name in ("register_fake", "impl_abstract", "register_kernel", "impl", "define", "register_autograd"):
        if hasattr(library, name):
            setattr(library, name, _tolerant(getattr(library, name), decorates=True))
    for name in ("define", "impl", "_register_fake"):
        setattr(library.Library, name, _tolerant(getattr(library.Library, name), decorates=False))


def _tolerant(register: Callable[..., Any], decorates: bool) -> Callable[..., Any]:
    def attempt(*arguments: Any, **keywords: Any) -> Any:
        try:
            result = register(*arguments, **keywords)
        except _OPERATOR_FAILURES:
            return (lambda function=None, *others, **more: function) if decorates else None
        return _tolerant_decorator(result) if decorates and callable(result) else result

    return attempt


def _tolerant_decorator(decorate: Callable[..., Any]) -> Callable[..., Any]:
    def attempt(*arguments: Any, **keywords: Any) -> Any:
        try:
            return decorate(*arguments, **keywords)
        except _OPERATOR_FAILURES:
            return arguments[0] if arguments else None

    return attempt


_NAMESPACES = (
    "_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_C_cuda_utils", "_vllm_fa2_C", "_vllm_fa3_C", "_flashmla_C",
    "_flashmla_extension_C", "_qutlass_C", "_deepselect_C", "_C_stable_libtorch", "sgl_kernel",
)  # fmt: skip


_FROM_90, _ONLY_90, _FROM_100 = range(90, 1000), range(90, 100), range(100, 1000)

_COMPILED_RULES = {
    "cutlass_scaled_mm_supports_fp8": ((_FROM_90, (0, 0)), (range(89, 90), (12, 4))),
    "cutlass_scaled_mm_supports_block_fp8": ((_FROM_100, (12, 8)), (_ONLY_90, (12, 0))),
    "cutlass_group_gemm_supported": ((_FROM_100, (12, 8)), (_ONLY_90, (12, 3))),
    "cutlass_scaled_mm_supports_fp4": ((_FROM_100, (12, 8)),),
    "cutlass_sparse_scaled_mm_supported": ((_ONLY_90, (0, 0)),),
}
"""Questions that compiled extensions answer while a configuration is made, restated from their sources: the compute
capabilities (90 is 9.0) and the CUDA version from which on the answer is yes.

vLLM: csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu, csrc/quantization/fp4/nvfp4_scaled_mm_entry.cu and
csrc/sparse/cutlass/sparse_scaled_mm_entry.cu.
"""


def _simulate_operators(torch: Any, gpu: GPU, stub: Callable[[str], Any]) -> None:
    cuda = tuple(int(part) for part in gpu.cuda.split(".")[:2])

    def answering(rule: tuple[tuple[range, tuple[int, int]], ...]) -> Callable[[int], bool]:
        return lambda asked: any(asked in capabilities and cuda >= version for capabilities, version in rule)

    answers = {name: answering(rule) for name, rule in _COMPILED_RULES.items()}
    for namespace in _NAMESPACES:
        setattr(torch.ops, namespace, _Operators(namespace, answers, stub))


class _Operators:
    def __init__(self, namespace: str, answers: dict[str, Any], stub: Callable[[str], Any]) -> None:
        self._namespace, self._answers, self._stub = namespace, answers, stub

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answer = self._answers.get(name) or self._stub(f"torch.ops.{self._namespace}.{name}")
        self.__dict__[name] = answer
        return answer


# The host, and NVML.


def _simulate_host(psutil: Any, gpu: GPU) -> None:
    total = gpu.host_memory_gib << 30
    memory = psutil.virtual_memory()._replace(total=total, available=total - (8 << 30), free=total - (8 << 30))
    psutil.virtual_memory = _answering(memory)


def nvml_module(name: str, gpu: GPU) -> types.ModuleType:
    """A module that stands for pynvml, or for the copy of it that an engine brings."""
    module = types.ModuleType(name)
    memory = types.SimpleNamespace(total=gpu.memory_bytes, free=gpu.memory_bytes, used=0)
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": gpu.count,
        "nvmlDeviceGetCudaComputeCapability": gpu.capability,
        "nvmlDeviceGetName": gpu.name,
        "nvmlDeviceGetMemoryInfo": memory,
        # NVML_P2P_STATUS_OK is 0.
        "nvmlDeviceGetP2PStatus": 0 if gpu.nvlink else 1,
        "nvmlDeviceGetNumaNodeId": 0,
        "nvmlSystemGetDriverVersion": gpu.driver,
    }
    for function, answer in answers.items():
        setattr(module, function, _answering(answer))
    values = {
        "NVMLError": type("NVMLError", (Exception,), {}),
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
        "nvmlDeviceGetHandleByIndex": lambda index: ("handle", index),
        "nvmlDeviceGetHandleByUUID": lambda uuid: ("handle", 0),
        "nvmlDeviceGetIndex": lambda handle: handle[1],
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle[1]}",
        "nvmlDeviceGetCpuAffinity": lambda handle, size: [1] * size,
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=f"0000:{handle[1]:02x}:00.0"),
    }
    module.__dict__.update(values)

    def __getattr__(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _answering(0)

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    return module
