"""The clients of `benchmarks.serving.soak`: what each kind asks, and what an answer must equal.

A `SoakCase` asks one question by one API and returns its answer as plain values, the finish
included. It raises `Refused` where the server asks to come again, `Lost` where an answer ended
without an end.
"""

from __future__ import annotations

import asyncio
import json
import math
import operator
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anthropic
import grpc
import grpc.aio
import httpx
import ollama
import openai
from websockets.asyncio.client import connect

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from tests.helpers.models.tiny import CORPUS

# keys of tenants: of whom most is asked, with at most four sequences, with few requests a minute
KEYS = ("key-of-first", "key-of-second", "key-of-metered")
ADMIN_KEY = "key-of-the-admin"
GENERATORS = ("twin", "left", "right", "moe")
EXPERT, VERSIONS = "style", ("1.0.0", "2.0.0")
REQUEST_S = 180.0
# the server asks to come again with these; 503 says when a worker is expected back
REFUSALS = {429, 503, 529}
# the receipt of the request that runs, where the answer has told it
RECEIPT: ContextVar[str] = ContextVar("RECEIPT", default="")

Answer = Any


class Refused(Exception):
    def __init__(self, retry_after_s: float, why: str) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Lost(Exception):
    """The answer ended without an end, or with more than one."""


@dataclass(frozen=True, slots=True)
class SoakClients:
    """The vendors' clients of one key."""

    url: str
    grpc_target: str
    key: str
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    ollama: ollama.AsyncClient
    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = await self.http.post(path, json=body, headers=named)
        RECEIPT.set(reply.headers.get("x-coterie-receipt", ""))
        reply.raise_for_status()
        return reply

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.http.aclose()
        await self.channel.close()


def clients_of(url: str, grpc_target: str, key: str) -> SoakClients:
    bearer = {"authorization": f"Bearer {key}"}
    return SoakClients(
        url,
        grpc_target,
        key,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=REQUEST_S),
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=REQUEST_S),
        ollama.AsyncClient(host=url, headers=bearer, timeout=REQUEST_S),
        httpx.AsyncClient(base_url=url, headers=bearer, timeout=REQUEST_S),
        grpc.aio.insecure_channel(grpc_target),
    )


@dataclass(frozen=True, slots=True)
class SoakCase:
    kind: str
    name: str
    ask: Callable[[SoakClients], Awaitable[Answer]]
    # gives what is expected, from a quiet server; None = `ask` does
    reference: Callable[[SoakClients], Awaitable[Answer]] | None = None
    # whether an answer (the second) is what the reference allows
    agrees: Callable[[Answer, Answer], bool] = operator.eq


