"""Whatever the engine's tree or the model's folder holds, nothing outside the child's own folder changes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from pellucid.tracer.gpus import simulated_gpu
from pellucid.tracer.record import Trace
from pellucid.tracer.run import TraceRequest, trace, trace_many
from pellucid.tracer.sandbox import child_folder, copy_model, run_child
from pellucid.tracer.sources import installed
from tests.tracer.fake_engine import write_fake_engine, write_fake_model

RESOLVING = "    def __post_init__(self):\n"
START = "        self._handle_gpu_memory_settings(get_device_memory_capacity())\n"

# Each attempt is an expression over `outside`, a folder that holds the file `victim`.
FILE_ATTEMPTS = (
    "open(outside + '/new', 'w')",
    "open(outside + '/victim', 'a')",
    "io.open(outside + '/new', 'xb')",
    "pathlib.Path(outside, 'new').write_text('x')",
    "os.open(outside + '/new', os.O_CREAT | os.O_WRONLY)",
    "os.mkdir(outside + '/new')",
    "os.remove(outside + '/victim')",
    "os.rename(outside + '/victim', outside + '/moved')",
    "os.rename('moved', outside + '/moved')",
    "os.symlink('/etc/passwd', outside + '/link')",
    "os.link(outside + '/victim', outside + '/link')",
    "os.chmod(outside + '/victim', 0)",
    "os.truncate(outside + '/victim', 0)",
    "os.utime(outside + '/victim', (1, 1))",
    "shutil.rmtree(outside)",
    "shutil.copy(outside + '/victim', outside + '/new')",
    "(os.symlink(outside, 'way_out'), open('way_out/new', 'w'))",
    "open(os.path.join(os.getcwd(), '..', os.path.basename(outside), 'new'), 'w')",
    "sqlite3.connect(outside + '/new')",
)
OTHER_ATTEMPTS = (
    "socket.create_connection(('127.0.0.1', port), timeout=1)",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    "urllib.request.urlopen(f'http://127.0.0.1:{port}/', timeout=1)",
    "subprocess.run(['/bin/sh', '-c', 'true'])",
    "os.system('true')",
    "os.execv('/bin/true', ['true'])",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "os.fork()",
    "os.kill(os.getppid(), 0)",
)
NATIVE_ATTEMPTS = (
    "native(libc.open((outside + '/new').encode(), os.O_CREAT | os.O_WRONLY, 0o600))",
    "native(libc.unlink((outside + '/victim').encode()))",
    "native(libc.mkdir((outside + '/new').encode(), 0o700))",
    "native(libc.rename((outside + '/victim').encode(), (outside + '/moved').encode()))",
    "native(libc.execv(b'/bin/true', None))",
    "native(libc.chmod((outside + '/victim').encode(), 0o400))",
    "native(libc.fchmod(os.open(outside + '/victim', os.O_RDONLY), 0o400))",
    "native(libc.chown((outside + '/victim').encode(), 1234, 1234))",
    "native(libc.utimensat(-100, (outside + '/victim').encode(), None, 0))",
    "native(libc.setxattr((outside + '/victim').encode(), b'user.x', b'1', 1, 0))",
    "native(libc.socket(socket.AF_INET, socket.SOCK_DGRAM, 0))",
    "native(libc.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0))",
    "native(libc.shmget(0, 4096, 0o1600))",
    "native(libc.setpriority(0, parent, 19))",
    "native(libc.kill(parent, 0))",
    "native(libc.prlimit(parent, 4, (ctypes.c_ulong * 2)(0, 0), None))",
    "native(libc.setsid())",
    "native(libc.setpgid(0, 0))",
    "native(libc.fork())",
    "native(libc.unshare(0x10000000))",
)

HOSTILE = """\
import ctypes, io, logging, os, pathlib, shutil, socket, sqlite3, subprocess, urllib.request

logger = logging.getLogger(__name__)
outside, port, parent = {outside!r}, {port}, {parent}
libc = ctypes.CDLL(None, use_errno=True)


def native(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def attack():
    os.mkdir("moved")
    for attempt in {attempts!r}:
        try:
            eval(attempt)
        except BaseException as error:
            logger.info("refused %s: %s", attempt, type(error).__name__)
        else:
            logger.info("done %s", attempt)
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "victim").write_text("precious")
    return folder


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        yield server


