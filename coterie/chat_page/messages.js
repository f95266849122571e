// The messages of a conversation as elements. `actions` says what their buttons do.

import { announce, make, pill, setText } from "../dashboard/dom.js";
import { count, duration, percent, rate } from "../dashboard/format.js";
import { receiptView } from "../dashboard/receipt.js";
import { receiptOf } from "./answer.js";
import { copyButton } from "./clipboard.js";
import { MarkdownView } from "./markdown.js";

// without a token for this long, the page says how long it has waited
const SILENCE_MS = 3000;

function button(text, act, kind = "quiet small") {
  const node = make("button", { type: "button", class: kind, text });
  node.addEventListener("click", act);
  return node;
}

export class QuestionView {
  constructor(message, actions) {
    this.actions = actions;
    this.message = message;
    this.text = make("div", { class: "text", dir: "auto" });
    this.change = button("Edit", () => this.edit());
    this.mark = make("span", { class: "help", text: "Not sent any more" });
    this.row = make("div", { class: "actions" }, this.mark, this.change);
    this.node = make("article", { class: "said user" }, make("h2", { class: "unseen", text: "You" }), this.text, this.row);
  }

  update(message, { isRunning, isLeftOut }) {
    this.message = message;
    setText(this.text, message.content);
    this.change.disabled = isRunning;
    this.mark.hidden = !isLeftOut;
    this.node.classList.toggle("left-out", isLeftOut);
  }

  edit() {
    const field = make("textarea", { "aria-label": "Your message", rows: "3", maxlength: "100000" });
    field.value = this.message.content;
    const end = () => {
      form.remove();
      this.text.hidden = this.row.hidden = false;
      this.change.focus();
    };
    const use = () => {
      const text = field.value.trim();
      if (!text) return;
      end();
      this.actions.edit(this.message, text);
    };
    const send = make("button", { type: "submit", class: "primary", text: "Send again" });
    const help = make("p", { class: "help", text: "What came after this message is dropped." });
    const form = make("form", { class: "editor" }, field, help, make("div", { class: "row end" }, button("Cancel", end, "quiet"), send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      use();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        use();
      }
    });
    this.text.hidden = this.row.hidden = true;
    this.node.append(form);
    field.focus();
  }
}

export class AnswerView {
  constructor(message, actions) {
    this.actions = actions;
    this.message = message;
    this.name = make("strong");
    this.status = make("span", { class: "muted" });
    this.thoughtText = make("div", { class: "thought-text", dir: "auto" });
    this.thoughtTitle = make("summary");
    this.thought = make("details", { class: "thought" }, this.thoughtTitle, this.thoughtText);
    this.body = make("div", { class: "text markdown", dir: "auto" });
    this.markdown = new MarkdownView(this.body);
    this.calls = make("div", { class: "calls" });
    this.fault = make("div", { class: "problem" });
    this.receipt = this.receiptPart();
    this.retry = button("Try again", () => actions.retry(this.message));
    this.copy = copyButton("Copy answer", () => this.message.content);
    this.row = make("div", { class: "actions" }, this.copy, this.retry, this.receipt);
    const head = make("div", { class: "who" }, make("h2", {}, this.name), this.status);
    this.node = make("article", { class: "said assistant" }, head, this.thought, this.body, this.calls, this.fault, this.row);
  }

  update(message, { isRunning, isLast, isLeftOut }) {
    this.message = message;
    const isOpen = message.state === "open";
    setText(this.name, message.name || "Answer");
    this.markdown.show(message.content);
    this.showThought(isOpen);
    if (!isOpen || message.calls) this.showCalls(isLast && !isRunning);
    this.showState(isLast && !isRunning);
    this.showFacts();
    this.row.hidden = isOpen;
    this.copy.hidden = !message.content;
    this.retry.hidden = !isLast || message.state === "failed";
    this.node.classList.toggle("left-out", isLeftOut);
    // read aloud once it is whole, not word by word
    if (isOpen) this.node.setAttribute("aria-busy", "true");
    else this.node.removeAttribute("aria-busy");
  }

  // `heardAt`: when the last part of the answer came
  wait(heardAt) {
    const silent = Date.now() - heardAt;
    const begun = this.message.content || this.message.reasoning || this.message.calls;
    const what = begun ? "no word" : "waiting";
    setText(this.status, silent < SILENCE_MS ? (begun ? "" : "waiting") : `${what} for ${Math.floor(silent / 1000)} s`);
  }

  showThought(isOpen) {
    const { reasoning = "", content } = this.message;
    this.thought.hidden = !reasoning;
    if (!reasoning) return;
    setText(this.thoughtText, reasoning);
    setText(this.thoughtTitle, isOpen && !content ? "Reasoning …" : `Reasoning, ${count(reasoning.split(/\s+/).length)} words`);
  }

