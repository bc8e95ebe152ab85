"""The machine as facts: probed without torch, read from fixtures, and identified by a fingerprint."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from pellucid.core import PellucidError
from pellucid.hardware import fixture_names, load_hardware
from pellucid.hardware.facts import hardware_from_json
from pellucid.hardware.probe import DriverError, package_folders, read_cores, read_gpus, read_links, read_memory

FIXTURES = ("a100", "b200x8-nvlink", "cpu", "h200", "h200x2", "rtx-3090", "rtx-4090", "rtx-pro-6000x8-pcie")


@pytest.mark.parametrize("name", ["this", *FIXTURES])
def test_a_machine_survives_json(name, tmp_path):
    hardware = load_hardware(name)
    text = json.dumps(hardware.to_json())
    assert hardware_from_json(json.loads(text), "here") == hardware
    file = tmp_path / "machine.json"
    file.write_text(text)
    assert load_hardware(str(file)) == hardware


@pytest.mark.parametrize(
    ("name", "count", "sm", "smem", "link"),
    [
        ("h200", 1, 90, 232448, "none"),
        ("h200x2", 2, 90, 232448, "nvlink"),
        ("rtx-pro-6000x8-pcie", 8, 120, 101376, "pcie"),
        ("b200x8-nvlink", 8, 100, 232448, "nvlink"),
        ("a100", 1, 80, 166912, "none"),
        ("rtx-4090", 1, 89, 101376, "none"),
        ("rtx-3090", 1, 86, 101376, "none"),
    ],
)
def test_the_fixtures_hold_the_limits_that_kernels_meet(name, count, sm, smem, link):
    hardware = load_hardware(name)
    assert [(g.sm, g.smem_optin_bytes) for g in hardware.gpus] == [(sm, smem)] * count
    assert (hardware.link, hardware.device) == (link, "cuda")


def test_all_fixtures_are_known():
    assert fixture_names() == FIXTURES
    assert load_hardware("cpu").device == "cpu"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(PellucidError, match=r"h2000.*this, a100, .*rtx-pro-6000x8-pcie"):
        load_hardware("h2000")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[]", "expected an object"),
        ("{", "JSON"),
        ('{"name": "x"}', "'cpu' is missing"),
        ('{"name": "x", "cpu": {"name": "y", "isa": []}}', "cores"),
        ('{"name": "x", "cpu": 3}', "not a hardware description"),
    ],
)
def test_a_file_that_is_no_machine_is_refused_by_name(text, word, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(PellucidError, match=word) as refused:
        load_hardware(str(file))
    assert str(file) in str(refused.value)


def test_the_fingerprint_tells_devices_from_software():
    base = load_hardware("h200")
    same = replace(base, name="renamed", cpu=replace(base.cpu, available_bytes=1))
    assert same.fingerprint() == base.fingerprint()
    newer = replace(base, packages={**base.packages, "triton": "9.9"}).fingerprint()
    assert newer.hard == base.fingerprint().hard
    assert newer.soft != base.fingerprint().soft
    assert replace(base, driver="1").fingerprint().soft != base.fingerprint().soft
    others = {load_hardware(name).fingerprint().hard for name in FIXTURES}
    assert len(others) == len(FIXTURES)


def test_machines_of_two_kinds_are_described_as_such():
    a, b = load_hardware("rtx-4090"), load_hardware("rtx-3090")
    text = replace(a, gpus=(*a.gpus, *b.gpus), link="pcie").describe()
    assert "1 x NVIDIA GeForce RTX 4090" in text
    assert "1 x NVIDIA GeForce RTX 3090" in text


def test_probing_imports_no_torch():
    code = (
        "import sys; from pellucid.hardware import load_hardware; load_hardware();"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_probe_finds_this_process(monkeypatch):
    hardware = load_hardware()
    assert hardware.cpu.cores > 0
    assert 0 < hardware.cpu.available_bytes <= hardware.cpu.memory_bytes
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert load_hardware().cpu.compiler is None


class FakeDriver:
    """libcuda as the probe sees it: one device with the given attributes."""

    def __init__(self, init=0, attributes=None):
        self.init, self.attributes = init, attributes or {16: 188, 75: 12, 76: 0, 97: 101376}

    def cuInit(self, flags):
        return self.init

    def cuDeviceGetCount(self, count):
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"Fake GPU"
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = 96 << 30
        return 0

    def cuDeviceGetPCIBusId(self, bus_id, size, device):
        bus_id.value = b"0000:01:00.0"
        return 0

    def cuDeviceGetAttribute(self, value, number, device):
        if number not in self.attributes:
            return 1
        value._obj.value = self.attributes[number]
        return 0


def test_limits_come_from_the_driver():
    ((gpu, bus_id),) = read_gpus(FakeDriver())
    assert (gpu.name, gpu.sm, gpu.smem_optin_bytes, gpu.sm_count) == ("Fake GPU", 120, 101376, 188)
    assert gpu.memory_bytes == 96 << 30
    assert bus_id == "0000:01:00.0"


def test_a_driver_without_devices_is_no_gpu_and_a_broken_one_is_named():
    assert read_gpus(FakeDriver(init=100)) == []
    with pytest.raises(DriverError, match="cuInit returned 803"):
        read_gpus(FakeDriver(init=803))


class FakeNVML:
    """libnvidia-ml with one link state per device."""

    def __init__(self, linked):
        self.linked = linked

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id, handle):
        handle._obj.value = int(bus_id) + 1
        return 0

    def nvmlDeviceGetNvLinkState(self, handle, link, state):
        assert isinstance(state._obj, ctypes.c_uint)
        state._obj.value = int(self.linked[handle.value - 1] and link == 3)
        return 0


@pytest.mark.parametrize(
    ("linked", "expected"), [([1, 1], "nvlink"), ([1, 0], "pcie"), ([0, 0], "pcie"), ([1], "none")]
)
def test_the_link_is_nvlink_only_when_every_gpu_has_one(linked, expected):
    bus_ids = tuple(str(i) for i in range(len(linked)))
    assert read_links(FakeNVML(linked), bus_ids) == ("580.1", expected)


def test_memory_and_cores_obey_the_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    assert read_memory(tmp_path) == (1024000, 819200)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("500000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("100000\n")
    assert read_memory(tmp_path) == (500000, 400000)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert read_cores(tmp_path) == 1
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert read_cores(tmp_path) == read_cores(tmp_path / "nowhere")


def test_packages_are_read_from_folder_names_and_the_first_on_the_path_wins(tmp_path):
    for folder, name in (("a", "Sgl_Flash.MLA-1.0.0"), ("b", "sgl_flash_mla-2.0"), ("b", "torch-2.13.0+cpu")):
        (tmp_path / folder / f"{name}.dist-info").mkdir(parents=True)
    found = package_folders([str(tmp_path / "none"), str(tmp_path / "a"), str(tmp_path / "b")])
    assert found["sgl-flash-mla"] == (tmp_path / "a", "1.0.0")
    assert found["torch"] == (tmp_path / "b", "2.13.0+cpu")