def contents(folder: Path) -> dict[str, tuple[str, int, float]]:
    """Every file with its text, mode and time; caches of the interpreter aside."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {
        str(path.relative_to(folder)): (path.read_text(), path.stat().st_mode, path.stat().st_mtime) for path in files
    }


def run(root: Path, model: Path, seconds: float = 20.0) -> Trace:
    return trace(
        TraceRequest(installed("sglang", root), model, simulated_gpu("b200", 1), depth="configuration", seconds=seconds)
    )


def test_a_tree_that_attacks_changes_nothing_and_reaches_nobody(
    tmp_path: Path, outside: Path, listener: socket.socket
) -> None:
    attempts = (*FILE_ATTEMPTS, *OTHER_ATTEMPTS, *NATIVE_ATTEMPTS)
    port = listener.getsockname()[1]
    hostile = HOSTILE.format(outside=str(outside), port=port, parent=os.getpid(), attempts=attempts)
    root = write_fake_engine(
        tmp_path / "engine",
        replace={RESOLVING: f"{RESOLVING}        from sglang.srt.hostile import attack\n        attack()\n"},
        extra={"sglang/srt/hostile.py": hostile},
    )
    model = write_fake_model(tmp_path / "model")
    before = contents(tmp_path)
    found = run(root, model)
    assert contents(tmp_path) == before
    with pytest.raises(BlockingIOError):
        listener.accept()
    said = {line.text for line in found.log}
    confined = not any("can't confine" in note for note in found.notes)
    for attempt in attempts if confined else (*FILE_ATTEMPTS, *OTHER_ATTEMPTS):
        assert any(text.startswith(f"refused {attempt}: ") for text in said), f"{attempt} was not refused"
    assert found.refusal is None, "what it may do must still work"
    assert found.decision("attention_backend").value == "trtllm_mla"


def test_code_at_import_is_held_too_and_the_failure_is_called_ours(tmp_path: Path, outside: Path) -> None:
    attack = f"open({str(outside / 'new')!r}, 'w')\n"
    root = write_fake_engine(tmp_path / "engine", extra={"sglang/__init__.py": attack})
    found = run(root, write_fake_model(tmp_path / "model"))
    assert not (outside / "new").exists()
    assert found.refusal is not None and found.refusal.ours
    assert "only its own folder is writable" in found.refusal.message
    assert {one.how for one in found.decisions} == {"unknown"}


def test_code_of_the_model_is_never_run_and_the_user_s_variables_are_not_seen(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DETERMINISTIC", "1")
    root = write_fake_engine(tmp_path / "engine")
    model = write_fake_model(
        tmp_path / "model",
        auto_map={"AutoConfig": "configuration_evil.EvilConfig"},
        text_config={"auto_map": {"AutoModel": "modeling_evil.EvilModel"}, "kv_lora_rank": 32},
    )
    for name in ("configuration_evil.py", "modeling_evil.py", "__init__.py"):
        (model / name).write_text(f"open({str(outside / name)!r}, 'w')\n")
    (model / "hf_quant_config.json").write_text('{"quantization": {}}')
    before = contents(tmp_path)
    found = run(root, model)
    assert contents(tmp_path) == before
    assert any("configuration_evil.py" in note and "auto_map" in note for note in found.notes)
    assert found.decision("attention_backend").value == "trtllm_mla"
    assert found.decision("sampling_backend").value == "flashinfer"


def test_the_copy_of_a_model_has_its_data_without_its_code(tmp_path: Path) -> None:
    model = write_fake_model(tmp_path / "model", auto_map={"AutoConfig": "a.B"})
    (model / "a.py").write_text("")
    (model / "generation_config.json").write_text("{}")
    copy_model(model, tmp_path / "copy", "OtherForCausalLM")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["config.json", "generation_config.json"]
    config = (tmp_path / "copy/config.json").read_text()
    assert "auto_map" not in config and "OtherForCausalLM" in config


def test_a_folder_without_a_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match=r"model: no readable config\.json"):
        copy_model(tmp_path / "model", tmp_path / "copy")


def test_code_that_does_not_come_back_is_a_limit_of_ours_and_no_other_model_suffers(tmp_path: Path) -> None:
    ends = {
        "loops": ("while True: pass", "took longer than 1 s"),
        "leaves": ("os._exit(0)", "ended the process"),
        "crashes": ("import signal; signal.raise_signal(signal.SIGSEGV)", "ended the process"),
        "interrupts": ("raise KeyboardInterrupt", "ended the process"),
        "exits": ("raise SystemExit(3)", "SystemExit: 3"),
        "forges": (
            "pathlib.Path(os.getcwd(), 'result-5.json').write_text('{\"refusal\": 1}'); os._exit(0)",
            "is no result",
        ),
    }
    planted = "".join(
        f"        if {name!r} in self.model_path:\n            import pathlib\n            {code}\n"
        for name, (code, _) in ends.items()
    )
    root = write_fake_engine(tmp_path / "engine", replace={START: planted + START})
    tree, gpu = installed("sglang", root), simulated_gpu("b200", 1)
    models = [write_fake_model(tmp_path / name) for name in (*ends, "good")]
    *bad, good = trace_many([TraceRequest(tree, one, gpu, depth="configuration", seconds=1.0) for one in models])
    for found, (_, reason) in zip(bad, ends.values(), strict=True):
        assert found.refusal is not None and reason in found.refusal.message
        assert all(one.value is None for one in found.decisions)
    assert good.refusal is None and good.decision("attention_backend").value == "trtllm_mla"


def test_a_process_that_hides_from_its_group_ends_with_the_trace(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.mkdir()
    hiding = f"""\
