"""vLLM in the child: which of its modules decide, how its arguments are resolved, how its model is built.

Everything that is particular to vLLM is in this file; `main` uses it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from . import meta, simulate
from .engine import Engine, Outcome, Request, Run, declared_fields, find_attribute, import_or_moved
from .imports import after_import
from .rewrite import Rules
from .values import plain

_WHERE = MappingProxyType(
    {
        "attention_backend": "attention_config.backend",
        "mla_prefill_backend": "attention_config.mla_prefill_backend",
        "flash_attn_version": "attention_config.flash_attn_version",
        "use_trtllm_attention": "attention_config.use_trtllm_attention",
        "moe_backend": "kernel_config.moe_backend",
        "linear_backend": "kernel_config.linear_backend",
        "enable_flashinfer_autotune": "kernel_config.enable_flashinfer_autotune",
        "quantization": "model_config.quantization",
        "dtype": "model_config.dtype",
        "max_model_len": "model_config.max_model_len",
        "enforce_eager": "model_config.enforce_eager",
        "cache_dtype": "cache_config.cache_dtype",
        "block_size": "cache_config.block_size",
        "enable_prefix_caching": "cache_config.enable_prefix_caching",
        "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
        "mamba_block_size": "cache_config.mamba_block_size",
        "mamba_cache_dtype": "cache_config.mamba_cache_dtype",
        "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
        "max_num_seqs": "scheduler_config.max_num_seqs",
        "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
        "async_scheduling": "scheduler_config.async_scheduling",
        "optimization_level": "optimization_level",
        "compilation_mode": "compilation_config.mode",
        "cudagraph_mode": "compilation_config.cudagraph_mode",
        "max_cudagraph_capture_size": "compilation_config.max_cudagraph_capture_size",
        "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
        "fuse_allreduce_rms": "compilation_config.pass_config.fuse_allreduce_rms",
        "disable_custom_all_reduce": "parallel_config.disable_custom_all_reduce",
        "all2all_backend": "parallel_config.all2all_backend",
        "enable_expert_parallel": "parallel_config.enable_expert_parallel",
        "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    }
)
"""Field that is shown -> where vLLM's finished configuration holds it."""

_ARGUMENTS = MappingProxyType({"kv_cache_dtype": "cache_dtype"})
"""Argument -> field, where the names differ."""

_MOE_BACKENDS = (
    "fp8_backend", "nvfp4_backend", "unquantized_backend", "mxfp4_backend", "wna16_backend", "wna16_moe_backend",
    "mxfp4_moe_backend", "kernel_backend", "backend",
)  # fmt: skip

_BLOCK_SIZE_HOOK = "update_block_size_for_backend"

_DEEP_GEMM = "vllm.third_party.deep_gemm"

_DECIDES = (
    "vllm.engine.arg_utils", "vllm.platforms.cuda", "vllm.platforms.interface", "vllm.attention.selector",
    "vllm.v1.attention.selector", "vllm.v1.attention.backends.mla.prefill.selector",
    "vllm.model_executor.models.config", "vllm.transformers_utils.model_arch_config_convertor",
)  # fmt: skip
_DECIDES_LAYERS = (
    "vllm.model_executor.layers.fused_moe.oracle.", "vllm.model_executor.layers.quantization.",
    "vllm.model_executor.layers.attention.", "vllm.model_executor.layers.linear", "vllm.attention.layer",
    "vllm.model_executor.layers.fused_moe.layer", "vllm.model_executor.layers.fused_moe.routed_experts",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", "vllm.model_executor.kernels.linear",
)  # fmt: skip


