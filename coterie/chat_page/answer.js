// One request for an answer: its body, its stream, and what went wrong in words.

import { address, headersOf } from "../dashboard/keys.js";
import { eventsOf } from "../dashboard/stream.js";
import { sentMessages } from "./conversations.js";

const NO_CONNECTION = "There is no connection to the server. Is it still running?";
const CUT = "The connection was lost in the middle of the answer.";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

// `code`: the server's, or "no_connection", "cut" for a stream that ended in the middle.
// `waitMs`: when it may be tried again, if the server said so.
export class Refused extends Error {
  constructor(message, { status = 0, code = "", waitMs = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, waitMs });
  }
}

export function bodyOf(conversation) {
  const { model, settings } = conversation;
  const body = { model, stream: true, messages: sentMessages(conversation) };
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

async function refusalOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's own page
  }
  const waitMs = Number(response.headers.get("retry-after-ms") ?? 0) || 1000 * Number(response.headers.get("retry-after") ?? 0) || 0;
  const message = error.message ?? `the server answered with status ${response.status}`;
  return new Refused(message, { status: response.status, code: error.code ?? "", waitMs });
}

async function connected(promise, message, code) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Refused) throw error;
    throw new Refused(message, { code });
  }
}

// Reads an answer: `onStart({receipt, name})` when it begins, `onPart(delta)` for each part.
// Returns how it ended, in OpenAI's words.
export async function readAnswer(conversation, signal, { onStart, onPart }) {
  const asked = fetch(address("v1/chat/completions"), {
    method: "POST",
    // the server keeps longest what it computed for this conversation
    headers: { "content-type": "application/json", "x-session-id": conversation.id, ...headersOf("api") },
    body: JSON.stringify(bodyOf(conversation)),
    signal,
  });
  const response = await connected(asked, NO_CONNECTION, "no_connection");
  if (!response.ok) throw await refusalOf(response);
  onStart({ receipt: response.headers.get("x-coterie-receipt") ?? "", name: nameIn(response.headers) });
  return connected(readEvents(response, onPart), CUT, "cut");
}

// Who answers: the experts, or the model alone.
function nameIn(headers) {
  const experts = (headers.get("x-coterie-adapter") ?? "").split(",").map((item) => item.split("#")[0]);
  return experts.filter(Boolean).join(" + ") || headers.get("x-coterie-specialist") || "";
}

async function readEvents(response, onPart) {
  let finish = "";
  let isWhole = false;
  // to the end of the body: a body that is not read to its end counts as aborted
  for await (const event of eventsOf(response)) {
    isWhole = event.data === "[DONE]";
    if (isWhole) continue;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new Refused(chunk.error.message, { code: chunk.error.code ?? "" });
    const choice = chunk.choices?.[0];
    if (choice === undefined) continue;
    finish = choice.finish_reason ?? finish;
    onPart(choice.delta ?? {});
  }
  if (!isWhole) throw new Refused(CUT, { code: "cut" });
  return finish;
}

// Adds what arrived to a message.
export function addPart(message, delta) {
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  if (delta.content) message.content += delta.content;
  for (const part of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

// The receipt, or null where it is not kept (any more) or may not be read.
export async function receiptOf(number) {
  const asked = fetch(address(`v1/receipts/${encodeURIComponent(number)}`), { headers: headersOf("api") });
  const response = await asked.catch(() => null);
  return response?.ok ? response.json() : null;
}

// What is shown of a receipt beside the answer, also when the server has forgotten it.
export function factsOf(receipt) {
  const { plan, timings } = receipt;
  return {
    specialist: plan.specialist,
    adapters: plan.adapters.map((item) => item.name),
    routing: plan.confidence,
    reasons: plan.reasons,
    prompt_tokens: receipt.prompt_tokens,
    completion_tokens: receipt.completion_tokens,
    first_token_ms: timings.first_token_ms,
    total_ms: timings.total_ms,
    decode_ms: timings.decode_ms,
  };
}
