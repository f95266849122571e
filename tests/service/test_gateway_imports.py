"""torch never enters the gateway, in the text of the imports and in the live process."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.models.tiny import tiny_checkpoint

LIVE = """
import asyncio, sys, time
from coterie.core.config import load
from coterie.core.request import InferenceRequest, Limits, RouteHints, Sampling, Text
import coterie.adapters.check, coterie.models.text.tokenizer, coterie.routing.router
import coterie.workers.supervisor
from coterie.service.build import build

async def main():
    pipeline = build(load(None, {{"specialists.0.model": {model!r}, "engine.kv_bytes": "8MB"}}))
    await pipeline.start()
    request = InferenceRequest("a", Text("abc"), Sampling(), Limits(max_tokens=3, ignore_eos=True),
                               RouteHints(), None, None, "t", time.monotonic())
    print([type(event).__name__ async for event in pipeline.handle(request)][-1])
    await pipeline.close()
    print(sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "triton", "transformers")))

asyncio.run(main())
"""


def test_a_gateway_that_served_a_request_has_no_torch() -> None:
    code = LIVE.format(model=str(tiny_checkpoint("llama")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["Finished", "[]"]
