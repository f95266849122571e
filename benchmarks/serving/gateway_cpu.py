"""CPU time of the gateway per streamed token: worker message to bytes on the client's socket.

    python -m benchmarks.serving.gateway_cpu [--streams 32] [--tokens 128] [--model MODEL]

The gateway (this process) runs the real HTTP application on uvloop; the worker is a real engine in
its own process, the clients are another process. Goal: under 40 microseconds per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

GOAL_US = 40.0

CLIENT = """
import asyncio, json, sys
port, streams, tokens, model = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

async def one(index):
    body = json.dumps({"model": model, "stream": True, "max_tokens": tokens, "ignore_eos": True,
        "temperature": 1.0, "seed": index,
        "messages": [{"role": "user", "content": f"Tell me story number {index}."}]}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: localhost\\r\\n")
    writer.write(b"connection: close\\r\\n")
    writer.write(b"content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body))
    writer.write(body)
    text = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in text, text[:500]
    return text.count(b"data: {")

async def main():
    print(sum(await asyncio.gather(*(one(i) for i in range(streams)))))

asyncio.run(main())
"""


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import uvicorn

    from coterie.api.app import create_app
    from coterie.core.config import load
    from coterie.service.build import build

    settings = {
        "server.port": 0,
        "server.log_level": "error",
        "specialists.0.model": arguments.model,
        "specialists.0.dtype": arguments.dtype,
        "engine.threads": arguments.threads,
    }
    config = load(None, settings)
    pipeline = build(config)
    ready: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    app = create_app(pipeline, config, ready.set_result)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, loop="uvloop", http="httptools", log_level="error",
                       access_log=False)
    )  # fmt: skip
    serving = asyncio.ensure_future(server.serve())
    failure = await ready
    if failure is not None:
        raise failure
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    model = pipeline.models()[0].name
    await clients(port, arguments.streams, 8, model)
    idle = await round_of(asyncio.sleep(2.0, result=0))
    runs = []
    for _ in range(arguments.rounds):
        short = await round_of(clients(port, arguments.streams, arguments.tokens // 4, model))
        long = await round_of(clients(port, arguments.streams, arguments.tokens, model))
        runs.append((short, long))
    server.should_exit = True
    await serving
    return report(arguments, idle, runs)


@dataclass(frozen=True)
class Round:
    cpu_s: float
    wall_s: float
    frames: int


async def round_of(work: Awaitable[int]) -> Round:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    frames = await work
    return Round(time.process_time() - cpu_s, time.perf_counter() - wall_s, frames)


def report(
    arguments: argparse.Namespace, idle: Round, runs: list[tuple[Round, Round]]
) -> dict[str, Any]:
    """Two costs per token: all time over all tokens, and the time of one more token.

    The second is the difference between long and short answers. It does not include the cost per
    request (parsing, tokenising, connection) and the cost of the gateway's timers while idle.
    """
    idle_rate = idle.cpu_s / idle.wall_s
    many, few = arguments.streams * arguments.tokens, arguments.streams * (arguments.tokens // 4)
    whole = [long.cpu_s / many for _, long in runs]
    more = [
        (long.cpu_s - short.cpu_s - idle_rate * (long.wall_s - short.wall_s)) / (many - few)
        for short, long in runs
    ]
    return {
        "streams": arguments.streams,
        "tokens_per_stream": arguments.tokens,
        "gateway_cpu_us_per_token": round(statistics.median(more) * 1e6, 1),
        "goal_us": GOAL_US,
        "with_requests_and_timers_us": round(statistics.median(whole) * 1e6, 1),
        "idle_cpu_ms_per_s": round(idle_rate * 1e3, 2),
        "tokens_per_s": round(statistics.median(many / long.wall_s for _, long in runs), 1),
        "frames_per_token": round(runs[0][1].frames / many, 2),
    }


async def clients(port: int, streams: int, tokens: int, model: str) -> int:
    command = [sys.executable, "-c", CLIENT, str(port), str(streams), str(tokens), model]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise SystemExit("the clients failed")
    return int(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    import uvloop

    result = uvloop.run(measure(arguments))
    for name, value in result.items():
        print(f"{name:28} {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
