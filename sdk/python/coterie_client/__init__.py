"""Client for a Coterie server: `ExpertClient`, and `AsyncExpertClient` for asyncio."""

from coterie_client.aio import AsyncExpertClient
from coterie_client.client import ExpertClient
from coterie_client.errors import (
    BadRequest,
    Conflict,
    ConnectionFailed,
    CoterieError,
    Forbidden,
    NotFound,
    RateLimited,
    ServerError,
    Timeout,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
)
from coterie_client.frames import Chunk
from coterie_client.streams import AsyncInferStream, InferStream

__all__ = [
    "AsyncExpertClient",
    "AsyncInferStream",
    "BadRequest",
    "Chunk",
    "Conflict",
    "ConnectionFailed",
    "CoterieError",
    "ExpertClient",
    "Forbidden",
    "InferStream",
    "NotFound",
    "RateLimited",
    "ServerError",
    "Timeout",
    "Unauthorized",
    "Unavailable",
    "UnexpectedAnswer",
]