def refusal(error: BaseException) -> Refused | None:
    """The refusal that a client's error stands for, if it is one."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        trailing = {str(name): str(value) for name, value in error.trailing_metadata() or ()}
        if "retry-after-ms" not in trailing:
            return None
        return Refused(float(trailing["retry-after-ms"]) / 1000, str(error.details()))
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", getattr(error, "status_code", 0))
    if status not in REFUSALS:
        return None
    headers = getattr(response, "headers", {})
    if status == 503 and "retry-after-ms" not in headers and response is not None:
        return None
    # a 529 without a time promises none, and ollama's client shows no headers
    why = error.response.text if isinstance(error, httpx.HTTPStatusError) else str(error)
    return Refused(float(headers.get("retry-after-ms", 2000)) / 1000, f"{status}: {why}")


def is_typed(error: BaseException) -> bool:
    """Whether the server said by a code of its own what went wrong."""
    text = str(error)
    if isinstance(error, (openai.APIConnectionError, anthropic.APIConnectionError)):
        return False
    if isinstance(error, grpc.aio.AioRpcError):
        return "coterie-code" in {str(name) for name, _ in error.trailing_metadata() or ()}
    vendors = (openai.APIError, anthropic.APIError, ollama.ResponseError, httpx.HTTPStatusError)
    return isinstance(error, vendors) and "internal_error" not in text


def chat(model: str, number: int, **fields: Any) -> dict[str, Any]:
    """Greedy where the number is even, else drawn from a seed."""
    messages = [{"role": "user", "content": f"{number}: {CORPUS[number % len(CORPUS)]}"}]
    drawn = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "seed": number}
    return {"model": model, "messages": messages, "max_tokens": 40, **drawn, **fields}


def one_end(ends: list[Any]) -> Any:
    if len(ends) != 1:
        raise Lost(f"{len(ends)} ends: {ends}")
    return ends[0]


def is_beginning(whole: Any, part: Any) -> bool:
    """What is cut between two tokens of one character ends in a replacement character."""
    return str(whole["text"]).startswith(part["text"].removesuffix("\N{REPLACEMENT CHARACTER}"))


# OpenAI's


async def openai_chat(clients: SoakClients, body: dict[str, Any]) -> Answer:
    extra = {name: body[name] for name in body.keys() & {"ignore_eos", "experts", "stop"}}
    plain = {name: value for name, value in body.items() if name not in extra}
    # half of them find no block of those before
    extra |= random.choice(({}, {"cache_salt": f"{random.random()}"}))
    headers = random.choice(({}, {"x-vllm-priority": str(random.randint(-2, 3))}))
    done = await clients.openai.chat.completions.with_raw_response.create(
        **plain, extra_body=extra, extra_headers=headers
    )
    RECEIPT.set(done.headers.get("x-coterie-receipt", ""))
    answer: Any = done.parse()
    calls = [call.function.arguments for call in answer.choices[0].message.tool_calls or ()]
    texts = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
    return {"text": texts, "calls": calls, "tokens": answer.usage.completion_tokens}


async def openai_stream(
    clients: SoakClients, body: dict[str, Any], leave_after: int = 0
) -> dict[str, Any]:
    """`leave_after`: chunks after which the client closes the connection."""
    extra = {"ignore_eos": body.get("ignore_eos", False)}
    plain = {name: value for name, value in body.items() if name != "ignore_eos"}
    stream: Any = await clients.openai.chat.completions.create(
        **plain, stream=True, stream_options={"include_usage": True}, extra_body=extra
    )
    text, ends, tokens, count = "", [], 0, 0
    async with stream:
        async for chunk in stream:
            RECEIPT.set(chunk.id)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            count += 1
            if leave_after and count >= leave_after:
                return {"text": text}
    return {"text": text, "finish": one_end(ends), "tokens": tokens}


async def response(clients: SoakClients, model: str, number: int, stream: bool) -> Answer:
    """Two turns; the second continues the first, which is kept."""
    asked: dict[str, Any] = {"model": model, "max_output_tokens": 24, "temperature": 0}
    first: Any = await clients.openai.responses.create(input=CORPUS[number], store=True, **asked)
    RECEIPT.set(first.id)
    more: Any = {"input": f"And {number}?", "previous_response_id": first.id, **asked}
    if stream:
        ends, last = [], None
        async for event in await clients.openai.responses.create(**more, stream=True):
            if event.type in ("response.completed", "response.incomplete", "response.failed"):
                ends.append(event.type)
                last = event.response
        one_end(ends)
    else:
        last = await clients.openai.responses.create(**more)
    assert last is not None
    RECEIPT.set(last.id)
    await clients.openai.responses.delete(first.id)
    told = [(one.output_text, one.status, one.usage.output_tokens) for one in (first, last)]
    return {"text": told}


async def session(clients: SoakClients, model: str, number: int) -> Answer:
    """Three turns, each of which begins as the one before it: its blocks are read again."""
    messages = [{"role": "system", "content": " ".join(CORPUS)}]
    name, said = f"session-{random.randrange(10**6)}", []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{number}, {turn}: {CORPUS[turn]}"})
        body = chat(model, number, messages=list(messages), max_tokens=16)
        done: Any = await clients.openai.chat.completions.create(
            **body, extra_headers={"x-session-id": name}
        )
        RECEIPT.set(done.id)
        text = done.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        said.append((text, done.choices[0].finish_reason))
    return {"text": said}


async def batch(clients: SoakClients, bodies: list[dict[str, Any]]) -> Answer:
    """OpenAI's batch, its files removed afterwards."""
    api = clients.openai
    url = "/v1/chat/completions"
    rows: list[dict[str, Any]] = [
        {"custom_id": str(place), "method": "POST", "url": url, "body": body}
        for place, body in enumerate(bodies)
    ]
    raw = "\n".join(json.dumps(row) for row in rows).encode()
    file = await api.files.create(file=("input.jsonl", raw), purpose="batch")
    done: Any = await api.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h"
    )
    while done.status in ("validating", "in_progress", "finalizing"):
        await asyncio.sleep(0.5)
        done = await api.batches.retrieve(done.id)
    if done.error_file_id:
        raise Lost((await api.files.content(done.error_file_id)).text)
    rows = [
        json.loads(row) for row in (await api.files.content(done.output_file_id)).text.splitlines()
    ]
    for name in (file.id, done.output_file_id):
        await api.files.delete(name)
    said = []
    for row in rows:
        [choice] = row["response"]["body"]["choices"]
        said.append((row["custom_id"], choice["message"]["content"], choice["finish_reason"]))
    return {"text": said, "status": done.status}


