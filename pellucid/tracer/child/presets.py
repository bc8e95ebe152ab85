"""What engines ask of stubbed packages when they are imported, answered for the simulated GPU. Used by `engine`."""

from __future__ import annotations

from typing import Any

from .simulate import GPU


class _TritonConfig:
    def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 3, **others: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = dict(kwargs or {}), num_warps, num_stages


class _Namespace:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None


def presets_for(gpu: GPU) -> dict[str, dict[str, Any]]:
    """What engines ask of stubbed packages at import: triton's active driver and its target, the simulated GPU."""
    target = _Namespace(backend="cuda", arch=gpu.sm, warp_size=32)
    properties = {"multiprocessor_count": gpu.sm_count, "max_shared_mem": gpu.shared_memory_bytes, "warpSize": 32}
    utilities = _Namespace(get_device_properties=lambda device=0: properties)
    active = _Namespace(get_current_target=lambda: target, get_current_device=lambda: 0, utils=utilities)
    nvidia = _Namespace(driver=_Namespace(is_active=lambda: True), compiler=_Namespace)
    return {
        "triton": {"Config": _TritonConfig},
        "triton.runtime": {"driver": _Namespace(active=active)},
        "triton.backends": {"backends": {"nvidia": nvidia}},
        "triton.language": {"dtype": type("dtype", (), {})},
        "dill": {"dumps": lambda *arguments, **keywords: b""},
    }