class VLLM(Engine):
    name = "vllm"
    shown = tuple(_WHERE)
    always_set = ("block_size", "max_num_batched_tokens")
    optional_packages = frozenset(
        {
            "cuda", "cupy", "cutlass", "cv2", "dill", "frozenlist", "google", "gguf", "httptools", "httpx",
            "interegular", "jsonschema", "lxml", "ml_dtypes", "nvidia", "opentelemetry", "pandas",
            "prometheus_client", "pycountry", "pydantic_extra_types", "pydantic_settings", "referencing", "scipy",
            "starlette", "torchaudio", "torchvision", "triton", "uvicorn", "uvloop", "yarl",
        }
    )  # fmt: skip
    absent_packages = frozenset({"triton_kernels"})

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._uninspected: Exception | None = None

    @classmethod
    def rewrites(cls, module: str, layers: bool) -> bool:
        if module.startswith(_DECIDES_LAYERS):
            return layers
        return module in _DECIDES or (module.startswith("vllm.config.") and module != "vllm.config.utils")

    @classmethod
    def attributes_of(cls, field: str) -> frozenset[str]:
        arguments = {name for name, shown in _ARGUMENTS.items() if shown == field}
        return frozenset({_WHERE.get(field, field).rpartition(".")[2], field, *arguments})

    @classmethod
    def rules(cls, root: str) -> Rules:
        attributes = {where.rpartition(".")[2] for where in _WHERE.values()}
        arguments = declared_fields(root, ("vllm/engine/arg_utils.py",))
        layers = {"quant_method", "scheme", "kernel", "fp8_linear", "attn_backend", *_MOE_BACKENDS}
        returns = dict.fromkeys(("get_attn_backend_cls", "select_attention_backend"), "attn_backend")
        return Rules(attributes | arguments | layers, declarers={"replace"}, returns=returns)

    def load(self) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_CACHE_ROOT", self.request.folder)
        # Else vLLM asks a server of NVIDIA over the network whether kernels can be downloaded.
        os.environ.setdefault("VLLM_HAS_FLASHINFER_CUBIN", "1")
        if any(module.startswith(f"{_DEEP_GEMM}.") for module in self.request.extension_modules):
            # Its Python files only wrap the compiled module that is not here.
            self.stubs.module(_DEEP_GEMM)
        after_import("vllm.third_party.pynvml", self._simulate_nvml)
        importlib.import_module("vllm")
        self._arguments = import_or_moved("vllm.engine.arg_utils")
        self._usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
        self._parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
        after_import("vllm.model_executor.models.registry", self._inspect_here)

    def load_layers(self) -> None:
        import_or_moved("vllm.model_executor.model_loader.utils")

    def _inspect_here(self, registry: Any) -> None:
        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = self._inspect

    def _simulate_nvml(self, module: Any) -> None:
        """vLLM brings a copy of pynvml."""
        simulated = simulate.nvml_module(module.__name__, self.request.gpu)
        module.__dict__.update({name: value for name, value in vars(simulated).items() if name.startswith("nvml")})

    def _inspect(self, look_at: Callable[[], Any]) -> Any:
        """Model classes are looked at in a process of their own, which may not be started here."""
        try:
            return look_at()
        except Exception as error:
            self._uninspected = error
            raise

    def refusal(self, error: BaseException, printed: str = "") -> dict[str, Any]:
        """A class that could not be imported here is no reason of the engine."""
        found = super().refusal(error if self._uninspected is None else self._uninspected, printed)
        return found if self._uninspected is None else {**found, "ours": True}

    def resolve(self, run: Run, outcome: Outcome) -> Any:
        argv = ["--model", run.model, "--tokenizer", run.model, "--skip-tokenizer-init", *run.flags]
        outcome.notes.append("assumed: FlashInfer's compiled kernels are installed (VLLM_HAS_FLASHINFER_CUBIN=1)")
        engine_arguments = find_attribute(self._arguments, "EngineArgs")
        outcome.given = self._given(argv)
        parsed = engine_arguments.add_cli_args(self._parser()).parse_args(argv)
        arguments = engine_arguments.from_cli_args(parsed)
        configuration = arguments.create_engine_config(self._usage)
        outcome.owners = [type(arguments).__name__, *self._read(configuration, outcome)]
        # Not `hasattr`: a platform has something, or None, for every name.
        if getattr(self._platform(), _BLOCK_SIZE_HOOK, None) is not None:
            outcome.unsettled["block_size"] = "it is set once more when the layers are there, and they were not built"
        return configuration

    def _read(self, configuration: Any, outcome: Outcome, without: str = "") -> list[str]:
        """Fill values and defaults; returns the classes that hold the fields, whose assignments get the shown names."""
        shown: dict[tuple[str, str], str] = {}
        for name, where in _WHERE.items():
            *path, attribute = where.split(".")
            if without in path:
                continue
            holder = configuration
            for part in path:
                holder = getattr(holder, part, None)
            if not hasattr(holder, attribute):
                continue
            outcome.values[name] = plain(getattr(holder, attribute))
            outcome.defaults[name] = _default(holder, attribute)
            shown[type(holder).__name__, attribute] = name
        for one in self.recorder.assignments:
            argument = _ARGUMENTS.get(one["field"], one["field"])
            one["field"] = shown.get((one["owner"], one["field"]), argument)
        for field in dataclasses.fields(self._arguments.EngineArgs):
            outcome.defaults.setdefault(field.name, None)
        return sorted({owner for owner, _ in shown})

    def _given(self, argv: list[str]) -> list[str]:
        """Fields that the command line sets, read with the engine's own parser with its defaults taken away."""
        parser = self._arguments.EngineArgs.add_cli_args(self._parser())
        for action in parser._actions:
            action.default, action.required = argparse.SUPPRESS, False
        parsed, _ = parser.parse_known_args(argv)
        return sorted(_ARGUMENTS.get(name, name) for name in vars(parsed))

    def build_layers(self, configuration: Any, outcome: Outcome) -> None:
        model_config = configuration.model_config
        self._set_up(configuration)
        loader = importlib.import_module("vllm.model_executor.model_loader.utils")
        depth = meta.shorten(model_config.hf_text_config)
        if depth is not None:
            outcome.notes.append(f"layers: the first {depth} decoder layers were built; the others are like the last")
        loader.get_model_architecture(model_config)
        try:
            with meta.on_meta(model_config.dtype):
                model = loader.initialize_model(configuration)
        finally:
            # Constructors change the configuration too: the cache's dtype, for one.
            self._read(configuration, outcome, without="compilation_config")
        self._settle_block_size(configuration, outcome)
        kinds: dict[str, dict[str, Any]] = {}
        for name, module in model.named_modules():
            for found in _kinds(module):
                kinds.setdefault(repr(found), {**found, "first": name, "count": 0})["count"] += 1
        outcome.layers = list(kinds.values())

    @staticmethod
    def _platform() -> Any:
        return getattr(importlib.import_module("vllm.platforms"), "current_platform", None)

    def _settle_block_size(self, configuration: Any, outcome: Outcome) -> None:
        """What executors call behind `load_model`: the backends of the layers may need another size of a block."""
        settle = getattr(self._platform(), _BLOCK_SIZE_HOOK, None)
        if settle is None:
            return
        try:
            settle(configuration)
        except Exception as error:
            reason = self.refusal(error)
            if not reason["ours"]:
                raise
            where = f"{_BLOCK_SIZE_HOOK} could not be run ({reason['message'][:200]})"
            outcome.unsettled["block_size"] = f"it is set once more when the layers are there, but {where}"
        else:
            outcome.unsettled.pop("block_size", None)
            self._read(configuration, outcome, without="compilation_config")

    def _set_up(self, configuration: Any) -> None:
        """The state of a worker process of rank 0, as far as constructors of layers ask for it."""
        import torch

        size = configuration.parallel_config.tensor_parallel_size
        state = importlib.import_module("vllm.distributed.parallel_state")
        for name in ("world", "tp", "ep", "pp", "dp", "dcp", "pcp", "etp"):
            if hasattr(state, f"_{name.upper()}"):
                setattr(state, f"_{name.upper()}", meta.Group(size if name in ("world", "tp", "ep") else 1, name))
        # Compiling happens when weights are there; constructors must not wait for it.
        compilation = configuration.compilation_config
        compilation.mode = type(compilation.mode).NONE
        workspace = importlib.util.find_spec("vllm.v1.worker.workspace")
        if workspace is not None:
            importlib.import_module(workspace.name).init_workspace_manager(torch.device("meta"))


