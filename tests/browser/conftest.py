"""A real browser, and servers that it looks at: one without keys for callers, one with keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, own_home

ADMIN, CALLERS = "key-of-an-admin", ("key-of-one", "key-of-two")
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
AXE = "axe-core@4.10.3"
CACHE = Path(__file__).parents[2] / ".cache" / "browser"
SETTINGS = """
[server]
admin_key_file = "{home}/admins.txt"
{keys}
[engine]
kv_bytes = "16MB"
threads = 1
[[specialists]]
name = "sql"
model = "{model}"
context = 256
fallback = "spare"
[[specialists]]
name = "spare"
model = "{model}"
context = 256
"""
EXPERTS = """
[[specialists]]
name = "experts"
model = "{model}"
context = 96
[specialists.moe]
strategy = "lru"
cache_capacity = 4
host_budget = "0"
"""
# how Chromium begins its own lines about a status from 400 on or a server that is not there, and
# about the page's policy at work on a script that a test put in
EXPECTED = ("Failed to load resource:", "Executing inline script violates")
NewPage = Callable[..., Page]


def chromium_path() -> str | None:
    given = os.environ.get("COTERIE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    return given


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium_path()
    if path is None:
        pytest.skip(
            "no Chromium here: `apt-get install chromium`, or set COTERIE_CHROMIUM to its path"
        )
    with sync_playwright() as playwright:
        # in containers there is no user namespace for its sandbox
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    """Makes pages of contexts of their own: `new_page(served, width=320, path="/", ...)`. What a
    page logs as an error, or asks of another server, fails the test; a refusal of the server that
    the browser logs is no error of the page's."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def make(
        served: Served, *, key: str = "", admin: str = "", width: int = 1280, height: int = 900,
        wait: bool = True, path: str = "/dashboard", **options: Any,
    ) -> Page:  # fmt: skip
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        for name, value in (("api-key", key), ("admin-key", admin)):
            if value:
                stored = f"sessionStorage.setItem('coterie.{name}', {json.dumps(value)})"
                page.add_init_script(stored)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda said: (
                problems.append(said.text)
                if said.type == "error" and not said.text.startswith(EXPECTED)
                else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((served.url, "data:"))
                else problems.append(request.url)
            ),
        )
        page.goto(served.url + path)
        if wait and path == "/dashboard":
            page.wait_for_selector("#specialists-body tbody tr")
        return page

    yield make
    for context in contexts:
        context.close()
    assert not problems, problems


def config_file(home: Path, *, has_callers: bool, has_experts: bool) -> Path:
    (home / "admins.txt").write_text(ADMIN + "\n")
    (home / "keys.txt").write_text("\n".join(CALLERS) + "\n")
    for name in ("admins.txt", "keys.txt"):
        (home / name).chmod(0o600)
    keys = f'api_key_file = "{home}/keys.txt"' if has_callers else ""
    text = SETTINGS.format(home=home, keys=keys, model=tiny_checkpoint("llama"))
    if has_experts:
        # a copy: what is served leaves its heatmap beside the model
        text += EXPERTS.format(model=shutil.copytree(tiny_checkpoint("qwen3_moe"), home / "moe"))
    file = home / "coterie.toml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def open_server() -> Iterator[Served]:
    """Callers need no key; one specialist has MoE experts."""
    home = own_home(temporary_folder("coterie-home-"))
    file = config_file(home, has_callers=False, has_experts=True)
    served = Served("--config", str(file), COTERIE_HOME=str(home))
    yield served
    served.stop()
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[Served]:
    """Callers need a key."""
    home = own_home(temporary_folder("coterie-home-"))
    file = config_file(home, has_callers=True, has_experts=False)
    served = Served("--config", str(file), COTERIE_HOME=str(home))
    yield served
    served.stop()
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, fetched once from the package index of Node."""
    folder = CACHE / AXE
    if not (folder / "axe.min.js").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            packed = subprocess.run(
                ["npm", "pack", AXE, "--silent", "--pack-destination", scratch],
                check=True, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            with tarfile.open(Path(scratch) / packed.stdout.strip()) as archive:
                member = archive.extractfile("package/axe.min.js")
                assert member is not None
                part = folder / f"axe.{os.getpid()}"
                part.write_bytes(member.read())
                part.rename(folder / "axe.min.js")
    return (folder / "axe.min.js").read_text()
