"""What the container runs: a server on a public address that asks for a key."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.models.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ops" / "container_start.sh"
LIMIT_S = 90.0


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "COTERIE_API_KEY"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "COTERIE_HOME": str(home), **more}


@contextmanager
def container(home: Path, **more: str) -> Iterator[tuple[str, Path]]:
    """The address of the server and what it printed."""
    out = home.parent / "out"
    command = [str(SCRIPT), "serve", str(tiny_checkpoint("llama")), "--host", "0.0.0.0"]
    command += ["--port", "0", "--threads", "1"]
    with out.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(home, **more)
        )
    try:
        end = time.monotonic() + LIMIT_S
        while not (port := re.search(r"listening on http://\S+?:(\d+)", out.read_text())):
            assert process.poll() is None, out.read_text()
            assert time.monotonic() < end, out.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port[1]}", out
    finally:
        process.terminate()
        process.wait(60)


def admits(url: str, key: str | None) -> bool:
    """Whether the key is known; the model may still load."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/models", headers=headers)
        ) as r:
            return r.status == 200
    except urllib.error.HTTPError as error:
        error.close()
        return error.code != 401


def test_the_image_is_an_argument_and_packages_come_by_digest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    base = re.search(r"^ARG BASE_IMAGE=\S+\nFROM \$\{BASE_IMAGE\}$", text, re.MULTILINE)
    assert base and text.count("\nFROM ") == 1
    installs = re.findall(r"pip install (.*)", text)
    assert installs and all("--no-deps" in line for line in installs)
    [own] = [line for line in installs if "--require-hashes" not in line]
    assert own.endswith(" .")


def test_examples_publish_their_port_to_this_machine_alone() -> None:
    told = [ROOT / "Dockerfile", *ROOT.glob("ops/*"), *ROOT.glob("*.md")]
    told += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    published = [
        port
        for path in told
        for line in path.read_text().splitlines()
        if "docker run" in line
        for port in re.findall(r"(?:-p|--publish)[ =](\S+)", line)
    ]
    assert published and all(port.startswith("127.0.0.1:") for port in published), published


def test_a_key_is_made_once_or_taken_from_the_environment(tmp_path: Path) -> None:
    home = tmp_path / "data"
    home.mkdir()
    with container(home) as (url, out):
        printed = re.findall(r"^API key .*: (\S+)$", out.read_text(), re.M)
        (key,) = printed
        assert [admits(url, None), admits(url, "another"), admits(url, key)] == [False, False, True]
    kept = home / "api-keys"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text().split() == [key]
    # the next start prints no key; this one ends, as its model does not exist
    again = subprocess.run(
        [SCRIPT, "serve", str(tmp_path / "none"), "--host", "0.0.0.0", "--port", "0"],
        capture_output=True,
        text=True,
        env=environment(home),
    )
    assert again.returncode != 0
    assert key not in again.stdout + again.stderr
    assert kept.read_text().split() == [key]
    # a key of the operator's replaces the one that was made
    with container(home, COTERIE_API_KEY="operator-key") as (url, out):
        assert [admits(url, "operator-key"), admits(url, key)] == [True, False]
        assert "operator-key" not in out.read_text()
    modes = {stat.S_IMODE(file.stat().st_mode) for file in home.glob("api-keys*")}
    assert modes == {0o600}


def test_other_commands_and_keys_of_ones_own_are_passed_on(tmp_path: Path) -> None:
    for arguments in (["version"], ["serve", "--help"], ["serve", "-h"]):
        done = subprocess.run(
            [SCRIPT, *arguments], capture_output=True, text=True, env=environment(tmp_path)
        )
        assert done.returncode == 0, done.stderr
    refused = subprocess.run(
        [SCRIPT, "serve", "--api-key-file", str(tmp_path / "none"), "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
    )
    assert refused.returncode != 0 and "key file" in refused.stderr
    assert not list(tmp_path.glob("api-keys*"))


def test_a_key_that_would_be_a_comment_is_refused(tmp_path: Path) -> None:
    for key in ("#secret", "  # secret"):
        refused = subprocess.run(
            [SCRIPT, "serve", "--host", "0.0.0.0", "--port", "0"],
            capture_output=True,
            text=True,
            env=environment(tmp_path, COTERIE_API_KEY=key),
        )
        assert refused.returncode == 2 and "COTERIE_API_KEY begins with #" in refused.stderr
        assert "secret" not in refused.stdout + refused.stderr
    assert not list(tmp_path.glob("api-keys*"))