def _default(holder: Any, attribute: str) -> Any:
    for field in dataclasses.fields(holder) if dataclasses.is_dataclass(holder) else ():
        if field.name == attribute and field.default is not dataclasses.MISSING:
            # Fields of pydantic keep their default one level further down.
            return plain(getattr(field.default, "default", field.default))
    return None


def _kinds(module: Any) -> list[dict[str, Any]]:
    """What a module's constructor chose: its quantization method with the backend and kernel, its attention backend."""
    found = []
    method, attention = getattr(module, "quant_method", None), getattr(module, "attn_backend", None)
    if method is not None:
        backend = next((getattr(method, name) for name in _MOE_BACKENDS if hasattr(method, name)), None)
        scheme = getattr(module, "scheme", None)
        kernel = getattr(method, "fp8_linear", None) or getattr(scheme, "kernel", None)
        found.append(
            {
                "kind": meta.kind_of(module, method),
                "module": type(module).__name__,
                "method": type(method).__name__,
                "backend": str(backend),
                "scheme": type(scheme).__name__,
                "kernel": "" if kernel is None else type(kernel).__name__,
            }
        )
    if attention is not None:
        name = attention.get_name() if hasattr(attention, "get_name") else str(attention)
        found.append(
            {
                "kind": "vision" if "MMEncoder" in type(module).__name__ else "attention",
                "module": type(module).__name__,
                "backend": name,
                "backend_class": getattr(attention, "__qualname__", ""),
                "kernel": type(getattr(module, "impl", None)).__name__,
            }
        )
    return found