async def vectors(clients: SoakClients, number: int) -> Answer:
    done: Any = await clients.openai.embeddings.create(
        model="encoder", input=[CORPUS[number], f"number {number}"]
    )
    return [item.embedding for item in done.data]


async def scores(clients: SoakClients, number: int) -> Answer:
    body = {"model": "encoder", "query": CORPUS[number], "documents": CORPUS}
    reply = await clients.post("/v1/rerank", body)
    found = sorted(reply.json()["results"], key=lambda item: item["index"])
    return [[item["relevance_score"] for item in found]]


def close(expected: Answer, answer: Answer) -> bool:
    pairs = zip(expected, answer, strict=True)
    return all(math.dist(one, two) < 1e-4 for one, two in pairs)


# Anthropic's


async def anthropic_message(clients: SoakClients, model: str, number: int, stream: bool) -> Answer:
    turns: Any = [{"role": "user", "content": f"{number}: {CORPUS[number % 8]}"}]
    asked: dict[str, Any] = {"model": model, "max_tokens": 60, "messages": turns}
    asked["extra_body"] = {"temperature": 0}
    if stream:
        async with clients.anthropic.messages.stream(**asked) as events:
            kinds = [event.type async for event in events]
            done = await events.get_final_message()
        one_end([kind for kind in kinds if kind == "message_stop"])
    else:
        done = await clients.anthropic.messages.create(**asked)
    RECEIPT.set(done.id)
    text = "".join(block.text for block in done.content if block.type == "text")
    return {"text": text, "finish": done.stop_reason, "tokens": done.usage.output_tokens}


# Ollama's


async def ollama_chat(clients: SoakClients, model: str, number: int, stream: bool) -> Answer:
    options = {"temperature": 0, "num_predict": 40}
    turns = [{"role": "user", "content": CORPUS[number]}]
    if not stream:
        whole: Any = await clients.ollama.generate(model, CORPUS[number], options=options)
        return {"text": whole.response, "finish": whole.done_reason, "tokens": whole.eval_count}
    text, ends = "", []
    parts: Any = await clients.ollama.chat(model, turns, options=options, stream=True)
    async for part in parts:
        text += part.message.content or ""
        ends += [(part.done_reason, part.eval_count)] if part.done else []
    return {"text": text, "finish": one_end(ends)}


# the native API


