import importlib.util
import subprocess

import torch


def get_device_capability():
    return torch.cuda.get_device_capability()


def is_hopper():
    return get_device_capability()[0] == 9


def is_sm100_supported():
    return get_device_capability()[0] == 10


def is_flashinfer_available():
    return importlib.util.find_spec("flashinfer") is not None


def get_device_memory_capacity():
    """MiB of the smallest GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True)
    return min(float(line) for line in found.stdout.strip().split("\n"))
