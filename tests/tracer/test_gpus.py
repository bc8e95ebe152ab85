"""What `--gpu` may name, and what engines are then told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from pellucid.hardware import fixture_names, load_hardware
from pellucid.tracer.gpus import BY_SM, NAMES, simulated_gpu


@pytest.mark.parametrize("name", [name for name in fixture_names() if name != "cpu"])
def test_a_machine_of_the_fixtures_has_the_same_facts_here(name: str) -> None:
    machine = load_hardware(name)
    gpu = simulated_gpu(name)
    model = machine.gpus[0]
    assert (gpu.name, gpu.sm, gpu.sm_count) == (model.name, model.sm, model.sm_count)
    assert (gpu.memory_mib << 20, gpu.shared_memory_bytes) == (model.memory_bytes, model.smem_optin_bytes)
    assert (gpu.count, gpu.link) == (len(machine.gpus), machine.link)


def test_a_simulated_machine_is_a_machine_for_the_limits_of_kernels() -> None:
    machine = simulated_gpu("rtx-pro-6000x8-pcie").hardware()
    known = load_hardware("rtx-pro-6000x8-pcie")
    assert (machine.gpus, machine.link, machine.cuda) == (known.gpus, known.link, known.cuda)


@pytest.mark.parametrize(("sm", "name"), BY_SM.items())
def test_a_capability_stands_for_one_gpu_that_has_it(sm: int, name: str) -> None:
    assert simulated_gpu(f"sm{sm}") == simulated_gpu(name)
    assert simulated_gpu(name).sm == sm


@pytest.mark.parametrize(
    ("text", "count", "link"),
    [
        ("sm120x8-pcie", 8, "pcie"),
        ("sm90x1", 1, "none"),
        ("h200x8", 8, "nvlink"),
        ("h200x8-pcie", 8, "pcie"),
        ("rtxpro6000x8", 8, "pcie"),
        ("RTX-PRO-6000x2-nvlink", 2, "nvlink"),
    ],
)
def test_the_short_form_says_how_many_and_how_they_are_linked(text: str, count: int, link: str) -> None:
    gpu = simulated_gpu(text)
    assert (gpu.count, gpu.link, gpu.nvlink) == (count, link, link != "pcie")


@pytest.mark.parametrize("name", NAMES)
def test_a_label_names_the_machine_that_it_describes(name: str) -> None:
    for count in (1, 8):
        gpu = simulated_gpu(name, count)
        assert gpu.count == count
        assert simulated_gpu(str(gpu)) == gpu


def test_facts_behind_a_comma_replace_defaults_and_are_part_of_the_label() -> None:
    gpu = simulated_gpu("b200x4,cuda=12.6,driver=595.10,memory=1000,host=64")
    assert (gpu.cuda, gpu.driver, gpu.memory_mib, gpu.host_memory_gib) == ("12.6", "595.10", 1000, 64)
    assert str(gpu) == "b200x4-nvlink,cuda=12.6,driver=595.10,memory=1000,host=64"
    assert simulated_gpu(str(gpu)) == gpu


def test_a_described_machine_brings_its_own_versions_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    values = {**load_hardware("h200x2").to_json(), "name": "mine", "cuda": [12, 8], "driver": "570.1"}
    path.write_text(json.dumps(values))
    gpu = simulated_gpu(str(path))
    assert (str(gpu), gpu.cuda, gpu.driver, gpu.host_memory_gib, gpu.count) == ("mine", "12.8", "570.1", 256, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu", "has no GPU"),
        ("h300", "no such GPU; give a name such as h200x8"),
        ("sm110x8", "no GPU of SM 110 is known; known: sm80"),
        ("h200x0", "at least one GPU"),
        ("h200x2", "has 2 GPUs, but 4 are asked for"),
        ("h200x4,colour=red", "'colour=red' is no fact"),
        ("h200x4,cuda=new", "'cuda=new' is no fact"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(PellucidError, match=message) as error:
        simulated_gpu(text, 4)
    assert "\n" not in str(error.value)


def test_a_machine_of_unequal_gpus_is_refused(tmp_path: Path) -> None:
    values = load_hardware("h200x2").to_json()
    values["gpus"][1]["sm"] = 80
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps(values))
    with pytest.raises(PellucidError, match="its GPUs differ"):
        simulated_gpu(str(path))
