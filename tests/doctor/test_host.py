"""The host's lines: each lack is found, named, and comes with what to do about it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.doctor.host import (
    NAMES,
    Folder,
    Host,
    c_compiler,
    host_checks,
    hub_folder,
    read_folder,
    read_host,
    triton_folder,
    unchecked_host,
)

GIB = 1 << 30
GOOD_FOLDER = Folder(Path("/var/cache"), True, True, 100 * GIB)
GOOD = Host(
    python=(3, 12),
    missing={"engine": (), "serve": ()},
    port_problem="",
    open_files=65536,
    locked_memory=-1,
    shm_bytes=8 * GIB,
    cache=GOOD_FOLDER,
    hub=GOOD_FOLDER,
    triton=GOOD_FOLDER,
    built_kernels=False,
    c_compiler="/usr/bin/gcc",
    python_headers=True,
    nccl="2.28.9",
)
ADDRESS = ("127.0.0.1", 8000)


def checks(host=GOOD, *, connections=1280, ranks=8, device="cuda"):
    return {check.name: check for check in host_checks(host, ADDRESS, connections, ranks, device)}


def test_a_host_that_lacks_nothing_is_all_ok():
    assert {check.status for check in checks().values()} == {"ok"}


@pytest.mark.parametrize(
    ("lack", "name", "status", "words"),
    [
        ({"python": (3, 14)}, "Python", "warn", ("3.14", "3.11 and 3.12")),
        ({"missing": {"engine": ("torch",), "serve": ()}}, "packages (engine)", "fail", ("torch", "pellucid[engine]")),
        ({"missing": {"engine": (), "serve": ("zmq",)}}, "packages (serve)", "fail", ("zmq", "pellucid[serve]")),
        ({"port_problem": "Address already in use"}, "port", "fail", ("127.0.0.1:8000", "--port")),
        ({"open_files": 1024}, "open files", "warn", ("1024", "1536", "ulimit -n", "LimitNOFILE")),
        ({"locked_memory": 8 << 20}, "locked memory", "warn", ("8.0 MiB", "ulimit -l unlimited")),
        ({"shm_bytes": 64 << 20}, "/dev/shm", "warn", ("64.0 MiB", "--shm-size=8g")),
        ({"shm_bytes": None}, "/dev/shm", "warn", ("none", "--ipc=host")),
        ({"cache": Folder(Path("/ro"), False, True, GIB)}, "cache", "warn", ("/ro", "PELLUCID_CACHE")),
        ({"hub": Folder(Path("/ro"), False, True, GIB)}, "hub cache", "warn", ("/ro", "HF_HUB_CACHE")),
        ({"hub": Folder(Path("/full"), True, True, GIB)}, "hub cache", "warn", ("1.0 GiB free",)),
        ({"triton": Folder(Path("/ro"), False, True, GIB)}, "Triton's cache", "fail", ("TRITON_CACHE_DIR",)),
        ({"triton": Folder(Path("/x"), True, False, 9 * GIB)}, "Triton's cache", "fail", ("noexec",)),
        ({"c_compiler": None}, "C compiler", "fail", ("apt install gcc",)),
        ({"python_headers": False}, "C compiler", "fail", ("Python.h", "apt install python3.12-dev")),
        ({"nccl": None}, "NCCL", "warn", ("8 ranks",)),
    ],
)
def test_each_lack_is_one_line_with_its_remedy(lack, name, status, words):
    found = checks(replace(GOOD, **lack))
    assert found[name].status == status
    line = f"{found[name].found} {found[name].remedy}"
    for word in words:
        assert word in line
    assert {n for n, check in found.items() if check.status != "ok"} == {name}


def test_what_only_several_ranks_need_is_no_matter_for_one():
    bare = replace(GOOD, locked_memory=8 << 20, shm_bytes=64 << 20, nccl=None)
    assert {check.status for check in checks(bare, ranks=1).values()} == {"ok"}


def test_a_cpu_needs_no_compiler_of_c_and_no_cache_of_triton():
    names = checks(replace(GOOD, c_compiler=None), ranks=1, device="cpu")
    assert not {"C compiler", "Triton's cache", "NCCL", "locked memory"} & names.keys()


@pytest.mark.parametrize(("built", "status"), [(False, "fail"), (True, "warn")])
def test_a_cache_that_cant_be_written_stops_a_cpu_whose_kernels_are_not_built(built, status):
    host = replace(GOOD, cache=Folder(Path("/ro"), False, True, GIB), built_kernels=built)
    assert checks(host, ranks=1, device="cpu")["cache"].status == status


def test_of_another_machine_the_same_lines_are_not_checked():
    assert {check.status for check in unchecked_host("elsewhere")} == {"not checked"}
    assert {check.name for check in unchecked_host("elsewhere")} == set(NAMES) == checks().keys()


# --- reading ------------------------------------------------------------------------------------


def test_a_port_in_use_is_found_and_a_free_one_is_left_free():
    packages = {"engine": ("json",), "serve": ("no_such_module",)}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        host = read_host(("127.0.0.1", port), packages)
        assert "in use" in host.port_problem
        assert host.missing == {"engine": (), "serve": ("no_such_module",)}
    assert read_host(("127.0.0.1", port), packages).port_problem == ""
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_folder_that_is_not_there_yet_is_judged_by_the_nearest_above_it(tmp_path):
    found = read_folder(tmp_path / "not" / "yet")
    assert found.writable and found.free_bytes > 0
    assert not (tmp_path / "not").exists()
    file = tmp_path / "file"
    file.write_text("")
    assert not read_folder(file / "below").writable


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_folder_without_the_right_to_write_is_found(tmp_path):
    tmp_path.chmod(0o500)
    assert not read_folder(tmp_path / "cache").writable


@pytest.mark.parametrize(
    ("environ", "hub", "triton"),
    [
        ({"HF_HUB_CACHE": "/a/hub", "TRITON_CACHE_DIR": "/a/triton"}, "/a/hub", "/a/triton"),
        ({"HF_HOME": "/b", "TRITON_HOME": "/b"}, "/b/hub", "/b/.triton/cache"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub", str(Path.home() / ".triton/cache")),
        ({}, str(Path.home() / ".cache/huggingface/hub"), str(Path.home() / ".triton/cache")),
    ],
)
def test_folders_are_where_their_owners_put_them(environ, hub, triton):
    assert (str(hub_folder(environ)), str(triton_folder(environ))) == (hub, triton)


def test_the_compiler_is_the_one_that_triton_takes(tmp_path):
    for name in ("gcc", "clang", "mycc"):
        path = tmp_path / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    here = {"PATH": str(tmp_path)}
    assert c_compiler(here) == str(tmp_path / "gcc")
    assert c_compiler({**here, "CC": "mycc"}) == str(tmp_path / "mycc")
    assert c_compiler({**here, "CC": "absent"}) is None
    (tmp_path / "gcc").unlink()
    assert c_compiler(here) == str(tmp_path / "clang")
