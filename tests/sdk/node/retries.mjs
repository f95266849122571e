// When the client asks again, and how it reads what comes in pieces; run with node --test.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  BadRequest,
  ConnectionFailed,
  ExpertClient,
  RateLimited,
  ServerError,
  Unavailable,
  UnexpectedAnswer,
} from "@coterie/client";
import { ExpertClient as BundledClient } from "@coterie/client/browser";

const GOOD = { job_id: "j", text: "t", experts_used: [], field_of_tomorrow: 1 };

/** A client whose fetch gives these answers in turn, and what it sent. */
function scripted(steps, options = {}) {
  const sent = [];
  const fetch = async (url, init) => {
    sent.push({ url, ...init });
    const step = steps.shift();
    if (step instanceof Error) throw step;
    return step;
  };
  const base = { baseUrl: "http://test/v1/", apiKey: "k", adminKey: "a" };
  return [new ExpertClient({ ...base, fetch, ...options }), sent];
}

const json = (value) => new Response(JSON.stringify(value));
const refusal = (status, headers = {}) =>
  new Response(JSON.stringify({ error: { message: "not now", code: "x" } }), { status, headers });
const refused = () =>
  new TypeError("fetch failed", { cause: Object.assign(new Error("x"), { code: "ECONNREFUSED" }) });

for (const status of [429, 503]) {
  test(`a ${status} is asked again when the server says`, async () => {
    const headers = { "retry-after-ms": "120", "retry-after": "1" };
    const [client, sent] = scripted([refusal(status, headers), json(GOOD)]);
    const began = Date.now();
    assert.equal((await client.infer({ prompt: "x" })).text, "t");
    assert.equal(sent.length, 2);
    assert.ok(Date.now() - began >= 115 && Date.now() - began < 900);
  });
}

test("patience ends, and a server may say that it is no use", async () => {
  const brief = { "retry-after-ms": "1" };
  const [client, sent] = scripted([1, 2, 3].map(() => refusal(429, brief)));
  await assert.rejects(client.infer({ prompt: "x" }), (error) => {
    assert.ok(error instanceof RateLimited);
    assert.equal(error.retryAfterMs, 1);
    return true;
  });
  assert.equal(sent.length, 3);
  const [never] = scripted([refusal(503, { "x-should-retry": "false" })]);
  await assert.rejects(never.infer({ prompt: "x" }), Unavailable);
  const [long] = scripted([refusal(429, { "retry-after": "3600" })]);
  await assert.rejects(long.infer({ prompt: "x" }), RateLimited);
});

test("what may have run is not sent twice; a question may be", async () => {
  for (const [step, kind] of [
    [refusal(500), ServerError],
    [refusal(502), ServerError],
    [new TypeError("socket hang up"), ConnectionFailed],
  ]) {
    const [client, sent] = scripted([step, json(GOOD)]);
    await assert.rejects(client.infer({ prompt: "x" }), kind);
    assert.equal(sent.length, 1);
  }
  const [asks, asked] = scripted([new TypeError("socket hang up"), json({ job_id: "j" })]);
  assert.equal((await asks.job("j")).jobId, "j");
  assert.equal(asked.length, 2);
  const [lost, tried] = scripted([refused(), json(GOOD)]);
  assert.equal((await lost.infer({ prompt: "x" })).text, "t");
  assert.equal(tried.length, 2);
});

test("waiting outlasts a server that starts again", async () => {
  const job = (status) => json({ job_id: "j", status });
  const steps = [job("queued"), refused(), refusal(503), job("processing"), job("succeeded")];
  const [client, sent] = scripted(steps, { maxRetries: 0 });
  assert.equal((await client.wait("j", 20_000)).status, "succeeded");
  assert.equal(sent.length, 5);
});

test("keys and names are sent as they should be", async () => {
  const [client, sent] = scripted([json({ data: [], aliases: {} }), json(GOOD)]);
  await client.experts.list();
  const grammar = { type: "lark", text: "start: /a/" };
  const result = await client.infer({ prompt: "x", maxTokens: 3, grammar, responseFormat: { aB: 1 } });
  assert.deepEqual(sent.map(({ url, headers }) => [url, headers.authorization]), [
    ["http://test/v1/experts", "Bearer a"],
    ["http://test/v1/infer", "Bearer k"],
  ]);
  const body = JSON.parse(sent[1].body);
  assert.deepEqual(body, {
    prompt: "x", max_tokens: 3, grammar, response_format: { aB: 1 }, stream: false,
  });
  assert.equal(result.fieldOfTomorrow, 1);
});

test("other servers are told apart", async () => {
  for (const body of ["<html>", "7", ""]) {
    const [client] = scripted([new Response(body)]);
    await assert.rejects(client.infer({ prompt: "x" }), UnexpectedAnswer);
  }
});

const TEXT = "a\u2028b\u0085c\nd\re é 🙂";
const STREAM = new TextEncoder().encode(
  `: keepalive\r\n\r\nevent: delta\r\ndata: ${JSON.stringify({ text: TEXT })}\n\n` +
    'event: later\ndata: {}\n\nevent:delta\rdata:{\rdata: "text": "z"}\r\r' +
    'event: error\ndata: {"error": {"message": "full", "code": "rate_limit_exceeded"}}\n\n',
);

test("a stream may be cut anywhere", async () => {
  for (let cut = 0; cut <= STREAM.length; cut += 1) {
    const [client] = scripted([new Response(new ReadableStream({
      start(controller) {
        controller.enqueue(STREAM.slice(0, cut));
        controller.enqueue(STREAM.slice(cut));
        controller.close();
      },
    }))]);
    const texts = [];
    await assert.rejects(async () => {
      for await (const chunk of client.inferStream({ prompt: "x" })) texts.push(chunk.text);
    }, RateLimited);
    assert.deepEqual(texts, [TEXT, "z"], `cut at ${cut}`);
  }
});

test("a stream without an end is no answer", async () => {
  const [client] = scripted([new Response('event: delta\ndata: {"text": "half"}\n\n')]);
  const stream = client.inferStream({ prompt: "x" });
  assert.equal((await stream.next()).value.text, "half");
  await assert.rejects(stream.next(), /broke off/);
});

test("wrong settings are refused at once, names that cannot be too", () => {
  assert.throws(() => new ExpertClient({ baseUrl: "localhost" }), TypeError);
  const [client] = scripted([]);
  assert.throws(() => client.job(""), TypeError);
});

test("the browser's file is the same client", () => {
  assert.equal(new BundledClient({ baseUrl: "http://test" }).experts.constructor.name, "Experts");
  assert.notEqual(BundledClient, ExpertClient);
  assert.equal(BadRequest.name, "BadRequest");
});
