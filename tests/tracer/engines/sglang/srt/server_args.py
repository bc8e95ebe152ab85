import argparse
import dataclasses
import logging
import os

from sglang.srt.arg_groups.overrides import dsa_defaults, mamba_radix_cache, run_post_process_pass
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.common import (
    get_device_memory_capacity,
    is_flashinfer_available,
    is_hopper,
    is_sm100_supported,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    tp_size: int = 1
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    dsa_prefill_backend: str | None = None
    dsa_decode_backend: str | None = None
    moe_runner_backend: str = "auto"
    fp8_gemm_runner_backend: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    page_size: int | None = None
    sampling_backend: str | None = None
    chunked_prefill_size: int | None = None
    mem_fraction_static: float | None = None
    grammar_backend: str = "xgrammar"
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False

    def __post_init__(self):
        self._handle_gpu_memory_settings(get_device_memory_capacity())
        self._handle_model_specific_adjustments()
        self._handle_attention_backend_compatibility()
        self._handle_sampling_backend()
        self._handle_fp8_gemm()
        run_post_process_pass(self, dsa_defaults)
        mamba_radix_cache(self)
        if self.page_size is None:
            self.page_size = 1

    def resolved_dict(self):
        resolved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for _, fields in self.__dict__.get("_resolved_overrides", ()):
            resolved.update(fields)
        return resolved

    def get_model_config(self):
        return ModelConfig(self.model_path)

    def _handle_gpu_memory_settings(self, gpu_mem):
        if self.chunked_prefill_size is None:
            if gpu_mem < 60 * 1024:
                self.chunked_prefill_size = 4096
            elif gpu_mem < 160 * 1024:
                self.chunked_prefill_size = 8192
            else:
                self.chunked_prefill_size = 16384
        if self.mem_fraction_static is None:
            self.mem_fraction_static = round(1 - 512 * self.tp_size / gpu_mem, 3)

    def _handle_model_specific_adjustments(self):
        hf_config = self.get_model_config().hf_config
        model_arch = hf_config.architectures[0]
        if model_arch in [
            "FakeV3ForCausalLM",
            "FakeK25ForConditionalGeneration",
        ]:
            if is_sm100_supported():
                if (
                    self.attention_backend is None
                    and self.prefill_attention_backend is None
                    and self.decode_attention_backend is None
                ):
                    self.attention_backend = "trtllm_mla"
                    logger.info("Use trtllm_mla as attention backend on sm100 for FakeV3ForCausalLM")
                quant_method = (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
                if self.quantization is None:
                    if quant_method is not None:
                        self.quantization = quant_method
                    elif model_arch in ["FakeV3ForCausalLM"]:
                        self.quantization = "fp8"
                if self.moe_runner_backend == "auto" and self.quantization in ["fp8", "modelopt_fp4"]:
                    self.moe_runner_backend = "flashinfer_trtllm"
        elif model_arch in ["FakeHybridForCausalLM"]:
            if self.attention_backend is None:
                self.attention_backend = "flashinfer"
            self.disable_overlap_schedule = True
        block = (getattr(hf_config, "quantization_config", None) or {}).get("weight_block_size")
        if block and hf_config.moe_intermediate_size // self.tp_size % block[0] != 0:
            raise ValueError(
                f"moe_intermediate_size {hf_config.moe_intermediate_size} over {self.tp_size} GPUs "
                f"is not divisible by block {block[0]}"
            )

    def _handle_attention_backend_compatibility(self):
        if self.prefill_attention_backend is None and self.attention_backend == "split":
            self.prefill_attention_backend, self.decode_attention_backend = "fa3", "flashmla"
        if self.attention_backend is None:
            if self.get_model_config().kv_lora_rank is None:
                self.attention_backend = "flashinfer" if is_flashinfer_available() else "triton"
            elif is_hopper():
                self.attention_backend = "fa3"
            elif is_sm100_supported():
                self.attention_backend = "flashinfer"
            else:
                self.attention_backend = "triton"
        if self.attention_backend == "trtllm_mla":
            if not is_sm100_supported():
                raise ValueError("TRTLLM MLA backend is only supported on Blackwell GPUs (SM100).")
            if self.page_size not in [32, 64]:
                logger.warning(f"trtllm_mla needs a page_size of 32 or 64, changing it from {self.page_size} to 64.")
                self.page_size = 64

    def _handle_sampling_backend(self):
        if os.environ.get("SGLANG_DETERMINISTIC") == "1":
            self.sampling_backend = "pytorch"
            return
        if self.sampling_backend is not None:
            return
        self.sampling_backend = "flashinfer" if is_flashinfer_available() else "pytorch"

    def _handle_fp8_gemm(self):
        if self.quantization != "fp8":
            return
        from flashinfer.gemm import has_trtllm_gen

        if has_trtllm_gen():
            self.fp8_gemm_runner_backend = "flashinfer_trtllm"

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int, default=1)
        for field in dataclasses.fields(ServerArgs)[2:]:
            flag = "--" + field.name.replace("_", "-")
            if field.default in (True, False):
                parser.add_argument(flag, action="store_true")
            else:
                kinds = {"page_size": int, "chunked_prefill_size": int, "mem_fraction_static": float}
                parser.add_argument(flag, type=kinds.get(field.name, str), default=field.default)

    @classmethod
    def from_cli_args(cls, args):
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})


def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))
