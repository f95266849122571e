// A receipt: who answered, why, and what took the time.

import { make, pill } from "./dom.js";
import { count, duration, percent } from "./format.js";

// (label, colour, milliseconds of the timings); one after another they make the whole time
const STAGES = [
  ["routing", "--s1", (t) => t.route_ms],
  ["format check", "--s2", (t) => t.grammar_ms],
  ["waiting", "--s3", (t) => t.queue_ms - t.adapters_ms - t.grammar_ms - t.route_ms],
  ["adapters", "--s4", (t) => t.adapters_ms],
  ["prompt", "--s5", (t) => t.prefill_ms],
  ["answer", "--s6", (t) => t.decode_ms],
  // receipts of earlier versions do not have it
  ["delivery", "--s8", (t) => t.deliver_ms ?? 0],
  ["validation", "--s7", (t) => t.validate_ms],
];

export function outcomeOf(receipt) {
  const ok = ["stop", "length", "tool_calls", "eos", "stop_sequence"].includes(receipt.outcome);
  if (receipt.valid === false) return ["invalid", "bad"];
  if (receipt.valid === true && ok) return ["valid", "good"];
  const words = receipt.outcome.replaceAll("_", " ");
  if (ok) return [words, ""];
  return [words, receipt.outcome === "cancelled" ? "warn" : "bad"];
}

export const whoOf = (receipt) => receipt.plan.specialist || "nobody";

export function whyOf(receipt) {
  const plan = receipt.plan;
  if (receipt.admission === "refused") return plan.reasons.at(-1) ?? receipt.outcome;
  if (plan.intent) return `${plan.intent}, ${percent(plan.confidence)} sure`;
  return plan.reasons[0] ?? "";
}

function timeBar(timings) {
  const parts = STAGES.map(([label, colour, of]) => [label, colour, Math.max(of(timings), 0)]);
  const total = parts.reduce((sum, [, , ms]) => sum + ms, 0);
  if (total <= 0) return null;
  const bar = make("div", { class: "stages", "aria-hidden": "true" });
  const legend = make("div", { class: "legend" });
  for (const [label, colour, ms] of parts) {
    if (ms / total < 0.0005) continue;
    const piece = make("span");
    piece.style.width = `${(100 * ms) / total}%`;
    piece.style.background = `var(${colour})`;
    bar.append(piece);
    const swatch = make("i");
    swatch.style.background = `var(${colour})`;
    legend.append(make("span", { class: "key" }, swatch, `${label} ${duration(ms)}`));
  }
  return make("div", {}, bar, legend);
}

export function receiptView(receipt) {
  const plan = receipt.plan;
  const facts = make("dl");
  const fact = (label, ...value) => facts.append(make("dt", { text: label }), make("dd", {}, ...value));
  fact("answered by", make("span", { class: "name", text: whoOf(receipt) }),
    plan.replica ? make("span", { class: "muted", text: ` on ${plan.replica}` }) : null);
  fact("asked for", plan.model || "no model");
  if (plan.adapters.length) fact("with", plan.adapters.map((item) => item.name).join(", "));
  if (plan.intent) fact("intent", `${plan.intent}, ${percent(plan.confidence)} sure`);
  if (plan.reasons.length) {
    const list = make("ul");
    for (const reason of plan.reasons) list.append(make("li", { text: reason }));
    fact("why", list);
  }
  fact("admission", receipt.admission,
    plan.breaker !== "closed" ? `, breaker ${plan.breaker}` : "",
    plan.shadow ? `, shadow ${plan.shadow}` : "");
  const cached = receipt.cached_tokens ? ` (${count(receipt.cached_tokens)} cached)` : "";
  fact("tokens", `${count(receipt.prompt_tokens)}${cached} in, ${count(receipt.completion_tokens)} out`);
  // receipts of earlier versions do not have it
  const drawn = Object.entries(plan.sampling ?? {}).map(([name, item]) => `${name} ${item.value} (${item.source})`);
  if (drawn.length) fact("sampling", drawn.join(", "));
  fact("outcome", pill(...outcomeOf(receipt)));
  if (receipt.slowest) fact("slowest", receipt.slowest);
  fact("receipt", make("span", { class: "mono", text: receipt.request_id }));
  return make("div", { class: "receipt" }, timeBar(receipt.timings), facts);
}
