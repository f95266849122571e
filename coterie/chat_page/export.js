// A conversation as a file: JSON with everything that is kept, or Markdown to read.

import { make } from "../dashboard/dom.js";

// a browser may begin to read the file after the click
const KEPT_MS = 60_000;

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), KEPT_MS);
}

function fileName(title, ending) {
  const plain = title.normalize("NFKD").replace(/[^A-Za-z0-9]+/g, "-").replace(/^-+|-+$/g, "").toLowerCase();
  return `${plain.slice(0, 50) || "conversation"}.${ending}`;
}

const fenced = (text, language = "") => {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const mark = "`".repeat(longest + 1);
  return `${mark}${language}\n${text}\n${mark}`;
};

function answerText({ content, reasoning, calls = [], facts, state, fault }) {
  const parts = [];
  if (reasoning) parts.push(reasoning.split("\n").map((line) => `> ${line}`.trimEnd()).join("\n"));
  if (content) parts.push(content);
  for (const call of calls) {
    parts.push(`Call of \`${call.name}\`:`, fenced(call.arguments, "json"));
    if (call.result !== undefined) parts.push("Result:", fenced(call.result));
  }
  if (state === "stopped") parts.push("*stopped*");
  if (fault) parts.push(`*${fault.message}*`);
  if (facts?.reasons?.length) parts.push(`*Chosen because: ${facts.reasons.join("; ")}*`);
  return parts.join("\n\n");
}

export function markdownOf(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system.trim()) parts.push("## System prompt", conversation.settings.system);
  for (const message of conversation.messages) {
    if (message.role === "user") parts.push("## You", message.content);
    else parts.push(`## ${message.name || "Answer"}`, answerText(message));
  }
  return `${parts.join("\n\n")}\n`;
}

export function exportMarkdown(conversation) {
  save(fileName(conversation.title, "md"), "text/markdown", markdownOf(conversation));
}

export function exportJson(conversation) {
  save(fileName(conversation.title, "json"), "application/json", `${JSON.stringify(conversation, null, 2)}\n`);
}
