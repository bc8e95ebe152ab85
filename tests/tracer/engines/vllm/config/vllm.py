import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from vllm.platforms import current_platform


@dataclass
class ModelConfig:
    model: str
    quantization: str | None = None

    def __post_init__(self):
        self.hf_config = SimpleNamespace(**json.loads(Path(self.model, "config.json").read_text()))
        quantization_config = getattr(self.hf_config, "quantization_config", None)
        if self.quantization is None and quantization_config is not None:
            self.quantization = quantization_config["quant_method"]

    @property
    def use_mla(self):
        return getattr(self.hf_config, "kv_lora_rank", None) is not None


@dataclass
class CacheConfig:
    block_size: int | None = None
    cache_dtype: str = "auto"


@dataclass
class AttentionConfig:
    backend: str | None = None


@dataclass
class KernelConfig:
    moe_backend: str = "auto"


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    disable_custom_all_reduce: bool = False


@dataclass
class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig
    attention_config: AttentionConfig
    parallel_config: ParallelConfig
    kernel_config: KernelConfig

    def __post_init__(self):
        self.attention_config.backend = current_platform.get_attn_backend_cls(
            self.attention_config.backend, self.model_config.use_mla
        )
        if self.model_config.quantization == "humming":
            from humming import is_supported

            self.kernel_config.moe_backend = "HUMMING" if is_supported() else "MARLIN"
        current_platform.check_and_update_config(self)
