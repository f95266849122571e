"""`coterie run`: one answer in this process, without a server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.better import add_yes, offer_better, take_better
from coterie.cli.options import (
    add_capture,
    add_experts,
    add_model,
    add_moe,
    add_sampling,
    fetch,
    moe_options,
    token_ids,
)
from coterie.cli.specialist import add_specialist, use_specialist
from coterie.cli.terminal import facts, narrate, nbytes, note
from coterie.core.adapters import DEFAULTS, AdapterSettings
from coterie.core.errors import InvalidRequest
from coterie.core.events import moe_facts, speed

if TYPE_CHECKING:
    from coterie.core.events import Timings, Usage
    from coterie.core.moe import MoeUsage
    from coterie.workers.embedded import LLM

HELP = "answer one prompt in this process"
EPILOG = """\
examples:
  coterie run --prompt "What is the capital of France?" --temperature 0
  coterie run --raw --prompt "The capital of France is" --max-tokens 8
  coterie run --expert json-extract --prompt "..."     with an installed expert
  coterie run --expert ./my-lora=0.8 --expert tone.expert --prompt "..."
  coterie run ./moe --prompt "Hello" --device-budget 6GB --report
  coterie run ./moe --prompt - --trace run.npz < letter.txt
  coterie run --prompt-ids 1,2,3 --json                text, ids, usage as JSON
  cat letter.txt | coterie run --prompt -              from standard input
  coterie run --config coterie.toml --specialist sql --prompt "..."

A model with a chat template is asked as in a chat; --raw leaves the template
out and lets the model go on with the text. --trace is for coterie plan --trace.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_capture(parser)
    add_yes(parser)
    add_specialist(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    prompt.add_argument("--prompt-ids", type=token_ids, metavar="1,2,3", help="as token ids")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="use the chat template; the default where the model has one",
    )
    form.add_argument("--raw", action="store_true", help="complete the text, without a template")
    add_sampling(parser, max_tokens=128)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="may be given repeatedly")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the end token")
    parser.add_argument("--json", action="store_true", help="print JSON when it is done")
    parser.add_argument("--report", action="store_true", help="say afterwards what it cost")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="record routing for coterie plan"
    )
    add_experts(parser)
    add_moe(parser)


def open_llm(args: argparse.Namespace) -> LLM:
    from coterie.workers.embedded import LLM

    narrate()
    experts = getattr(args, "expert", None) or []
    allow_unsigned = getattr(args, "allow_unsigned", False)
    _find(experts, allow_unsigned)
    llm = LLM(
        str(fetch(args.model)),
        dtype=args.dtype or "auto",
        device=args.device or "auto",
        threads=args.threads or 0,
        kv_bytes=args.kv_bytes or 0,
        capture_graphs=getattr(args, "capture_graphs", None) or "lazy",
        context=args.context or 0,
        # memory for adapters is reserved only if experts are requested
        adapters=DEFAULTS if experts else AdapterSettings(device_bytes=0),
        allow_unsigned=allow_unsigned,
        moe=moe_options(args),
    )
    try:
        llm.prepare(experts)
    except BaseException:
        llm.close()
        raise
    return llm


def _find(experts: list[str], allow_unsigned: bool) -> None:
    """Ends the command for unknown names before a model is loaded; reports unsigned directories."""
    from coterie.workers.adapter_names import AdapterNames, parse

    names = AdapterNames(allow_unsigned=allow_unsigned)
    try:
        for text in experts:
            names.find(parse(text)[0])
    finally:
        names.close()
    for path, card in names.imported.items():
        # for a package, the registry has already reported --allow-unsigned
        if not card.signer and Path(path).is_dir():
            note(f"{path}: not signed, used because you named it ({card.digest[:12]})")


def options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
    options_given = {name: getattr(args, name, None) for name in names}
    options_given["experts"] = getattr(args, "expert", None)
    return {name: value for name, value in options_given.items() if value is not None}


def execute(args: argparse.Namespace) -> int:
    take_better(args)
    better: list[str] = []
    offer_better(args, "run", better.append)
    status = _answered(use_specialist(args))
    # known by now, or not worth to wait for
    for line in better:
        note(line)
    return status


def _answered(args: argparse.Namespace) -> int:
    text = _text(args)
    started = time.perf_counter()
    with open_llm(args) as llm, llm.traced(args.trace) if args.trace else nullcontext():
        load_s = time.perf_counter() - started
        prompt = _prompt(args, text, has_template=llm.tokenizer.chat_template is not None)
        if args.json:
            answer = _answer(llm, prompt, options(args), load_s, args.report)
            print(json.dumps(answer, ensure_ascii=False))
            return 0
        stream = llm.stream(prompt, **options(args))
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        end = stream.finished
        if args.report and end is not None:
            note("\n" + render(report(llm, end.usage, end.timings, end.moe, load_s)))
    return 0


def _text(args: argparse.Namespace) -> str:
    """Read before the model is loaded, so that a wrong command ends at once."""
    if args.prompt_ids is not None:
        if args.chat:
            raise InvalidRequest("--chat needs --prompt")
        return ""
    return sys.stdin.read() if args.prompt == "-" else str(args.prompt)


def _prompt(
    args: argparse.Namespace, text: str, has_template: bool
) -> str | list[int] | list[dict[str, str]]:
    if args.prompt_ids is not None:
        ids: list[int] = args.prompt_ids
        return ids
    is_chat = args.chat or (has_template and not args.raw)
    return [{"role": "user", "content": text}] if is_chat else text


