"""The deploy files: they parse, their flags and paths exist, and their time limits fit the server's."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pellucid.cli.main import cli
from pellucid.server.args import ServeArgs

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
LOAD_TIME_S = 1800
"""What a load of half a terabyte from a slow disk may take."""

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Flags of other programs in the pages.
FOREIGN_FLAGS = {
    "--build-arg", "--constraint", "--create-home", "--from-literal", "--gpus", "--home-dir", "--index-url", "--init",
    "--interval", "--ipc", "--name", "--no-cache-dir", "--no-install-recommends", "--now", "--reload", "--restart",
    "--retries", "--rm", "--shell", "--shm-size", "--start-period", "--system", "--time", "--timeout", "--uid",
    "--ulimit", "--user-group",
}  # fmt: skip


def serve_command() -> click.Command:
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    return command


def serve_flags() -> set[str]:
    return {flag for parameter in serve_command().params for flag in (*parameter.opts, *parameter.secondary_opts)}


def routes() -> set[str]:
    from pellucid.server.app import ROUTES

    return {route.path for route in ROUTES}


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "pellucid.service").read_text().replace("\\\n", " "))
    return parser


def deployment() -> dict[str, Any]:
    found, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return found


def pod() -> dict[str, Any]:
    return deployment()["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def argument(name: str) -> str:
    (value,) = [value for instruction, value in instructions() if instruction == name]
    return value


def parse_serve(arguments: list[str]) -> click.Context:
    """What `pellucid serve` makes of a command line. Raises click's errors."""
    return serve_command().make_context("serve", list(arguments))


def exec_start() -> list[str]:
    values = {
        "${PELLUCID_MODEL}": "model",
        "$PELLUCID_FLAGS": "--served-model-name x",
        "${CREDENTIALS_DIRECTORY}": "/run/credentials/pellucid.service",
    }
    line = unit()["Service"]["ExecStart"]
    for name, value in values.items():
        line = line.replace(name, value)
    return line.split()


@pytest.mark.parametrize("page", ["deploy/README.md", "deploy/Dockerfile", "deploy/pellucid.env", "docs/operate.md"])
def test_every_flag_that_a_page_names_is_a_flag_of_serve_or_doctor(page: str) -> None:
    from pellucid.cli.doctor import doctor

    named = set(FLAG.findall((ROOT / page).read_text())) - FOREIGN_FLAGS
    assert named <= serve_flags() | {flag for option in doctor.params for flag in option.opts}


def test_every_route_that_a_page_names_is_there() -> None:
    for page in ("deploy/README.md", "docs/operate.md"):
        named = set(re.findall(r"`(/[a-z_]+(?:/[a-z_]+)*)`", (ROOT / page).read_text())) - {"/dev/shm"}
        assert named, page
        assert named <= routes(), page


def test_the_unit_starts_the_server_with_flags_that_parse_and_a_key() -> None:
    program, verb, *arguments = exec_start()
    assert (program, verb) == ("/opt/pellucid/bin/pellucid", "serve")
    context = parse_serve(arguments)
    assert context.params["api_key_file"] == "/run/credentials/pellucid.service/api-keys"
    assert unit()["Service"]["LoadCredential"].startswith("api-keys:")


def test_the_unit_gives_the_drain_its_time_and_only_the_server_the_signal() -> None:
    service = unit()["Service"]
    drain = parse_serve(exec_start()[2:]).params["drain_timeout"]
    assert int(service["TimeoutStopSec"]) >= drain + 10
    assert (service["Type"], service["KillMode"], service["Restart"]) == ("notify", "mixed", "on-failure")
    assert int(service["TimeoutStartSec"]) >= LOAD_TIME_S


