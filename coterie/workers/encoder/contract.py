"""The messages between the gateway and an encoder's process, as msgpack.

Gateway to child: an `EncoderSpec`, then `EncodeCommand`s. Child to gateway: an `EncoderLoaded`,
then `EncodeReport`s. Token ids and vectors travel as plain bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from coterie.workers.worker_process import WorkerProgram


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Everything an encoder's process needs. `name` is the replica's."""

    name: str
    model: str
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    pooling: str = "auto"
    batch_tokens: int = 4096
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What was loaded."""

    name: str
    pid: int
    dim: int
    dtype: str
    device: str
    threads: int
    weight_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class EncoderLoaded:
    """The first message of the child: what it loaded, or the error if it could not load."""

    info: EncoderInfo | None = None
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """The inputs of one request. `ids`: all tokens, int32; `lengths` and `splits`: one int32 for
    each input. No splits = no pairs."""

    job_id: str
    owner: str
    ids: bytes
    lengths: bytes
    splits: bytes = b""


@dataclass(frozen=True, slots=True)
class EncodeCommand:
    """`kind` is encode, abort or stop."""

    kind: str
    job_id: str = ""
    job: EncodeJob | None = None


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """Vectors as float32, row by row. `compute_s`: from the job's first batch to its last."""

    job_id: str
    vectors: bytes
    compute_s: float = 0.0


@dataclass(slots=True)
class EncodeReport:
    results: list[EncodeResult] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)


decode_encoder_spec = msgspec.msgpack.Decoder(EncoderSpec).decode
decode_encode_command = msgspec.msgpack.Decoder(EncodeCommand).decode

ENCODER_PROGRAM: WorkerProgram[EncoderInfo, EncodeReport] = WorkerProgram(
    module="coterie.workers.encoder.child",
    decode_loaded=msgspec.msgpack.Decoder(EncoderLoaded).decode,
    decode_report=msgspec.msgpack.Decoder(EncodeReport).decode,
    stop=EncodeCommand("stop"),
)
