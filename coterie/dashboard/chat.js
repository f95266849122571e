// The chat: a conversation with any model of this server, each answer with its receipt.

import { announce, byId, make, pill, setText } from "./dom.js";
import { address, headersOf, keyOf, openKeys, problemOf } from "./keys.js";
import { receiptView } from "./receipt.js";
import { eventsOf } from "./stream.js";

// turns that are sent again; older ones are only shown. An odd number, so that a question is first:
// many templates refuse a conversation that begins with an answer
const MAX_TURNS = 19;

export class Chat {
  constructor() {
    this.log = byId("chat-log");
    this.text = byId("chat-text");
    this.button = byId("chat-send");
    this.turns = [];
    this.abort = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort !== null) this.abort.abort();
      else this.ask();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (this.abort === null) this.ask();
      }
    });
    byId("chat-clear").addEventListener("click", () => {
      this.clear();
      this.text.focus();
    });
  }

  clear() {
    this.abort?.abort();
    this.turns = [];
    this.log.replaceChildren(make("p", { class: "empty", text: "Ask something: the answer comes with its receipt." }));
  }

  async showModels() {
    const response = await fetch(address("v1/models"), { headers: headersOf("api") }).catch(() => null);
    if (response === null) return;
    const found = response.ok ? (await response.json()).data : [];
    const names = found.map((item) => item.id).filter((name) => name !== "auto");
    const select = byId("chat-model");
    const chosen = select.value;
    select.replaceChildren(...["auto", ...names].map((name) => make("option", { value: name, text: name })));
    select.value = names.includes(chosen) ? chosen : "auto";
  }

  say(role, ...children) {
    this.log.querySelector(":scope > .empty")?.remove();
    const node = make("div", { class: `said ${role}` }, ...children);
    this.log.append(node);
    this.follow(true);
    return node;
  }

  // the end stays in view, unless somebody scrolled back to read
  follow(always = false) {
    const left = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
    if (always || left < 80) this.log.scrollTop = this.log.scrollHeight;
  }

  async ask() {
    const question = this.text.value.trim();
    if (!question) return;
    this.text.value = "";
    // those of this conversation, also if another one begins meanwhile
    const turns = this.turns;
    turns.push({ role: "user", content: question });
    this.say("user", make("span", { class: "unseen", text: "You: " }), make("span", { text: question }));
    const who = make("div", { class: "who" }, make("span", { text: "waiting for an answer" }));
    const thought = make("div", { class: "thought" });
    const body = make("div");
    const node = this.say("assistant", who, thought, body);
    // read aloud once it is whole, not word by word
    node.setAttribute("aria-busy", "true");
    const abort = new AbortController();
    this.abort = abort;
    setText(this.button, "Stop");
    try {
      const response = await fetch(address("v1/chat/completions"), {
        method: "POST",
        headers: { "content-type": "application/json", ...headersOf("api") },
        body: JSON.stringify({ model: byId("chat-model").value, stream: true, messages: turns.slice(-MAX_TURNS) }),
        signal: abort.signal,
      });
      await this.read(response, { node, who, thought, body });
    } catch (error) {
      if (abort.signal.aborted) who.append(pill("stopped", "warn"));
      else this.fail(node, error.message);
    } finally {
      // what was said counts, also if it was stopped
      if (body.textContent) turns.push({ role: "assistant", content: body.textContent });
      else turns.pop();
      node.removeAttribute("aria-busy");
      this.abort = null;
      setText(this.button, "Send");
    }
  }

  async read(response, { node, who, thought, body }) {
    const id = response.headers.get("x-coterie-receipt");
    if (!response.ok) {
      who.remove();
      this.fail(node, await problemOf(response));
      if (response.status === 401) openKeys();
      return;
    }
    const specialist = response.headers.get("x-coterie-specialist") ?? "";
    const confidence = Number(response.headers.get("x-coterie-confidence") ?? 0);
    const name = make("strong", { text: specialist });
    who.replaceChildren(name);
    if (confidence > 0 && confidence < 1) who.append(make("span", { text: `${Math.round(confidence * 100)}% sure` }));
    for await (const event of eventsOf(response)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content) thought.append(delta.reasoning_content);
      if (delta.content) body.append(delta.content);
      if (delta.reasoning_content || delta.content) this.follow();
    }
    announce(`${specialist} has answered`);
    if (id) await this.showReceipt(node, id);
  }

  async showReceipt(node, id) {
    const kind = keyOf("api") ? "api" : keyOf("admin") ? "admin" : "api";
    const response = await fetch(address(`v1/receipts/${encodeURIComponent(id)}`), { headers: headersOf(kind) });
    if (!response.ok) return;
    const details = make("details", {}, make("summary", { class: "muted", text: "Receipt" }), receiptView(await response.json()));
    details.open = true;
    node.append(details);
    // what was asked and answered stays in view
    this.log.scrollTop = (node.previousElementSibling ?? node).offsetTop;
  }

  fail(node, message) {
    node.append(make("p", { class: "fault", role: "alert", text: message }));
    this.follow();
  }
}
