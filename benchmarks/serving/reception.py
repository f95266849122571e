"""Time to read a request: from the bytes of a /v1/infer body to a checked, normalised request.

    python -m benchmarks.serving.reception [--rounds 2000]

Includes parsing, range checks, Unicode normalisation, the template and the user's rate limit, not
routing. Goal: a median under 1 ms for a body of 2 kB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from coterie.api.dialect import CallerInfo
from coterie.api.native.infer_body import InferBodyReader
from coterie.obs.metrics import MetricRegistry
from coterie.service.request_limits import UserRate

GOAL_MS = 1.0
FIELDS: dict[str, Any] = {
    "template": "Answer shortly.\n\n{prompt}\n\n{body}",
    "temperature": 0.3,
    "max_tokens": 512,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "exclude_experts": ["poems", "letters"],
    "max_experts": 2,
    "user_id": "somebody",
    "priority": 7,
    "timeout_ms": 30_000,
    "stop": ["END"],
}
# name -> the text that fills a body; accents are separate marks, which is the slow case
TEXTS = {
    "ascii": "What does the third clause of the contract say about notice? ",
    "decomposed": "Wie lautet die Ku\u0308ndigungsfrist, und fu\u0308r wen gilt sie? ",
}
SIZES = (200, 2_000, 20_000, 200_000)


def body_of(text: str, nbytes: int) -> bytes:
    filled = text * (nbytes // len(text.encode()) + 1)
    fields = {"prompt": text, "body": filled} | FIELDS
    return json.dumps(fields, ensure_ascii=False).encode()


def times_ms(raw: bytes, rounds: int) -> list[float]:
    registry = MetricRegistry()
    reception = InferBodyReader(UserRate(1e6), registry.histogram("coterie_reception_seconds"))
    caller = CallerInfo("tenant", time.monotonic())

    async def receive() -> list[float]:
        taken = []
        for _ in range(rounds):
            begun = time.perf_counter()
            await reception.receive(raw, caller, len(raw))
            taken.append((time.perf_counter() - begun) * 1000)
        return taken

    return sorted(asyncio.run(receive()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'text':<12}{'body bytes':>12}{'p50 ms':>10}{'p99 ms':>10}")
    for name, text in TEXTS.items():
        for nbytes in SIZES:
            raw = body_of(text, nbytes)
            taken = times_ms(raw, max(50, arguments.rounds * 200 // nbytes))
            p50, p99 = statistics.median(taken), taken[int(len(taken) * 0.99)]
            rows.append({"text": name, "bytes": len(raw), "p50_ms": p50, "p99_ms": p99})
            print(f"{name:<12}{len(raw):>12}{p50:>10.3f}{p99:>10.3f}")
    print(json.dumps({"goal_ms": GOAL_MS, "rows": rows}))
    usual = [row["p50_ms"] for row in rows if row["bytes"] < 4_000]
    return 0 if max(usual) < GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