def test_the_unit_takes_neither_the_gpu_nor_its_compilers_away() -> None:
    service = unit()["Service"]
    assert not {"PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute", "ProcSubset"} & set(service)
    assert (service["LimitMEMLOCK"], service["NoNewPrivileges"]) == ("infinity", "yes")
    assert "AF_UNIX" in service["RestrictAddressFamilies"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "pellucid.service"
    copy.write_text((DEPLOY / "pellucid.service").read_text().replace("/opt/pellucid/bin/pellucid", "/bin/true"))
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_image_drops_root_and_gets_signals_itself() -> None:
    names = [name for name, _ in instructions()]
    assert argument("FROM").startswith("python:3.12-slim")
    assert argument("USER") == "10001:10001"
    assert names.index("USER") < names.index("ENTRYPOINT")
    program, verb, *arguments = json.loads(argument("ENTRYPOINT"))
    assert (program, verb) == ("pellucid", "serve")
    context = parse_serve(arguments + json.loads(argument("CMD")))
    assert context.params["host"] == "0.0.0.0"
    assert str(context.params["port"]) == argument("EXPOSE")
    assert f":{context.params['port']}/health'" in argument("HEALTHCHECK")


def test_the_image_copies_and_installs_what_exists() -> None:
    for name, value in instructions():
        if name == "COPY":
            assert all((ROOT / source).exists() for source in value.split()[:-1]), value
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {source for name, value in instructions() if name == "COPY" for source in value.split()[:-1]}
    assert copied <= {line[1:] for line in ignored if line.startswith("!")}
    (extras,) = [value for name, value in instructions() if name == "ARG" and value.startswith("EXTRAS=")]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= set(known)


def test_the_pod_starts_the_server_with_flags_that_parse_and_a_key() -> None:
    context = parse_serve(json.loads(argument("ENTRYPOINT"))[2:] + container()["args"])
    (mount,) = [m for m in container()["volumeMounts"] if m["name"] == "api-key"]
    assert Path(context.params["api_key_file"]).parent == Path(mount["mountPath"])
    assert [port["containerPort"] for port in container()["ports"]] == [context.params["port"]]
    mounted, volumes = {m["name"] for m in container()["volumeMounts"]}, {v["name"] for v in pod()["volumes"]}
    assert mounted == volumes


def test_probes_ask_what_they_should_and_wait_long_enough() -> None:
    startup, ready, live = (container()[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    assert [probe["httpGet"]["path"] for probe in (startup, ready, live)] == [
        "/health/ready", "/health/ready", "/health/live",
    ]  # fmt: skip
    assert {probe["httpGet"]["port"] for probe in (startup, ready, live)} == {container()["ports"][0]["name"]}
    assert startup["failureThreshold"] * startup["periodSeconds"] >= LOAD_TIME_S
    # Readiness pings the engine, and an answer that comes too late tells less than the one that names the last step.
    assert min(probe["timeoutSeconds"] for probe in (startup, ready)) > ServeArgs().health_timeout
    assert {probe["httpGet"]["path"] for probe in (startup, ready, live)} <= routes()


def test_termination_leaves_the_drain_its_time() -> None:
    drain = parse_serve(container()["args"]).params["drain_timeout"]
    assert pod()["terminationGracePeriodSeconds"] == drain + 10
    assert "lifecycle" not in container()


def test_the_pod_has_no_rights_that_it_does_not_need() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert f"{pod()['securityContext']['runAsUser']}:{pod()['securityContext']['runAsGroup']}" == argument("USER")
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container()["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod()["automountServiceAccountToken"] is False
    # `PELLUCID_PORT=tcp://...` of a Service called pellucid is not for us.
    assert pod()["enableServiceLinks"] is False
    assert container()["resources"]["limits"]["nvidia.com/gpu"] >= 1


def test_the_service_finds_the_pod() -> None:
    found, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]


def test_no_file_holds_a_key() -> None:
    for path in DEPLOY.iterdir():
        assert not re.search(r"(?i)api[-_]key\s*[=:]\s*['\"]?[\w-]{8,}['\"]?\s*$", path.read_text(), re.MULTILINE), path
    kinds = {document["kind"] for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    assert "Secret" not in kinds
