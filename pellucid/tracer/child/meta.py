"""Builds a model without memory or GPUs: process groups that are only numbers, and tensors on the meta device.

Used by the engine files for the level of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LAYERED_BY_LIST = ("layer_types", "hybrid_override_pattern", "layers_block_type", "full_attention_interval")
"""Where one of these is there, the kinds of layers are not known from the first few."""


class ProcessGroup:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class Group:
    """A communication group of `size` ranks as rank 0 sees it; what it is asked to do, it leaves undone."""

    def __init__(self, size: int, name: str) -> None:
        self.world_size = self.local_size = size
        self.rank = self.rank_in_group = self.local_rank = self.first_rank = 0
        self.last_rank = size - 1
        self.ranks = list(range(size))
        self.unique_name = f"{name}:0"
        self.is_first_rank = self.is_last_rank = True
        self.device_communicator = self.pynccl_comm = self.ca_comm = self.mq_broadcaster = None
        self.use_custom_op_call = False
        self.device = "cuda"
        self.device_group = self.cpu_group = ProcessGroup(size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: arguments[0] if arguments else None


def shorten(*model_configs: Any) -> int | None:
    """Keep the dense layers and two more, where all others are alike; the depth that is left, else None."""
    left = None
    for config in {id(one): one for one in model_configs}.values():
        if any(getattr(config, name, None) for name in _LAYERED_BY_LIST) or not hasattr(config, "num_hidden_layers"):
            continue
        left = min(config.num_hidden_layers, (getattr(config, "first_k_dense_replace", 0) or 0) + 2)
        config.num_hidden_layers = left
    return left


@contextmanager
def on_meta(dtype: Any) -> Iterator[None]:
    """Whatever is made inside has a shape and a dtype and no memory; asking for a GPU gives the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    def is_cuda(value: Any) -> bool:
        if isinstance(value, torch.device):
            return bool(value.type == "cuda")
        return isinstance(value, str) and value.startswith("cuda")

    class NoMemory(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keywords = dict(kwargs or {})
            # A device may also be given by its index.
            if is_cuda(keywords.get("device")) or isinstance(keywords.get("device"), int):
                keywords["device"] = "meta"
            arguments: Any = tuple("meta" if is_cuda(one) else one for one in args)
            return arguments[0].to("meta") if getattr(func, "__name__", "") == "cuda" else func(*arguments, **keywords)

    modules: Any = torch.nn.Module
    default, move = torch.get_default_dtype(), (modules.to, modules.cuda)
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.bfloat16)
    modules.to = modules.cuda = lambda self, *arguments, **keywords: self
    try:
        with torch.device("meta"), NoMemory():
            yield
    finally:
        torch.set_default_dtype(default)
        modules.to, modules.cuda = move


def kind_of(module: Any, method: Any) -> str:
    """What a layer is, by the words in the names of its class and of its method."""
    names = type(module).__name__ + type(method).__name__
    if "MoE" in names or "Experts" in names:
        return "moe"
    if "Attention" in names or "KVCache" in names:
        return "attention"
    return "embedding" if "Embedding" in names or "LMHead" in names else "linear"
