from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.utils.common import get_device_capability


def declare_resolution(server_args, source, **fields):
    stash = server_args.__dict__.setdefault("_resolved_overrides", [])
    stash.append((source, dict(fields)))


def run_post_process_pass(server_args, fn):
    declared = fn(server_args)
    if declared:
        declare_resolution(server_args, fn.__qualname__, **declared)


def dsa_defaults(view):
    if not is_deepseek_dsa(view.get_model_config().hf_config):
        return {}
    major, _ = get_device_capability()
    declared = {"kv_cache_dtype": "fp8_e4m3" if major >= 10 else "bfloat16"}
    declared["dsa_decode_backend"] = "trtllm" if major >= 10 else "fa3"
    return declared


def mamba_radix_cache(server_args):
    if getattr(server_args.get_model_config().hf_config, "mamba_num_heads", 0):
        declare_resolution(server_args, "mamba_radix_cache", disable_radix_cache=True)
