import importlib.util
import logging

import torch

logger = logging.getLogger(__name__)


def _get_backend_priorities(use_mla, major):
    if use_mla:
        if major == 10:
            return ["FLASHINFER_MLA", "TRITON_MLA"]
        return ["FLASH_ATTN_MLA", "TRITON_MLA"]
    return ["FLASHINFER", "FLASH_ATTN"] if major == 10 else ["FLASH_ATTN"]


class CudaPlatform:
    def get_device_capability(self):
        return torch.cuda.get_device_capability()

    def supports(self, backend):
        if backend == "FLASH_ATTN_MLA":
            return self.get_device_capability()[0] == 9
        if backend.startswith("FLASHINFER"):
            return importlib.util.find_spec("flashinfer") is not None
        return True

    def get_attn_backend_cls(self, selected, use_mla):
        if selected is not None:
            return selected
        for backend in _get_backend_priorities(use_mla, self.get_device_capability()[0]):
            if self.supports(backend):
                logger.info("Using %s attention backend", backend)
                return backend
        raise ValueError("No valid attention backend found")

    def check_and_update_config(self, vllm_config):
        cache_config = vllm_config.cache_config
        if cache_config.block_size is None:
            cache_config.block_size = 64 if vllm_config.attention_config.backend == "FLASHINFER_MLA" else 16
