"""Answers with vectors as JSON. Rows are written one by one, so that a thread that writes a large
answer never holds the interpreter for long."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.api.errors import encode

# numbers of an answer up to this many are written at once: a thread would take longer
INLINE_VALUES = 4096


def embedding_list(
    vectors: NDArray[np.float32], as_base64: bool, model: str, num_tokens: int
) -> bytes:
    """OpenAI's list of embeddings."""
    little = vectors.astype("<f4", copy=False)
    rows = [_row(index, row, as_base64) for index, row in enumerate(little)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    tail = encode({"model": model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(rows) + b"]," + tail[1:]


def _row(index: int, row: NDArray[np.float32], as_base64: bool) -> bytes:
    value: Any = base64.b64encode(row.tobytes()).decode() if as_base64 else row.tolist()
    return encode({"object": "embedding", "index": index, "embedding": value})


def rerank_list(
    answer_id: str,
    model: str,
    ranked: Sequence[tuple[int, float]],
    documents: Sequence[dict[str, Any]] | None,
    num_tokens: int,
) -> bytes:
    """The answer of Jina's rerank, which Cohere's clients read as well."""
    results = []
    for index, score in ranked:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if documents is not None:
            result["document"] = documents[index]
        results.append(result)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return encode(
        {"id": answer_id, "object": "list", "model": model, "results": results, "usage": usage}
    )


def score_list(
    answer_id: str, created: int, model: str, scores: Sequence[float], num_tokens: int
) -> bytes:
    """vLLM's list of scores."""
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    head = {"id": answer_id, "object": "list", "created": created, "model": model}
    return encode(head | {"data": data, "usage": usage})
