"""Answers of /v1/infer end to end: routed by content against the base model alone.

    python -m benchmarks.routing.answers [--items N] [--only TASK] [--json FILE]

Starts the real server with a new home folder and the shipped experts, then sends every held-out
item of every expert twice, greedily: once without a hint, so that the router chooses, and once to
the base model alone. Also sends questions that no expert is for
(routing_set/unrelated_tasks.jsonl), where routing must not make answers worse. Scored with the
metrics of the experts' manifests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from coterie.cli.expert.evaluate import read_stated
from coterie.packages import shipped
from coterie.packages.evaluate import judge, score
from coterie.weights.home import home

ROOT = Path(__file__).parents[2]
STREAMS = 16
ANSWER_TOKENS = 48
# how much worse answers to unrelated questions may be: one percentage point
ALLOWED_LOSS = 0.01


@dataclass(frozen=True)
class Task:
    """One prompt, and whether an answer to it is right."""

    group: str
    prompt: str
    max_tokens: int
    is_right: Callable[[str], bool]


@dataclass(frozen=True)
class Answered:
    task: Task
    right: bool
    experts: tuple[str, ...]


def expert_tasks(items: int | None) -> tuple[list[Task], dict[str, float]]:
    """Every held-out item of the shipped experts, and the margin each manifest states."""
    tasks, margins = [], {}
    for path in shipped.files():
        stated = read_stated(str(path))[""]
        name, metric = stated.name.partition("@")[0], stated.metric
        assert stated.figures is not None, f"{path.name} states no figures"
        said = stated.figures.first(items or len(stated.items))
        margins[name] = score(said.expert).share - score(said.base).share
        for item in stated.items[:items]:
            assert len(item.messages) == 1, "a held-out item is one turn of the user"
            judged = _judge(metric, item.expected)
            tasks.append(Task(name, item.messages[0]["content"], item.max_tokens, judged))
    return tasks, margins


def _judge(metric: str, expected: Any) -> Callable[[str], bool]:
    return lambda answer: judge(metric, answer, expected)


def unrelated_tasks(items: int | None) -> list[Task]:
    lines = (ROOT / "routing_set" / "unrelated_tasks.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:items]
    return [Task("none", row["prompt"], ANSWER_TOKENS, _names(row["answers"])) for row in rows]


def _names(accepted: Sequence[str]) -> Callable[[str], bool]:
    """A check that the answer contains one of these as whole words."""
    patterns = [re.compile(rf"(?<!\w){re.escape(text)}", re.IGNORECASE) for text in accepted]
    return lambda answer: any(pattern.search(answer) for pattern in patterns)


@contextmanager
def server() -> Iterator[str]:
    """`coterie serve` with the shipped experts; its address."""
    with tempfile.TemporaryDirectory(prefix="coterie-routed-") as folder:
        own = Path(folder)
        for name in ("kernels", "models"):
            if (home() / name).is_dir():
                (own / name).symlink_to(home() / name)
        environment = {**os.environ, "COTERIE_HOME": folder}
        command = [sys.executable, "-m", "coterie"]
        subprocess.run(
            [*command, "expert", "install", "--shipped"], check=True, env=environment,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        log = own / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [*command, "serve", "--port", "0"], env=environment, stderr=errors,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            yield asyncio.run(_ready(process, log))
        finally:
            process.terminate()
            process.wait(60)


async def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    url = None
    async with asyncio.timeout(180), httpx.AsyncClient() as client:
        while process.poll() is None:
            found = re.search(r"listening on (http://\S+?),", log.read_text())
            url = found[1] if found else None
            if url and (await client.get(f"{url}/health/ready")).status_code == 200:
                return url
            await asyncio.sleep(0.2)
    raise SystemExit(f"the server ended: {log.read_text()}")


async def until_routed(url: str) -> None:
    """Wait until the router works: its matcher is trained while the server already answers."""
    async with asyncio.timeout(120), httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"prompt": "Hello", "max_tokens": 1}
        while (await client.post("/v1/infer", json=body)).json()["degraded"]:
            await asyncio.sleep(0.5)


async def ask_all(url: str, tasks: Sequence[Task], **fields: Any) -> list[Answered]:
    """Greedy answers, a few at a time."""
    places = asyncio.Semaphore(STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def ask(task: Task) -> Answered:
            body = {"prompt": task.prompt, "temperature": 0, "repetition_penalty": 1.0,
                    "max_tokens": task.max_tokens, **fields}  # fmt: skip
            async with places:
                reply = await client.post("/v1/infer", json=body)
            reply.raise_for_status()
            answer = reply.json()
            return Answered(task, task.is_right(answer["text"]), tuple(answer["experts_used"]))

        return await asyncio.gather(*(ask(task) for task in tasks))


async def measure(url: str, items: int | None, only: str | None) -> dict[str, Any]:
    await until_routed(url)
    related, margins = expert_tasks(items)
    tasks = related + unrelated_tasks(items)
    tasks = [task for task in tasks if only in (None, task.group)]
    async with httpx.AsyncClient(base_url=url) as client:
        base = (await client.get("/v1/models")).json()["data"][0]["id"]
    routed = await ask_all(url, tasks)
    alone = await ask_all(url, tasks, model=base)
    return {
        group: _row(group, routed, alone, margins.get(group))
        for group in dict.fromkeys(task.group for task in tasks)
    }


def _row(
    group: str, routed: Sequence[Answered], alone: Sequence[Answered], margin: float | None
) -> dict[str, Any]:
    pairs = [(r, a) for r, a in zip(routed, alone, strict=True) if r.task.group == group]
    with_router, without = score([r.right for r, _ in pairs]), score([a.right for _, a in pairs])
    wanted = () if margin is None else (group,)
    return {
        "items": len(pairs),
        "base": without.share,
        "routed": with_router.share,
        "routed_95": [with_router.low, with_router.high],
        "margin": with_router.share - without.share,
        "margin_in_manifest": margin,
        "routed_right": sum(r.experts == wanted for r, _ in pairs) / len(pairs),
        "elsewhere": Counter(
            "+".join(r.experts) or "base" for r, _ in pairs if r.experts != wanted
        ),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| task | items | base | routed (95%) | margin | manifest | sent right |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, row in rows.items():
        low, high = row["routed_95"]
        said = row["margin_in_manifest"]
        stated = "-" if said is None else f"{said:+.1%}"
        lines.append(
            f"| {name} | {row['items']} | {row['base']:.1%} | {row['routed']:.1%} "
            f"({low:.1%} to {high:.1%}) | {row['margin']:+.1%} | {stated} "
            f"| {row['routed_right']:.1%} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, help="the first N of each task")
    parser.add_argument("--only", metavar="TASK", help="one expert, or `none`")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with server() as url:
        rows = asyncio.run(measure(url, arguments.items, arguments.only))
    print(table(rows))
    for name, row in rows.items():
        if row["elsewhere"]:
            print(f"{name} was also sent to {dict(row['elsewhere'])}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    lost = [name for name, row in rows.items() if row["margin"] < -ALLOWED_LOSS]
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
