from dataclasses import dataclass, fields

from vllm.config.vllm import AttentionConfig, CacheConfig, KernelConfig, ModelConfig, ParallelConfig, VllmConfig


@dataclass
class EngineArgs:
    model: str = ""
    tokenizer: str | None = None
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    attention_backend: str | None = None

    @staticmethod
    def add_cli_args(parser):
        for field in fields(EngineArgs):
            flag = "--" + field.name.replace("_", "-")
            if field.default in (True, False) and field.name != "tensor_parallel_size":
                parser.add_argument(flag, action="store_true")
            else:
                kind = int if field.name in ("tensor_parallel_size", "block_size") else str
                parser.add_argument(flag, type=kind, default=field.default)
        return parser

    @classmethod
    def from_cli_args(cls, args):
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def create_engine_config(self, usage_context=None, headless=False):
        return VllmConfig(
            model_config=ModelConfig(self.model, self.quantization),
            cache_config=CacheConfig(self.block_size, self.kv_cache_dtype),
            attention_config=AttentionConfig(self.attention_backend),
            parallel_config=ParallelConfig(self.tensor_parallel_size),
            kernel_config=KernelConfig(),
        )