import ctypes, os, time
libc = ctypes.CDLL(None)
if libc.fork() == 0:
    libc.setsid()
    os.chdir({str(marker)!r})
    time.sleep(60)
    os._exit(0)
time.sleep(0.2)
"""
    root = write_fake_engine(tmp_path / "engine", extra={"sglang/__init__.py": hiding})
    run(root, write_fake_model(tmp_path / "model"))
    assert not any(_is_in(process, marker) for process in Path("/proc").iterdir() if process.name.isdigit())


def _is_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").resolve() == folder
    except OSError:
        return False


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        ("os.mkfifo(result)", "no regular file"),
        ("os.mkdir(result)", "no regular file"),
        ("os.symlink('/dev/zero', result)", "symbolic link"),
        ("os.truncate(os.open(result, os.O_CREAT | os.O_WRONLY, 0o600), (64 << 20) + 1)", "larger than 64 MiB"),
        ("open(result, 'w').write('{\"refusal\": ' + '[' * 100_000 + ']' * 100_000 + '}')", "nested deeper"),
        ("open(result, 'w').write('{\"refusal\": ' + '[' * 300 + ']' * 300 + '}')", "nested deeper"),
        ("open(result, 'w').write('{')", "can't be read"),
    ],
)
def test_whatever_is_left_in_place_of_a_result_is_a_limit_of_ours(tmp_path: Path, left: str, reason: str) -> None:
    exec(left, {"os": os, "result": str(tmp_path / "result-0.json")})
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\ncat >/dev/null\nexit 0\n")
    script.chmod(0o755)
    (found,) = run_child(script, tmp_path, {"runs": [1]}, seconds=5, environment={})
    assert found["refusal"]["ours"] and reason in found["refusal"]["message"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested deeper"),
        ("[]", "holds no JSON object"),
        ('{"architectures": "LlamaForCausalLM"}', "must be a list of names"),
        ('{"architectures": ["\\u001b[31mred"]}', r"\\x1b\[31mred"),
    ],
)
def test_a_config_that_is_none_is_refused_by_name(tmp_path: Path, config: str, reason: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(config)
    with pytest.raises(PellucidError, match=f"model.*{reason}"):
        copy_model(model, tmp_path / "copy")


def test_a_folder_that_can_not_be_listed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_fake_model(tmp_path / "model")

    def refuse(_: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PellucidError, match=r"model: can't be listed \(Permission denied\)"):
        copy_model(model, tmp_path / "copy")


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match=r"can't start .*no-python"):
        run_child(tmp_path / "no-python", tmp_path, {"runs": []}, seconds=1, environment={})


def test_nothing_is_left_of_a_child_s_folder() -> None:
    with child_folder() as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_a_flag_that_the_engine_turns_down_is_told_under_its_name(tmp_path: Path) -> None:
    tree = installed("sglang", write_fake_engine(tmp_path / "engine"))
    model = write_fake_model(tmp_path / "model")
    refusal = trace(
        TraceRequest(tree, model, simulated_gpu("b200", 1), ("--no-such", "1"), depth="configuration")
    ).refusal
    assert refusal is not None and not refusal.ours
    assert refusal.message.startswith("sglang: error: ") and "--no-such" in refusal.message


def test_the_engine_sees_a_variable_that_is_named(tmp_path: Path) -> None:
    tree = installed("sglang", write_fake_engine(tmp_path / "engine"))
    model = write_fake_model(tmp_path / "model")
    variables = {"SGLANG_DETERMINISTIC": "1"}
    request = TraceRequest(tree, model, simulated_gpu("b200", 1), depth="configuration", environment=variables)
    found = trace(request).decision("sampling_backend")
    assert found.value == "pytorch" and "environment" in found.evidence