  showCalls(mayAnswer) {
    const { calls = [] } = this.message;
    // what is being typed stays while nothing has changed
    const drawn = JSON.stringify([calls, mayAnswer]);
    if (drawn === this.drawnCalls) return;
    this.drawnCalls = drawn;
    const fields = [];
    const nodes = calls.map((call, at) => {
      const box = make("div", { class: "call" }, make("p", {}, "Call of ", make("code", { text: call.name })), make("pre", { tabindex: "0" }, make("code", { text: pretty(call.arguments) })));
      if (call.result !== undefined) box.append(make("p", { class: "muted", text: "Result" }), make("pre", { tabindex: "0" }, make("code", { text: call.result })));
      else if (mayAnswer && this.message.state === "done") {
        const id = `result-${this.message.id}-${at}`;
        fields[at] = make("textarea", { id, rows: "2", spellcheck: "false" });
        box.append(make("label", { for: id, text: `Result of ${call.name}` }), fields[at]);
      }
      return box;
    });
    if (fields.length) {
      const results = () => fields.map((field) => field.value);
      nodes.push(make("div", { class: "row end" }, button("Send results", () => this.actions.sendResults(this.message, results()), "primary")));
    }
    this.calls.replaceChildren(...nodes);
  }

  showState(mayRetry) {
    const { state, finish, fault } = this.message;
    if (state !== "open") this.status.replaceChildren(...(state === "stopped" ? [pill("stopped", "warn")] : []));
    if (finish === "length" && state === "done") this.status.replaceChildren(pill("cut at the token limit", "warn"));
    const drawn = JSON.stringify([fault, mayRetry]);
    if (drawn === this.drawnFault) return;
    this.drawnFault = drawn;
    this.fault.replaceChildren();
    if (!fault) return;
    const nodes = [make("p", { class: "fault", role: "alert", text: faultText(fault) })];
    if (mayRetry) nodes.push(make("div", { class: "row" }, ...this.remedies(fault)));
    this.fault.append(...nodes);
  }

  remedies(fault) {
    const { retry, giveKey, leaveOut } = this.actions;
    const again = button("Try again", () => retry(this.message), "primary");
    if (fault.status === 401) return [button("Give a key", giveKey, "primary"), button("Try again", () => retry(this.message), "quiet")];
    if (fault.code === "context_length_exceeded") return [button("Leave out older messages", () => leaveOut(this.message), "primary")];
    return [again, this.countdown(fault)];
  }

  // When the server expects to have room; the button works before that too.
  countdown({ retryAt }) {
    const node = make("span", { class: "muted" });
    const draw = () => {
      const left = Math.ceil(((retryAt ?? 0) - Date.now()) / 1000);
      setText(node, left > 0 ? `The server asks to wait ${left} s.` : "");
      if (left > 0 && (node.isConnected || !node.textContent)) setTimeout(draw, 500);
    };
    // once it is in the document
    setTimeout(draw);
    return node;
  }

  showFacts() {
    const { facts, receipt } = this.message;
    this.receipt.hidden = !receipt;
    setText(this.receipt.firstElementChild, facts ? factsLine(facts) : "Receipt");
  }

  // The receipt is fetched when it is opened: the page keeps its main facts only.
  receiptPart() {
    const place = make("div");
    const part = make("details", { class: "facts" }, make("summary"), place);
    part.addEventListener("toggle", async () => {
      if (!part.open || place.firstChild !== null) return;
      const receipt = await receiptOf(this.message.receipt);
      if (receipt !== null) place.append(receiptView(receipt));
      else {
        const reasons = this.message.facts?.reasons ?? [];
        place.append(make("p", { class: "muted", text: ["The server has no receipt for this key any more.", ...reasons].join(" ") }));
      }
      announce("Receipt shown");
    });
    return part;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function faultText({ message, status, hasKey }) {
  if (status === 401) return hasKey ? "The API key was not accepted." : "This server asks for an API key.";
  return message.charAt(0).toUpperCase() + message.slice(1);
}

function factsLine(facts) {
  const parts = [];
  if (facts.adapters.length) parts.push(`on ${facts.specialist}`);
  if (facts.routing > 0 && facts.routing < 1) parts.push(`routing ${percent(facts.routing)}`);
  parts.push(`${count(facts.completion_tokens)} tokens in ${duration(facts.total_ms)}`);
  if (facts.completion_tokens > 1 && facts.decode_ms > 0) parts.push(`${rate((1000 * facts.completion_tokens) / facts.decode_ms)} per second`);
  return parts.join(" · ");
}
