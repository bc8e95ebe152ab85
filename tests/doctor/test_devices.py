"""The devices' lines, on described machines and with a driver that is played."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from pellucid.doctor.devices import DriverFacts, device_checks, free_memory, memory_in_use, pairs_apart
from tests.selection.models import machine

PRO, H200, CPU = (machine(name) for name in ("rtx-pro-6000x8-pcie", "h200", "cpu"))
GIB = 1 << 30


def checks(hardware, device="cuda", ranks=1, facts=None):
    return {check.name: check for check in device_checks(hardware, device, ranks, facts)}


@pytest.mark.parametrize("name", ["rtx-pro-6000x8-pcie", "b200x8-nvlink", "h200", "a100", "rtx-4090", "rtx-3090"])
def test_described_machines_are_in_order(name):
    hardware = machine(name)
    found = checks(hardware, ranks=len(hardware.gpus))
    assert {check.status for check in found.values()} == {"ok"}
    assert str(hardware.gpus[0].smem_optin_bytes) in found["shared memory"].found
    assert found["link"].found.startswith(hardware.link if len(hardware.gpus) > 1 else "one rank")


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        ({"driver": "570.86.15"}, "driver", "fail", ("570.86.15", "580", "CUDA 13.0")),
        ({"driver": "535.104.05", "cuda": (12, 8), "nvcc": (12, 8)}, "driver", "ok", ("535",)),
        ({"driver": None}, "driver", "warn", ("NVML",)),
        ({"cuda": None}, "torch", "fail", ("built without CUDA", "--device cpu")),
        ({"packages": {}}, "torch", "fail", ("not installed", "pellucid[gpu]")),
        ({"nvcc": (12, 4)}, "nvcc", "warn", ("12.4", "13.0")),
        ({"nvcc": None}, "nvcc", "ok", ("need none",)),
    ],
)
def test_software_that_does_not_go_together_is_named(change, name, status, words):
    check = checks(replace(PRO, **change))[name]
    assert check.status == status
    for word in words:
        assert word in f"{check.found} {check.remedy}"


def test_gpus_without_peer_access_are_named_among_the_ranks_that_run():
    facts = DriverFacts(apart=((0, 1), (2, 7)))
    link = checks(PRO, ranks=8, facts=facts)["link"]
    assert link.status == "warn" and "0-1, 2-7" in link.found and "ACS" in link.remedy
    assert "2-7" not in checks(PRO, ranks=4, facts=facts)["link"].found
    assert checks(PRO, ranks=1, facts=facts)["link"].status == "ok"
    assert checks(PRO, ranks=8, facts=DriverFacts())["link"].found == "pcie, every pair with P2P"


def test_a_host_without_gpus_says_so_and_warns_without_a_compiler():
    found = checks(CPU, "cpu")
    assert found["GPU"].found.startswith("none found") and found["C++ compiler"].status == "ok"
    bare = replace(CPU, cpu=replace(CPU.cpu, compiler=None))
    assert checks(bare, "cpu")["C++ compiler"].remedy == "apt install g++"


def test_a_driver_that_is_there_and_does_not_work_is_no_machine_without_gpus():
    broken = replace(CPU, notes=("the CUDA driver is installed but not usable: cuInit returned 803",))
    gpu = checks(broken, "cpu")["GPU"]
    assert gpu.status == "warn" and "803" in gpu.found


def test_memory_that_others_hold_stops_the_start_and_the_share_that_is_left_is_the_remedy():
    total = H200.gpus[0].memory_bytes
    budget = int(0.9 * total)
    assert memory_in_use(H200, 1, budget, DriverFacts((total,))).status == "ok"
    full = memory_in_use(H200, 1, budget, DriverFacts((total // 2,)))
    assert full.status == "fail" and "--gpu-memory-utilization 0.5" in full.remedy
    assert memory_in_use(H200, 1, budget, DriverFacts()) is None


def test_the_fullest_gpu_of_those_that_run_counts():
    total = PRO.gpus[0].memory_bytes
    facts = DriverFacts((total, total, GIB, total, total, total, total, total))
    assert memory_in_use(PRO, 2, total // 2, facts).status == "ok"
    assert memory_in_use(PRO, 4, total // 2, facts).status == "fail"


class PlayedDriver:
    """libcuda and libnvidia-ml as far as they are asked: pairs that reach each other, free bytes by bus id."""

    def __init__(self, reach=(), free=()):
        self.reach, self.free = set(reach), dict(free)

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceCanAccessPeer(self, can, one, other):
        can._obj.value = int((one.value, other.value) in self.reach)
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id, handle):
        if bus_id.decode() not in self.free:
            return 6
        handle._obj.value = list(self.free).index(bus_id.decode()) + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        assert isinstance(handle, ctypes.c_void_p)
        memory._obj.free = list(self.free.values())[handle.value - 1]
        return 0


def test_peer_access_has_to_hold_both_ways():
    both = {(0, 1), (1, 0), (0, 2)}
    assert pairs_apart(PlayedDriver(reach=both), 3) == ((0, 2), (1, 2))


def test_free_memory_is_read_for_every_gpu_or_not_at_all():
    played = PlayedDriver(free={"0000:01": 7, "0000:02": 9})
    assert free_memory(played, ("0000:02", "0000:01")) == (9, 7)
    assert free_memory(played, ("0000:01", "0000:03")) == ()
