"""Writes inference_pb2.py and its types from inference.proto; `--check` fails on drift."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "coterie" / "api" / "proto"
SOURCE = "coterie/v1/inference.proto"
WRITTEN = ("coterie/v1/inference_pb2.py", "coterie/v1/inference_pb2.pyi")
# the release of the compiler does not matter for the content
_RELEASE = re.compile(r"^# Protobuf Python Version: .*$|^    \d+,$", re.MULTILINE)


def compiled(source: Path) -> dict[str, str]:
    """path -> text that the compiler writes for the protos under `source`."""
    import grpc_tools
    from grpc_tools import protoc

    # protobuf's own messages
    common = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            f"-I{source}",
            f"-I{common}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            SOURCE,
        ]
        if protoc.main(["protoc", *command]) != 0:
            raise SystemExit(f"{source / SOURCE} does not compile")
        return {name: (Path(folder) / name).read_text(encoding="utf-8") for name in WRITTEN}


def drifted(source: Path = ROOT) -> dict[str, str]:
    """For each file that is out of date: what it should contain."""

    def same(name: str, text: str) -> bool:
        path = ROOT / name
        return path.exists() and _RELEASE.sub("", path.read_text()) == _RELEASE.sub("", text)

    return {name: text for name, text in compiled(source).items() if not same(name, text)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on drift")
    args = parser.parse_args()
    outdated = drifted()
    for name, text in outdated.items():
        print(f"{name}: {'has drifted; run make docs' if args.check else 'written'}")
        if not args.check:
            (ROOT / name).write_text(text, encoding="utf-8")
    return 1 if outdated and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
