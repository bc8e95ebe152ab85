"""SGLang in the child: which of its modules decide, how its arguments are resolved, how its model is built.

Everything that is particular to SGLang is in this file; `main` uses it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import pkgutil
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import configs, meta
from .engine import Engine, Outcome, Request, Run, declared_fields, find_attribute, import_or_moved, values_of
from .rewrite import Rules
from .values import plain

_PARTS = {"arg_utils", "choices", "argparse_actions", "field_order", "fields"}
"""Modules below `arg_groups` that declare or parse, and decide nothing."""

_DECLARERS = frozenset({"declare_resolution", "set_default", "replace"})

_GROUPS = (
    "world", "tp", "pp", "attn_tp", "attn_cp", "attn_dp", "moe_ep", "moe_tp", "moe_dp", "dcp", "shared_experts_tp",
)  # fmt: skip
_NARROW = ("pp", "attn_cp", "attn_dp", "moe_ep", "moe_dp", "dcp")
"""Groups of one rank while only tensor parallelism is asked for."""


class SGLang(Engine):
    name = "sglang"
    shown = (
        "attention_backend", "prefill_attention_backend", "decode_attention_backend", "nsa_prefill_backend",
        "nsa_decode_backend", "dsa_prefill_backend", "dsa_decode_backend", "mm_attention_backend",
        "moe_runner_backend", "moe_a2a_backend", "disable_shared_experts_fusion", "quantization", "dtype",
        "fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "kv_cache_dtype", "page_size", "sampling_backend",
        "grammar_backend", "disable_radix_cache", "disable_overlap_schedule", "chunked_prefill_size",
        "mem_fraction_static", "max_running_requests", "cuda_graph_config", "cuda_graph_max_bs", "cuda_graph_bs",
        "disable_cuda_graph", "disable_piecewise_cuda_graph", "enable_piecewise_cuda_graph",
        "enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend", "disable_custom_all_reduce",
        "enable_symm_mem", "mamba_radix_cache_strategy", "mamba_backend", "linear_attn_decode_backend",
        "speculative_algorithm", "speculative_moe_runner_backend", "tp_size", "ep_size", "dp_size",
    )  # fmt: skip
    hidden = frozenset(
        {
            "model_path", "tokenizer_path", "served_model_name", "host", "port", "nccl_port", "random_seed",
            "log_level", "device", "revision", "speculative_draft_model_path", "model_config", "trust_remote_code",
        }
    )  # fmt: skip
    always_set = ("attention_backend", "page_size", "sampling_backend")
    # deep_gemm comes inside sgl-kernel; the others are what its requirements require.
    optional_packages = frozenset(
        {
            "cuda", "cupy", "cutlass", "cv2", "deep_gemm", "dill", "frozenlist", "google", "httptools", "httpx",
            "interegular", "jsonschema", "nvidia", "opentelemetry", "pandas", "prometheus_client", "pycountry",
            "pydantic_settings", "referencing", "scipy", "starlette", "torchaudio", "torchvision", "triton",
            "triton_kernels", "uvicorn", "uvloop", "yarl",
        }
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._unimportable: dict[str, Exception] = {}

    @classmethod
    def rewrites(cls, module: str, layers: bool) -> bool:
        if module.startswith("sglang.srt.arg_groups."):
            return not _PARTS & set(module.split("."))
        if module.startswith("sglang.srt.layers.quantization"):
            return layers and "kernel" not in module
        if module in ("sglang.srt.layers.linear", "sglang.srt.layers.moe.fused_moe_triton.layer"):
            return layers
        return module in (
            "sglang.srt.server_args",
            "sglang.srt.configs.model_config",
            "sglang.srt.model_executor.cuda_graph_config",
        )

    @classmethod
    def rules(cls, root: str) -> Rules:
        files = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py")
        fields = declared_fields(root, files)
        layers = {"quant_method", "scheme", "runner"}
        return Rules(fields | layers | {*cls.shown, "attention_arch"}, declarers=_DECLARERS)

    def load(self) -> None:
        self._arguments = import_or_moved("sglang.srt.server_args")

    def load_layers(self) -> None:
        """Import the modules that hold the architectures asked for, and let the engine's registry see only those.

        A registry that imports everything takes ten seconds more, and hides why a module could not be imported.
        """
        every = [configs.read_config(run.model) for run in self.request.runs]
        wanted = {str(name) for config in every for name in config.get("architectures") or ()}
        folder = Path(self.request.root) / "sglang/srt/models"
        named = re.compile(rf"\b({'|'.join(sorted(map(re.escape, wanted))) or '(?!)'})\b")
        modules = {path.stem for path in folder.glob("*.py") if named.search(path.read_text(encoding="utf-8"))}
        list_modules = pkgutil.iter_modules

        def some_modules(path: Any = None, prefix: str = "") -> Any:
            for module in list_modules(path, prefix):
                if not prefix.startswith("sglang.srt.models.") or module.name.rpartition(".")[2] in modules:
                    yield module

        pkgutil.iter_modules = some_modules
        for module in sorted(modules):
            try:
                importlib.import_module(f"sglang.srt.models.{module}")
            except Exception as error:  # noqa: BLE001 - told when a model that needs it is built
                self._unimportable[module] = error
        import_or_moved("sglang.srt.models.registry")

    def resolve(self, run: Run, outcome: Outcome) -> Any:
        argv = ["--model-path", run.model, *run.flags]
        outcome.owners = [find_attribute(self._arguments, "ServerArgs").__name__]
        outcome.given, outcome.defaults = self._flags(argv)
        arguments = find_attribute(self._arguments, "prepare_server_args")(argv)
        self._add_aliases(outcome)
        if hasattr(arguments, "resolve_once"):
            arguments.resolve_once()
        resolved = arguments.resolved_dict() if hasattr(arguments, "resolved_dict") else vars(arguments)
        outcome.values = values_of(self._fields(resolved, outcome), resolved)
        return arguments

    def _fields(self, resolved: dict[str, Any], outcome: Outcome) -> tuple[str, ...]:
        """The shown fields, then whatever else a line of the engine has set."""
        owners = {*outcome.owners, None}
        set_here = [one["field"] for one in self.recorder.assignments if one["owner"] in owners]
        others = [one for one in set_here if one in resolved and one not in self.hidden and not one.startswith("_")]
        return tuple(dict.fromkeys((*self.shown, *others)))

    def _flags(self, argv: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Fields that the command line sets, and the defaults of all, by the engine's own parser."""
        parser = argparse.ArgumentParser()
        self._arguments.ServerArgs.add_cli_args(parser)
        defaults = {one.dest: plain(one.default) for one in parser._actions}
        for action in parser._actions:
            action.default, action.required = argparse.SUPPRESS, False
        parsed, _ = parser.parse_known_args(argv)
        return sorted(vars(parsed)), defaults

    def _add_aliases(self, outcome: Outcome) -> None:
        """`args.tp_size = args.tensor_parallel_size`: a field whose flag has another name."""
        for one in self.recorder.assignments:
            alias = re.fullmatch(r"\w+\.\w+ = \w+\.(\w+)", one["site"]["source"])
            if one["owner"] == "Namespace" and alias and alias[1] in outcome.defaults:
                outcome.defaults[one["field"]] = outcome.defaults[alias[1]]
                outcome.given += [one["field"]] * (alias[1] in outcome.given)

    def build_layers(self, configuration: Any, outcome: Outcome) -> None:
        model_config = self._model_config(configuration)
        self._set_up(configuration)
        model_class = self._model_class(model_config)
        depth = meta.shorten(model_config.hf_config, model_config.hf_text_config)
        if depth is not None:
            outcome.notes.append(f"layers: the first {depth} decoder layers were built; the others are like the last")
        with meta.on_meta(model_config.dtype):
            model = self._build(model_config, model_class)
        kinds: dict[str, dict[str, Any]] = {}
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is None:
                continue
            scheme = getattr(module, "scheme", None)
            runner = getattr(method, "runner", None) or getattr(scheme, "runner", None)
            backend = getattr(runner, "runner_backend", None)
            found = {
                "kind": meta.kind_of(module, method),
                "module": type(module).__name__,
                "method": type(method).__name__,
                "scheme": type(scheme).__name__,
                "runner": str(getattr(backend, "value", backend)),
                "runner_class": type(runner).__name__,
            }
            kinds.setdefault(repr(found), {**found, "first": name, "count": 0})["count"] += 1
        outcome.layers = list(kinds.values())

    def _model_config(self, configuration: Any) -> Any:
        if hasattr(configuration, "get_model_config"):
            return configuration.get_model_config()
        return importlib.import_module("sglang.srt.arg_groups.overrides").model_config_of(configuration)

    def _set_up(self, configuration: Any) -> None:
        """The state of a scheduler process of rank 0, as far as constructors of layers ask for it."""
        size = configuration.tp_size
        state = importlib.import_module("sglang.srt.distributed.parallel_state")
        for name in _GROUPS:
            width = 1 if name in _NARROW else size
            if hasattr(state, f"_{name.upper()}"):
                setattr(state, f"_{name.upper()}", meta.Group(width, name))
        attention = importlib.import_module("sglang.srt.layers.dp_attention")
        for name, value in (("TP_RANK", 0), ("TP_SIZE", size), ("DP_RANK", 0), ("DP_SIZE", 1)):
            for variable in (f"_ATTN_{name}", f"_LOCAL_ATTN_{name}"):
                if hasattr(attention, variable):
                    setattr(attention, variable, value)
        if hasattr(attention, "_ATTN_TP_GROUP"):
            setattr(attention, "_ATTN_TP_GROUP", state._TP)  # noqa: B010 - a variable of the engine
        self._publish(configuration, size)
        for module, name in (
            ("sglang.srt.layers.moe", "initialize_moe_config"),
            ("sglang.srt.layers.quantization.fp8_utils", "initialize_fp8_gemm_config"),
            ("sglang.srt.layers.quantization.fp4_utils", "initialize_fp4_gemm_config"),
        ):
            initialize = getattr(importlib.import_module(module), name, None)
            if initialize is not None:
                # Later versions take the configuration from the context that was published.
                initialize(*[configuration][: len(inspect.signature(initialize).parameters)])

    def _publish(self, configuration: Any, size: int) -> None:
        """Make the configuration the one of this process: a global once, a context in later versions."""
        name = "sglang.srt.runtime_context"
        context: Any = importlib.import_module(name) if importlib.util.find_spec(name) else None
        if not hasattr(context, "SpawnRanks"):
            self._arguments.set_global_server_args_for_scheduler(configuration)
            return
        ranks = context.SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0)
        context.publish(configuration, role="scheduler", ranks=ranks)
        parallel = context.get_parallel()
        for name in _GROUPS:
            group = meta.Group(1 if name in _NARROW else size, name)
            for field, value in ((f"{name}_group", group), (f"{name}_rank", 0)):
                # A field that is not there, or follows from others, stays as it is.
                with suppress(ValueError, AttributeError):
                    parallel.override_permanently(**{field: value})

    def _model_class(self, model_config: Any) -> Any:
        utilities = importlib.import_module("sglang.srt.model_loader.utils")
        try:
            return utilities.get_model_architecture(model_config)[0]
        except Exception:
            # The registry skips modules that it can't import; here that may be for a stub.
            for error in self._unimportable.values():
                raise error from None
            raise

    def _build(self, model_config: Any, model_class: Any) -> Any:
        """The model as the engine's loader makes it, without reading weights."""
        loader = importlib.import_module("sglang.srt.model_loader.loader")
        load_config = importlib.import_module("sglang.srt.configs.load_config").LoadConfig(load_format="dummy")
        quantization = loader._get_quantization_config
        more = [getattr(model_class, "packed_modules_mapping", {}), getattr(model_class, "remap_prefix", None)]
        arguments = [model_config, load_config, *more][: len(inspect.signature(quantization).parameters)]
        return loader._initialize_model(model_config, load_config, quantization(*arguments))
