"""The process of an encoder, `python -m coterie.workers.encoder.child SOCKET`. It ends with its
parent: see lifeline.py. Its first message is the `EncoderSpec`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from coterie.core.errors import ConfigError, CoterieError
from coterie.models.encoder.spec import read_encoder_spec
from coterie.obs.log import configure, log
from coterie.workers.encoder.batches import BatchQueue, OpenJob
from coterie.workers.encoder.contract import (
    EncodeCommand,
    EncodeJob,
    EncodeReport,
    EncodeResult,
    EncoderInfo,
    EncoderLoaded,
    EncoderSpec,
    decode_encode_command,
    decode_encoder_spec,
)
from coterie.workers.lifeline import end, end_with_parent, first_message

if TYPE_CHECKING:
    from coterie.models.encoder.network import EncoderNetwork

_encode = msgspec.msgpack.Encoder().encode
_DTYPES = {"auto": "float32", "fp32": "float32", "bf16": "bfloat16"}


def main(address: str) -> int:
    spec = decode_encoder_spec(first_message())
    configure(spec.log_level)
    end_with_parent()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    # long enough to send the last messages, short enough not to wait for a parent that is gone
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(address)
    try:
        # torch is imported only now: the lifeline must already be watched
        network, info = load_encoder(spec)
        gc.freeze()
    except CoterieError as error:
        socket.send(_encode(EncoderLoaded(code=error.code, message=error.message)))
        socket.close()
        return 1
    socket.send(_encode(EncoderLoaded(info)))
    try:
        EncoderLoop(network, socket, spec.batch_tokens).run()
    except Exception as error:
        log("encoder_died", level="error", error=error, replica=spec.name)
        return 1
    socket.close()
    return 0


def load_encoder(spec: EncoderSpec) -> tuple[EncoderNetwork, EncoderInfo]:
    if spec.dtype not in _DTYPES:
        raise ConfigError(f"an encoder runs in {', '.join(_DTYPES)}, not in {spec.dtype}")
    model = read_encoder_spec(Path(spec.model), spec.pooling)
    import torch

    from coterie.models.encoder.network import EncoderNetwork
    from coterie.weights.checkpoint import open_checkpoint
    from coterie.workers.device import device_of, use_threads

    if spec.threads:
        use_threads(spec.threads)
    kind = device_of(spec.device)
    network = EncoderNetwork(model, torch.device(kind), getattr(torch, _DTYPES[spec.dtype]))
    network.encode([np.zeros(4, np.int32)])
    info = EncoderInfo(
        spec.name,
        os.getpid(),
        network.dim,
        {"float32": "fp32", "bfloat16": "bf16"}[_DTYPES[spec.dtype]],
        kind,
        torch.get_num_threads(),
        network.num_bytes,
        open_checkpoint(model.path).fingerprint(),
    )
    return network, info


class EncoderLoop:
    """Takes commands, computes batches, sends what is complete."""

    def __init__(
        self, network: EncoderNetwork, socket: zmq.Socket[bytes], batch_tokens: int
    ) -> None:
        self._network, self._socket = network, socket
        self._queue = BatchQueue(batch_tokens)
        self._stats = {"encode_batches": 0.0, "encode_tokens": 0.0, "encode_s": 0.0}

    def run(self) -> None:
        while True:
            for command in self._commands(wait=not len(self._queue)):
                if command.kind == "stop":
                    return
                if command.kind == "abort":
                    self._queue.drop(command.job_id)
                elif command.job is not None:
                    self._queue.add(open_job(command.job, self._network.dim))
            self._step()

    def _step(self) -> None:
        rows = self._queue.take()
        if not rows:
            return
        begun = time.monotonic()
        for row in rows:
            if row.job.begun_at is None:
                row.job.begun_at = begun
        inputs = [row.job.inputs[row.index] for row in rows]
        vectors = self._network.encode(inputs, _splits([(row.job, row.index) for row in rows]))
        ended = time.monotonic()
        self._stats["encode_s"] += ended - begun
        self._stats["encode_batches"] += 1
        self._stats["encode_tokens"] += sum(map(len, inputs))
        results = [
            EncodeResult(job.job_id, job.vectors.tobytes(), ended - (job.begun_at or begun))
            for job in self._queue.done(rows, vectors)
        ]
        # also without results: the parent sees that the process works
        self._socket.send(_encode(EncodeReport(results, self._stats)))

    def _commands(self, wait: bool) -> Iterator[EncodeCommand]:
        if wait:
            yield decode_encode_command(self._socket.recv())
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_encode_command(message)


def open_job(job: EncodeJob, dim: int) -> OpenJob:
    lengths = np.frombuffer(job.lengths, np.int32)
    ids = np.frombuffer(job.ids, np.int32)
    splits = np.frombuffer(job.splits, np.int32).tolist() if job.splits else None
    inputs = np.split(ids, np.cumsum(lengths)[:-1])
    return OpenJob(job.job_id, job.owner, inputs, splits, dim)


def _splits(rows: Sequence[tuple[OpenJob, int]]) -> list[int] | None:
    if all(job.splits is None for job, _ in rows):
        return None
    return [
        len(job.inputs[index]) if job.splits is None else job.splits[index] for job, index in rows
    ]


if __name__ == "__main__":
    end(main(sys.argv[1]))