def native(model: str, number: int, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": f"{number}: {CORPUS[number % 8]}", "model": model, "max_tokens": 40}
    return {**asked, "temperature": 0.7, "seed": number, **fields}


def told(result: dict[str, Any]) -> Answer:
    RECEIPT.set(result["job_id"])
    names = ("text", "tokens_generated", "finish_reason")
    return {name: result[name] for name in names}


async def infer(clients: SoakClients, body: dict[str, Any]) -> Answer:
    user = f"user-{random.randrange(10**6)}"
    return told((await clients.post("/v1/infer", body | {"user_id": user})).json())


async def infer_events(clients: SoakClients, body: dict[str, Any]) -> Answer:
    text, ends, name = "", [], ""
    asked = clients.http.stream("POST", "/v1/infer", json=body | {"stream": True})
    async with asked as reply:
        if reply.status_code != 200:
            await reply.aread()
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = json.loads(line[6:])
                text += data["text"] if name == "delta" else ""
                if name == "error":
                    raise Lost(f"an error in the stream: {data}")
                ends += [told(data)] if name == "finished" else []
    end = one_end(ends)
    if end["text"] != text:
        raise Lost(f"pieces {text!r} of {end['text']!r}")
    return end


async def infer_socket(clients: SoakClients, body: dict[str, Any]) -> Answer:
    """Two at once on one connection, the second also asked by itself."""
    url = clients.url.replace("http", "ws", 1) + "/v1/infer/ws"
    headers = {"authorization": f"Bearer {clients.key}"}
    ends: dict[str, list[Answer]] = {"a": [], "b": []}
    texts = {"a": "", "b": ""}
    async with connect(url, additional_headers=headers, max_size=None) as wire:
        for tag, more in (("a", 0), ("b", 1)):
            asked = body | {"request_id": tag, "seed": body["seed"] + more}
            await wire.send(json.dumps(asked))
        while not all(ends.values()):
            event = json.loads(await wire.recv())
            if event["event"] == "error":
                RECEIPT.set(event.get("receipt_id", event.get("job_id", "")))
                if "retry_after_ms" in event:
                    raise Refused(event["retry_after_ms"] / 1000, str(event["error"]))
                raise Lost(f"an error event: {event}")
            if event["event"] == "delta":
                texts[event["request_id"]] += event["text"]
            elif event["event"] == "finished":
                ends[event["request_id"]].append(told(event))
    for tag, found in ends.items():
        if one_end(found)["text"] != texts[tag]:
            raise Lost(f"pieces {texts[tag]!r} of {found}")
    return [ends["a"][0], ends["b"][0]]


async def job(clients: SoakClients, body: dict[str, Any]) -> Answer:
    reply = await clients.post("/v1/infer", body, prefer="respond-async")
    place = reply.headers["location"]
    while True:
        shown = await clients.http.get(place)
        shown.raise_for_status()
        state = shown.json()
        if state["status"] not in ("queued", "processing"):
            break
        await asyncio.sleep(0.4)
    RECEIPT.set(place.rsplit("/", 1)[1])
    if state["status"] != "succeeded":
        raise Lost(f"the job ended so: {state}")
    return told(state["result"])


async def infer_grpc(clients: SoakClients, body: dict[str, Any], stream: bool) -> Answer:
    names = ("Infer", "InferStream")
    name, answers = names[stream], (pb.InferenceResult, pb.InferEvent)[stream]
    make = clients.channel.unary_stream if stream else clients.channel.unary_unary
    invoke = make(
        f"/coterie.v1.Inference/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answers.FromString,
    )
    metadata = (("authorization", f"Bearer {clients.key}"),)
    call = invoke(pb.InferRequest(**body), metadata=metadata, timeout=REQUEST_S)
    if not stream:
        done = await call
    else:
        text, ends = "", []
        async for event in call:
            text += event.delta.text
            ends += [event.finished] if event.HasField("finished") else []
        done = one_end(ends)
        if done.text != text:
            raise Lost(f"pieces {text!r} of {done.text!r}")
    RECEIPT.set(done.job_id)
    return {"text": done.text, "tokens": done.tokens_generated, "finish": done.finish_reason}


# those who do not wait, or read slowly


async def leaver(clients: SoakClients, body: dict[str, Any]) -> Answer:
    return await openai_stream(clients, body, leave_after=random.randint(2, 40))


async def slow_reader(clients: SoakClients, body: dict[str, Any], pause_s: float) -> Answer:
    """Reads with a window of a few kB; the server must wait for it, and lose nothing."""
    text, ends, is_whole = "", [], False
    async with raw_answer(clients, body) as reader:
        count = 0
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                is_whole = True
                break
            if line.startswith(b"data: "):
                data = json.loads(line[6:])
                if "error" in data:
                    raise Lost(f"an error in the stream: {data}")
                RECEIPT.set(data["id"])
                for choice in data["choices"]:
                    text += choice["delta"].get("content") or ""
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                count += 1
                if count % 8 == 0:
                    await asyncio.sleep(pause_s)
    if not is_whole:
        raise Lost(f"the stream ended after {text[-40:]!r}")
    return {"text": text, "finish": one_end(ends)}


@asynccontextmanager
async def raw_answer(
    clients: SoakClients, body: dict[str, Any]
) -> AsyncIterator[asyncio.StreamReader]:
    where, loop = urlsplit(clients.url), asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, (str(where.hostname), where.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    try:
        raw = json.dumps(body | {"stream": True}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"authorization: Bearer {clients.key}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := (await reader.readline()).decode().strip()) != "":
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        RECEIPT.set(headers.get("x-coterie-receipt", ""))
        if status in REFUSALS and "retry-after-ms" in headers:
            raise Refused(float(headers["retry-after-ms"]) / 1000, str(status))
        if status != 200:
            raise Lost(f"status {status}: {await reader.read(2000)!r}")
        yield reader
    finally:
        writer.close()


async def hurried(clients: SoakClients, body: dict[str, Any]) -> Answer:
    """A time limit that may cut the answer, or end before it begins."""
    asked = body | {"timeout_ms": random.choice((60, 200, 1000))}
    done = await infer(clients, asked)
    if done["finish_reason"] not in ("timeout", "length", "stop"):
        raise Lost(f"ended so: {done}")
    return done


# experts


async def current_expert(clients: SoakClients, body: dict[str, Any]) -> Answer:
    """The version that the name means now, as the answer says it, and its text."""
    reply = await clients.post("/v1/chat/completions", body)
    version = reply.headers["x-coterie-adapter"].split("#")[0].partition("@")[2]
    choice = reply.json()["choices"][0]
    return {"version": version, "text": choice["message"]["content"]}


async def each_version(clients: SoakClients, body: dict[str, Any]) -> Answer:
    named = [body | {"model": f"{EXPERT}@{version}"} for version in VERSIONS]
    found = [await current_expert(clients, one) for one in named]
    return {one["version"]: one["text"] for one in found}


def is_of_its_version(expected: Answer, answer: Answer) -> bool:
    return bool(expected[answer["version"]] == answer["text"])


SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "size"],
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
