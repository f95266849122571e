// The TypeScript client against the real server; run with node --test.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  BadRequest,
  Conflict,
  ConnectionFailed,
  ExpertClient,
  NotFound,
  Timeout,
  Unauthorized,
} from "@coterie/client";

const client = new ExpertClient();
const LARK = "start: k~10\nk: h~10\nh: t~10\nt: /[a-y]/~10\n";
const LONG = { prompt: "Go on", grammar: { type: "lark", text: LARK }, maxTokens: 7000 };

async function running() {
  const headers = { authorization: `Bearer ${process.env.COTERIE_API_KEY}` };
  const text = await (await fetch(`${process.env.COTERIE_BASE_URL}/metrics`, { headers })).text();
  const sum = (name) =>
    [...text.matchAll(new RegExp(`^${name}(?:\\{.*?\\})? (\\S+)$`, "gm"))]
      .reduce((total, [, value]) => total + Number(value), 0);
  return { now: sum("vllm:num_requests_running"), made: sum("vllm:generation_tokens_total") };
}

/** Tokens that the server still made after `act` left a stream of 7,000. */
async function leftAlone(act) {
  const before = (await running()).made;
  await act();
  let state = await running();
  for (let tries = 0; state.now > 0 && tries < 1000; tries += 1) state = await running();
  return state.made - before;
}

test("an answer in camelCase, the caller's own names untouched", async () => {
  const schema = {
    type: "object",
    properties: { snake_case: { type: "boolean" }, camelCase: { type: "boolean" } },
    required: ["snake_case", "camelCase"],
    additionalProperties: false,
  };
  const result = await client.infer({
    prompt: "Say something",
    maxTokens: 60,
    topP: 0.9,
    explain: true,
    responseFormat: { type: "json_schema", json_schema: { name: "x", schema } },
  });
  assert.deepEqual(Object.keys(JSON.parse(result.text)), ["snake_case", "camelCase"]);
  assert.equal(result.metrics.outputTokens, result.tokensGenerated);
  assert.equal(result.validation.valid, true);
  assert.equal(result.plan.generationParams.topP, 0.9);
  assert.equal(typeof result.plan.reasoningTrace.features.has_json, "boolean");
});

test("a stream is its answer in pieces", async () => {
  const stream = client.inferStream({ prompt: "Count", regex: "[a-z]{30}" });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks[0].started.model, "tiny");
  assert.equal(chunks.at(-1).event, "finished");
  assert.equal(chunks.map((chunk) => chunk.text).join(""), stream.result.text);
  assert.equal(stream.result.text.length, 30);
});

test("leaving a loop gives the request up", async () => {
  const made = await leftAlone(async () => {
    for await (const chunk of client.inferStream(LONG)) if (chunk.text) break;
  });
  assert.ok(made < 3000, `${made} tokens were made`);
});

test("an AbortSignal gives a stream and an answer up", async () => {
  const made = await leftAlone(async () => {
    const controller = new AbortController();
    const stream = client.inferStream(LONG, { signal: controller.signal });
    await assert.rejects(async () => {
      for await (const chunk of stream) if (chunk.text) controller.abort(new Error("enough"));
    }, /enough/);
    const signal = AbortSignal.timeout(50);
    await assert.rejects(client.infer(LONG, { signal }), { name: "TimeoutError" });
  });
  assert.ok(made < 6000, `${made} tokens were made`);
});

test("errors are typed", async () => {
  await assert.rejects(client.infer({ prompt: "x", maxToken: 3 }), (error) => {
    assert.ok(error instanceof BadRequest);
    assert.equal(error.name, "BadRequest");
    assert.equal(error.param, "max_token");
    assert.equal(error.status, 400);
    assert.match(error.message, /did you mean `max_tokens`/);
    assert.ok(error.requestId);
    return true;
  });
  await assert.rejects(client.infer({ prompt: "x", forceExperts: ["nobody"] }), NotFound);
  await assert.rejects(client.inferStream({ prompt: "x", temperature: 9 }).next(), BadRequest);
  await assert.rejects(new ExpertClient({ apiKey: "wrong" }).infer({ prompt: "x" }), Unauthorized);
  const lost = new ExpertClient({ baseUrl: "http://127.0.0.1:9", maxRetries: 0 });
  await assert.rejects(lost.infer({ prompt: "x" }), ConnectionFailed);
  await assert.rejects(client.infer(LONG, { timeoutMs: 40 }), Timeout);
});

test("a job is answered later, followed, listed, judged", async () => {
  const { jobId } = await client.submit({ prompt: "later", regex: "x{5}", userId: "node" });
  const job = await client.wait(jobId, 60_000);
  assert.equal(job.status, "succeeded");
  assert.equal(job.result.text, "xxxxx");
  let text = "";
  for await (const chunk of client.jobEvents(jobId)) text += chunk.text;
  assert.equal(text, "xxxxx");
  const second = await client.submit({ prompt: "later", regex: "y", userId: "node" });
  await client.wait(second.jobId, 60_000);
  const listed = [];
  for await (const row of client.jobs({ userId: "node", pageSize: 1 })) listed.push(row.jobId);
  assert.deepEqual(listed, [second.jobId, jobId]);
  assert.equal((await client.feedback(jobId, "good")).verdict, "good");
  await assert.rejects(client.feedback(jobId, "bad"), Conflict);
  for await (const row of client.inferences({ pageSize: 2 })) if (row.jobId === jobId) return;
  assert.fail("the job is not in the log");
});

test("a job can be cancelled", async () => {
  const { jobId } = await client.submit(LONG);
  await assert.rejects(client.wait(jobId, 100), Timeout);
  assert.equal((await client.cancel(jobId)).deleted, false);
  assert.equal((await client.wait(jobId, 30_000)).status, "cancelled");
  assert.equal((await client.cancel(jobId)).deleted, true);
  await assert.rejects(client.job(jobId), NotFound);
});

test("experts are managed", async () => {
  const made = { path: process.env.LORA, name: "ts-made", version: "1.0.0" };
  assert.equal((await client.experts.installFrom(made)).kind, "lora");
  assert.equal((await client.experts.pin("ts-made")).pinned, true);
  assert.equal((await client.experts.unpin("ts-made")).pinned, false);
  assert.equal((await client.experts.alias("ts-nick", "ts-made")).numVirtualTokens, 0);
  const { aliases } = await client.experts.list();
  assert.equal(aliases["ts-nick"], "ts-made@1.0.0");
  assert.equal((await client.experts.show("ts-made")).versions.length, 1);
  const answer = await client.infer({ prompt: "x", forceExperts: ["ts-nick"], maxTokens: 4 });
  assert.deepEqual(answer.expertsUsed, ["ts-made"]);
  await assert.rejects(client.experts.install(new TextEncoder().encode("junk")), BadRequest);
  assert.equal((await client.experts.remove("ts-made")).deleted, true);
});
