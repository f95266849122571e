"""The process of an encoder: a job that meets two deaths fails alone, and the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from coterie.core.errors import WorkerCrashed
from coterie.workers.encoder.contract import EncodeJob, EncoderSpec
from coterie.workers.encoder.replica import EncoderReplica
from coterie.workers.supervisor import RestartPolicy
from tests.helpers.models.tiny_encoder import tiny_encoder


def job(name: str, count: int) -> EncodeJob:
    ids = np.arange(5, 5 + 40 * count, dtype=np.int32) % 300
    return EncodeJob(name, "acme", ids.tobytes(), np.full(count, 40, np.int32).tobytes())


@pytest.mark.full
def test_a_job_that_meets_two_deaths_fails_alone(tmp_path: Path) -> None:
    async def test() -> None:
        spec = EncoderSpec("n0r0", str(tiny_encoder(tmp_path / "m")), threads=1)
        replica = EncoderReplica(spec, RestartPolicy(0.05, 1.0, 60.0, 60.0))
        await replica.start()
        try:
            first = replica.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            poison = asyncio.ensure_future(replica.encode(job("poison", 400)))
            other = asyncio.ensure_future(replica.encode(job("other", 3)))
            await asyncio.sleep(0.05)
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(60):
                while replica.pid in (None, first):
                    await asyncio.sleep(0)
            # it has the first of the two, alone
            assert replica.pid is not None and replica.in_flight() == 2
            os.kill(replica.pid, signal.SIGKILL)
            with pytest.raises(WorkerCrashed, match="died twice"):
                await poison
            assert (await other).rows.shape == (3, 48)
            assert replica.stats()["restarts"] == 2
            assert replica.stats()["requests_continued"] == 2
            again = await replica.encode(job("poison", 400))
            assert np.isfinite(again.rows).all() and again.compute_s > 0
        finally:
            await replica.close()

    asyncio.run(test())
