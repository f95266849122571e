"""ops/: the compose file and the systemd unit say what the commands and the image understand."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from coterie.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
COMPOSE, UNIT = ROOT / "ops" / "compose.yml", ROOT / "ops" / "coterie.service"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_compose_file_fits_the_image() -> None:
    told = yaml.safe_load(COMPOSE.read_text())
    exposed = re.search(r"^EXPOSE (\d+)$", DOCKERFILE, re.M)
    home = re.search(r"^ENV COTERIE_HOME=(\S+)$", DOCKERFILE, re.M)
    assert exposed is not None and home is not None
    for service in told["services"].values():
        # to this machine alone
        assert service["ports"] == [f"127.0.0.1:{exposed[1]}:{exposed[1]}"]
        assert service["volumes"] == [f"{next(iter(told['volumes']))}:{home[1]}"]
        build_parser().parse_args(service["command"])
        build = service["build"]
        context = build if isinstance(build, str) else build["context"]
        assert (COMPOSE.parent / context / "Dockerfile").is_file()
        for name in {} if isinstance(build, str) else build["args"]:
            assert re.search(rf"^ARG {name}=", DOCKERFILE, re.M)
    # nothing else needs it to be told who may ask
    assert set(told["services"]["coterie"]["environment"]) == {"COTERIE_API_KEY"}


def test_the_unit_starts_a_command_that_exists() -> None:
    service = unit()["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/coterie")
    args = build_parser().parse_args(arguments)
    assert args.command == "serve" and str(args.config).startswith("/etc/coterie/")
    assert service["Environment"] == f"COTERIE_HOME=/var/lib/{service['StateDirectory']}"
    # running requests end first (server.drain_s)
    assert int(service["TimeoutStopSec"]) > 30


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "coterie.service"
    # a program that is there, so that only the unit itself is judged
    copy.write_text(UNIT.read_text().replace("/opt/coterie/bin/coterie", shutil.which("sh") or ""))
    command = ["systemd-analyze", "verify", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    wrong = [line for line in done.stderr.splitlines() if "coterie.service" in line]
    assert done.returncode == 0 and wrong == []


def has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return (
        bool(shutil.which("docker")) and not subprocess.run(command, capture_output=True).returncode
    )


@pytest.mark.skipif(not has_compose(), reason="no docker compose here")
def test_docker_understands_the_compose_file() -> None:
    command = ["docker", "compose", "-f", str(COMPOSE), "--profile", "gpu", "config", "--quiet"]
    subprocess.run(command, check=True)