def _answer(
    llm: LLM,
    prompt: str | Sequence[Any],
    given: Mapping[str, Any],
    load_s: float,
    with_report: bool,
) -> dict[str, Any]:
    is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)
    done = llm.chat(prompt, **given) if is_chat else llm.generate(prompt, **given)[0]  # type: ignore[arg-type]
    usage = asdict(done.usage)
    usage["total_tokens"] = done.usage.prompt_tokens + done.usage.completion_tokens
    answer = {
        "text": done.text,
        "token_ids": done.token_ids,
        "prompt_token_ids": done.prompt_token_ids,
        "finish_reason": done.choices[0].finish_reason,
        "seed": done.seed,
        "usage": usage,
        "timings": asdict(done.timings) | {"load_s": load_s},
        "model": {
            "architecture": llm.info.architecture,
            "dtype": llm.info.dtype,
            "device": llm.info.device,
            "threads": llm.info.threads,
        },
    }
    if given.get("experts"):
        stack, _ = llm.adapters.choose(given["experts"], llm.info.fingerprint)
        answer["experts"] = [asdict(choice) for choice in stack]
    if with_report:
        answer["report"] = report(llm, done.usage, done.timings, done.moe, load_s)
    return answer


def report(
    llm: LLM, usage: Usage, timings: Timings, moe: MoeUsage | None, load_s: float
) -> dict[str, Any]:
    """`experts` are the counts of this request, `tiers` the counts since the model was loaded."""
    result: dict[str, Any] = {"speed": speed(usage, timings) | {"load_s": round(load_s, 6)}}
    result["weight_bytes"] = llm.info.weight_bytes
    result["kv_bytes"] = llm.info.kv_bytes
    graphs = llm.graph_stats()
    if graphs:
        result["graphs"] = graphs
    moe_state = llm.moe_report()
    if moe is not None and moe_state is not None:
        result |= {"experts": moe_facts(moe), "tiers": moe_state}
    return result


def render(report: Mapping[str, Any]) -> str:
    rates = report["speed"]
    memory = f"weights {nbytes(report['weight_bytes'])}, KV {nbytes(report['kv_bytes'])}"
    if "graphs" in report:
        graphs = report["graphs"]
        memory += f", {graphs['graphs']:.0f} captured graphs {nbytes(graphs['graph_bytes'])}"
    lines = [
        ("prefill", f"{rates['prefill_tok_s']:.1f} tok/s in {seconds(rates['prefill_s'])}"),
        ("ttft", f"{seconds(rates['ttft_s'])} after {seconds(rates['load_s'])} of loading"),
        ("decode", f"{rates['decode_tok_s']:.1f} tok/s in {seconds(rates['decode_s'])}"),
    ]
    if "experts" in report:
        tiers = report["tiers"]
        lines += _experts(report["experts"], tiers)
        memory += (
            f", experts {nbytes(_budget_bytes(tiers))} of {nbytes(tiers['expert_bytes'])}; "
            f"saved {nbytes(tiers['memory_saved_bytes'])}"
        )
    return facts([*lines, ("memory", memory)])


def _budget_bytes(moe_state: Mapping[str, Any]) -> float:
    return float(sum(tier["budget_bytes"] for tier in moe_state["tiers"].values()))


def _experts(used: Mapping[str, Any], moe_state: Mapping[str, Any]) -> list[tuple[str, str]]:
    device, host = moe_state["tiers"]["device"], moe_state["tiers"]["host"]
    guessed = [("guesses", _guesses(moe_state["prediction"]))]
    times = ("routing", "lookup", "compute", "stall")
    return [
        ("strategy", str(moe_state["strategy"])),
        *([("fallback", str(moe_state["fallback"]))] if moe_state["fallback"] else []),
        (
            "device",
            f"{device['slots']} slots; hits {used['device_hits']}, ahead {used['prefetch_hits']}, "
            f"misses {used['device_misses']}; {nbytes(used['moved_bytes'])} moved in, "
            f"{device['evictions']} evictions",
        ),
        (
            "host",
            f"{host['slots']} slots; hits {used['host_hits']}, misses {used['host_misses']}, "
            f"computed here {used['host_runs']}; {nbytes(used['read_bytes'])} read from disk, "
            f"{host['evictions']} evictions",
        ),
        # several reads run at the same time: their seconds may add up to more than the elapsed time
        ("time", ", ".join(f"{name} {seconds(used[f'{name}_s'])}" for name in times)),
        ("io", f"{seconds(used['io_s'])} in all reads and copies, beside the above"),
        (
            "changes",
            f"updates {moe_state['dcu_calls']}, swaps {moe_state['swaps']}, "
            f"fallback rate {100 * used['fallback_rate']:.1f}%",
        ),
        *(guessed if moe_state["prediction"]["predictions"] else []),
        *_unused(moe_state["prediction"]),
    ]


def _unused(prediction: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A prediction mode that was requested and has no effect."""
    used = prediction["protecting"] or prediction["prefetching"]
    if prediction["mode"] not in ("protect", "prefetch") or used:
        return []
    return [("guesses", f"{prediction['mode']} not used: {prediction['why_off']}")]


def _guesses(prediction: Mapping[str, Any]) -> str:
    """How well the next layer's experts were predicted, and what that was used for."""
    why = f"; off: {prediction['why_off']}" if prediction["why_off"] else ""
    # a device that guesses by itself guesses one expert of a layer
    exact = prediction["exact_match"]
    layers = f", {100 * exact:.0f}% of layers exactly" if exact else ""
    return (
        f"{100 * prediction['slot_overlap']:.0f}% of experts{layers}; "
        f"{prediction['prefetched']} fetched ahead, "
        f"{prediction['useful_prefetches']} of them used{why}"
    )


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
