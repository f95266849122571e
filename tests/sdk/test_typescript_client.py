"""The TypeScript client: against the real server, against scripted answers, and as a package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.helpers.serving.sdk_clients import (
    CALLER,
    SEARCHED,
    TYPESCRIPT,
    node,
    run,
    tool,
    write_lora,
)
from tests.helpers.serving.server_process import Served
from tests.sdk.conftest import PageSite

CHROMIUM = "/usr/bin/chromium"
# what a browser or Deno may lack; names in comments do not count
NOT_OF_THE_WEB = re.compile(r"\b(require|Buffer|__dirname|setImmediate)\b|from \"node:|\bprocess\.")


def test_against_the_server(environment: dict[str, str], package: Path, tmp_path: Path) -> None:
    environment["LORA"] = str(write_lora(tmp_path / "lora"))
    told = run([node(), "--test", "--test-reporter=tap", package / "client.mjs"], environment)
    assert re.search(r"^# fail 0$", told, re.MULTILINE), told


def test_against_scripted_answers(package: Path) -> None:
    told = run([node(), "--test", "--test-reporter=tap", package / "retries.mjs"])
    assert re.search(r"^# fail 0$", told, re.MULTILINE), told


def test_nothing_of_node_is_needed(package: Path) -> None:
    for path in (TYPESCRIPT / "src").glob("*.ts"):
        found = NOT_OF_THE_WEB.search(path.read_text())
        # `host.process?.env` is asked for, not relied on
        assert found is None, f"{path.name}: {found[0] if found else ''}"
    assert '"dependencies"' not in (TYPESCRIPT / "package.json").read_text()
    bundle = (package / "node_modules/@coterie/client/dist/browser.js").read_text()
    assert not re.search(r"^import ", bundle, re.MULTILINE)


def test_without_what_only_node_has(environment: dict[str, str], package: Path) -> None:
    command = [node(), "--experimental-vm-modules", "--no-warnings", str(package / "bare.mjs")]
    assert run(command, environment) == "qqqqqqq BadRequest\n"


def test_in_deno(environment: dict[str, str], package: Path) -> None:
    deno = shutil.which("deno")
    if deno is None:
        pytest.skip("deno is not installed")
    flags = ["--node-modules-dir=manual", "--allow-net", "--allow-env", "--no-prompt"]
    example = package / "built/examples/seed_example.js"
    printed = run([deno, "run", *flags, example], environment)
    assert re.search(r"^Experts: \n.", printed, re.MULTILINE | re.DOTALL), printed


def test_in_a_browser(server: Served, package: Path, page_site: PageSite, tmp_path: Path) -> None:
    """In a page of another site that the server lets call."""
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"{CHROMIUM} is not installed")
    client = package / "node_modules/@coterie/client/dist/browser.js"
    (page_site.folder / "page.html").write_text(
        f"""<script type="module">{client.read_text()}
        const asked = new ExpertClient({{ apiKey: "{CALLER}", baseUrl: "{server.url}" }});
        const stream = asked.inferStream({{ prompt: "x", regex: "q{{7}}" }});
        let text = "";
        for await (const chunk of stream) text += chunk.text;
        console.log("the answer is " + text);
        </script>"""
    )
    # a module's messages come on standard error; the browser runs until it is ended
    flags = ["--headless", "--no-sandbox", "--disable-gpu",
             "--disable-background-networking", "--no-first-run", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    browser = subprocess.Popen(
        [CHROMIUM, *flags, f"{page_site.origin}/page.html"],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert browser.stderr is not None
    watchdog = threading.Timer(60, browser.kill)
    watchdog.start()
    try:
        told = next((line for line in browser.stderr if "the answer is" in line), "")
    finally:
        watchdog.cancel()
        browser.terminate()
        browser.wait(20)
        browser.stderr.close()
    assert "the answer is qqqqqqq" in told


@pytest.mark.full
def test_the_package_holds_what_it_exports(tmp_path: Path) -> None:
    folder = tmp_path / "typescript"
    shutil.copytree(TYPESCRIPT, folder, symlinks=True)
    for command in (["run", "build"], ["pack", "--ignore-scripts"]):
        done = subprocess.run(
            [tool("npm"), *command],
            cwd=folder,
            env={**os.environ, "PATH": SEARCHED},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    listed = run(["tar", "-tzf", next(folder.glob("*.tgz"))]).split()
    for name in ("dist/index.js", "dist/index.d.ts", "dist/browser.js", "README.md"):
        assert f"package/{name}" in listed
    assert not [name for name in listed if "node_modules" in name or name.endswith("/src/")]
