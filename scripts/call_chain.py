"""How far it is through the code: `python scripts/call_chain.py chat MODEL`, or `moe MODEL`.

Two roads, each run for real through the command line of the tree at `--root` (this one by default):

- `chat`: a chat request to `coterie serve`, from HTTP to `CausalLM.forward` in the worker process;
- `moe`: a MoE expert that is in no memory, from `Engine.step` to the read of its bytes, while
  `coterie run` generates with strategy `lru`, few device slots and no host tier.

The work changes hands once on each road (gateway to worker, engine to loader thread), so a road is
measured in two parts. **Frames** are the functions of coterie/ on the stack where a part ends, the
outermost first; a task counts as called by the code that created it, and a comprehension is part of
the function around it. Of a loop that waits for work, the frames above it do not count: they were
there before the request was. **Files called** are those of coterie/ in which a function was called
from a part's beginning to its end: helpers that have returned count, what other tasks and threads
call does not. The last passage is told, so caches are as they are in a running server.

docs/architecture.md draws both roads, and a test holds them to the figures there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """From a function that `begins` it to one that `ends` it; coterie's own, or called by it."""

    name: str
    begins: str
    ends: str
    # `begins` is still running at the end, and calls that it did not make are not part of it
    inside: bool


ROADS = {
    "chat": (
        Part("gateway", "Door.__call__", "Socket.send", inside=True),
        Part("worker", "_read_command", "CausalLM.forward", inside=False),
    ),
    "moe": (
        Part("engine", "Engine.step", "Condition.notify", inside=True),
        Part("loader", "Condition.wait", "preadv", inside=False),
    ),
}

COMMANDS = {
    "chat": ["serve", "--port", "0", "--kv-bytes", "64MB"],
    "moe": [
        "run", "--raw", "--prompt", "Once upon a time", "--ignore-eos", "--max-tokens", "8",
        "--strategy", "lru", "--cache-capacity", "6", "--host-budget", "0", "--warmup", "none",
        "--kv-bytes", "8MB",
    ],
}  # fmt: skip


class Recorder:
    """Sees every call in this process and writes down the last passage of each part."""

    def __init__(self, package: str, parts: Sequence[Part], folder: str) -> None:
        self._package, self._parts, self._folder = f"{package}/", parts, Path(folder)
        # of a task's outermost frame: the stack that created the task
        self._creators: dict[FrameType, list[FrameType]] = {}
        # of the parts that each thread is on: the stack where it began, and the files so far
        self._passages: dict[tuple[int, Part], tuple[list[FrameType], set[str]]] = {}

    def install(self) -> None:
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        code, is_own = frame.f_code, self._is_own(frame)
        if event == "call" and code.co_name in ("create_task", "ensure_future"):
            self._remember_creator(frame)
        if event == "c_call" and is_own:
            self._reach(argument.__name__, frame)
        elif event == "call" and is_own:
            self._reach(code.co_qualname, frame, called=True)
        elif event in ("call", "return") and self._is_own(frame.f_back):
            self._reach(code.co_qualname, frame)

    def _reach(self, name: str, frame: FrameType, called: bool = False) -> None:
        for part in self._parts:
            place = (threading.get_ident(), part)
            if name == part.begins:
                self._passages[place] = (self._stack(frame), set())
            if place not in self._passages:
                continue
            began, files = self._passages[place]
            stack = self._stack(frame)
            shared = [item for item in stack if item in began]
            if not shared or (part.inside and shared[-1] is not began[-1]):
                continue
            if called:
                files.add(self._file(frame))
            if name == part.ends:
                del self._passages[place]
                own = stack[stack.index(shared[-1]) :]
                frames = [f"{self._file(item)}:{item.f_code.co_qualname}" for item in own]
                found = {"frames": frames, "files": sorted(files)}
                (self._folder / part.name).write_text(json.dumps(found))

    def _remember_creator(self, frame: FrameType) -> None:
        for argument in frame.f_locals.values():
            if (first := getattr(argument, "cr_frame", None)) is not None:
                self._creators.setdefault(first, self._stack(frame))

    def _stack(self, frame: FrameType | None) -> list[FrameType]:
        """coterie's own frames, outermost first."""
        found: list[FrameType] = []
        created_by: list[FrameType] = []
        while frame is not None and not created_by:
            if self._is_own(frame) and not frame.f_code.co_name.startswith("<"):
                found.append(frame)
            created_by = self._creators.get(frame, [])
            frame = frame.f_back
        return created_by + found[::-1]

    def _is_own(self, frame: FrameType | None) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(self._package)

    def _file(self, frame: FrameType) -> str:
        return frame.f_code.co_filename.removeprefix(self._package)


def measure(road: str, model: str, root: Path = ROOT) -> dict[str, dict[str, list[str]]]:
    """The frames and files of each part of `road`, with `model`, in the tree at `root`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Python imports it at the start of every process: the server's, its workers'
        (folder / "sitecustomize.py").write_text(
            f"import sys; sys.path.append({str(ROOT / 'scripts')!r})\n"
            f"from call_chain import ROADS, Recorder\n"
            f"Recorder({str(root / 'coterie')!r}, ROADS[{road!r}], {name!r}).install()\n"
        )
        env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{folder}"}
        command = [sys.executable, "-m", "coterie", *COMMANDS[road], model]
        run = partial(subprocess.Popen, command, env=env, cwd=root, stdout=subprocess.DEVNULL)
        if road == "chat":
            with run(text=True, stderr=subprocess.PIPE) as server:
                try:
                    _chat(server)
                finally:
                    server.terminate()
        elif (status := run().wait()) != 0:
            sys.exit(f"{' '.join(command)}: exit status {status}")
        return {part.name: json.loads((folder / part.name).read_text()) for part in ROADS[road]}


def _chat(server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    found = (re.search(r"http://[\w.:]+", line) for line in server.stderr)
    address = next(match[0] for match in found if match)
    threading.Thread(target=server.stderr.read, daemon=True).start()
    for _ in range(2):
        _ask(f"{address}/v1/chat/completions")


def _ask(url: str) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    while True:
        try:
            urllib.request.urlopen(request).read()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            # the model is being loaded
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("road", choices=ROADS)
    parser.add_argument("model", help="a checkpoint; for `moe` one with MoE experts")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to measure")
    arguments = parser.parse_args()
    parts = measure(arguments.road, arguments.model, arguments.root.resolve())
    frames = [frame for part in parts.values() for frame in part["frames"]]
    stacked = {frame.partition(":")[0] for frame in frames}
    called = sorted({file for part in parts.values() for file in part["files"]})
    total = f"{len(frames)} frames in {len(stacked)} files, {len(called)} files called"
    print(f"{arguments.road}: {total}")
    for name, part in parts.items():
        print(f"  {name}")
        for frame in part["frames"]:
            print(f"    {frame}")
    print("  files called")
    for file in called:
        print(f"    {file}")


if __name__ == "__main__":
    main()
