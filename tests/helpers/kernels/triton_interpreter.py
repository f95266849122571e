"""Kernels in Triton's interpreter, which is chosen when triton is imported: cases run in a child.

A test file has a function `measure(cases)` that returns {case: number}; `interpreted` calls it in
the child, which is this module as a program. One child serves all test files of a process: to
import torch and triton takes longer than many cases. Here too: batches over a shuffled pool,
errors, and a newer numpy.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.kernels.batch import AttentionBatch


@cache
def _child() -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.kernels.triton_interpreter"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def interpreted(file: str, cases: Sequence[str]) -> dict[str, float]:
    """What the file's `measure` finds. The child ends when its input does, with this process."""
    child = _child()
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps([file, list(cases)]) + "\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    assert answer, f"the interpreter ended with {child.wait()}"
    found: dict[str, float] | str = json.loads(answer)
    assert isinstance(found, dict), found
    return found


def _serve() -> None:
    allow_new_numpy()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        file, cases = json.loads(line)
        try:
            found: Any = runpy.run_path(file)["measure"](cases)
        except Exception:
            found = traceback.format_exc()
        print(json.dumps(found), file=answers, flush=True)


def random_batch(
    rows: list[int], contexts: list[int], block_size: int, generator: torch.Generator
) -> tuple[AttentionBatch, int]:
    """Block tables over a shuffled pool; every block belongs to one sequence."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts), generator=generator).int()
    tables = torch.zeros((len(contexts), max(counts) + 1), dtype=torch.int32)
    positions, slots, used = [], [], 0
    for index, (count, context, new) in enumerate(zip(counts, contexts, rows, strict=True)):
        tables[index, :count] = order[used : used + count]
        used += count
        where = torch.arange(context - new, context)
        positions.append(where)
        slots.append(tables[index, where // block_size].long() * block_size + where % block_size)
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    lengths = torch.tensor(contexts, dtype=torch.int32)
    batch = AttentionBatch(
        torch.cat(positions), torch.cat(slots), starts, lengths, tables, block_size
    )
    return batch, sum(counts)


def on_host() -> torch.device:
    """For tensors that are in the host's memory when the same cases run on a device."""
    return torch.device("cpu")


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    error = ((got - want).norm() / want.norm()).item()
    return error if error == error else float("inf")


def allow_new_numpy() -> None:
    """triton 3.6's interpreter turns one-element arrays into loop bounds, which numpy 2.4 no longer
    does by itself."""
    from triton.runtime import interpreter

    original: Callable[..., None] = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    _serve()
