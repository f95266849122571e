// Requests in flight, and the answers that were given.

import { announce, byId, fill, keyed, make, pill, setPill, setText } from "./dom.js";
import { age, clock, count, duration } from "./format.js";
import { outcomeOf, receiptView, whoOf, whyOf } from "./receipt.js";

const STAGES = { preparing: "", waiting: "warn", prompt: "busy", answering: "busy", checking: "busy", encoding: "busy" };
// answers that are kept; of them, those that are shown at first
const MOST = 200;
const PAGE = 20;

const endOf = (receipt) => receipt.arrived_at + receipt.timings.total_ms / 1000;

// Adapters by their names; the one that a specialist is named after goes without saying.
const addedTo = (specialist, adapters) => adapters.map((name) => name.split("@")[0]).filter((name) => name !== specialist);

export class RequestPanel {
  constructor() {
    this.panel = byId("requests-body");
    this.list = make("ul", { "aria-label": "Requests in flight" });
    this.data = [];
    this.total = 0;
  }

  show(section) {
    this.data = section.data;
    this.total = section.total;
  }

  // `now`: the server's clock
  draw(now, showTenants) {
    fill(this.panel, this.list, this.data.length === 0);
    const hidden = this.total - this.data.length;
    setText(byId("requests-count"), this.total ? `${count(this.total)}${hidden ? `, ${count(hidden)} not shown` : ""}` : "");
    keyed(this.list, this.data, (item) => item.id, () => make(
      "li", { class: "flight" }, make("span", {}, pill("")), make("span", { class: "one-line" }),
      make("span", { class: "why" }), make("span", { class: "num muted" }), make("span", { class: "num" }),
    ), (row, item) => {
      const [stage, who, why, tokens, old] = row.children;
      setPill(stage.firstChild, item.stage, item.is_slow ? "bad" : STAGES[item.stage]);
      const tenant = showTenants && item.tenant !== "local" ? ` for ${item.tenant}` : "";
      setText(who, `${[item.specialist, ...addedTo(item.specialist, item.adapters)].join(" + ")}${tenant}`);
      who.title = item.id;
      const slow = item.is_slow ? "slow: " : "";
      setText(why, item.why ? `${slow}${item.why}` : this.progress(item));
      // an encoder writes no tokens
      setText(tokens, item.inputs ? count(item.prompt_tokens) : `${count(item.prompt_tokens)} → ${count(item.tokens)}${item.max_tokens ? `/${count(item.max_tokens)}` : ""}`);
      tokens.title = item.inputs ? "tokens of all inputs" : "prompt tokens → answer tokens / limit";
      setText(old, age(now - item.arrived_at));
    });
  }

  progress(item) {
    if (item.stage === "encoding") return `${item.intent} of ${count(item.inputs)} inputs`;
    return item.stage === "answering" ? "writing its answer" : "";
  }
}

export class AnswerPanel {
  constructor() {
    this.panel = byId("answers-body");
    this.list = make("ol", { class: "answers", "aria-label": "Recent answers, newest first", reversed: "" });
    this.more = make("button", { type: "button", class: "quiet more", text: "Show more" });
    this.more.addEventListener("click", () => {
      this.shown += PAGE;
      this.draw();
    });
    this.box = make("div", {}, this.list, this.more);
    // by id, oldest first
    this.receipts = new Map();
    this.shown = PAGE;
    // when answers arrived, for the rate
    this.times = [];
  }

  add(receipts, at) {
    for (const receipt of receipts) {
      this.receipts.delete(receipt.request_id);
      this.receipts.set(receipt.request_id, receipt);
      this.times.push(endOf(receipt));
    }
    while (this.receipts.size > MOST) this.receipts.delete(this.receipts.keys().next().value);
    this.times = this.times.filter((time) => at - time < 60).slice(-5000);
    this.draw();
  }

  clear() {
    this.receipts.clear();
    this.times = [];
    this.draw();
  }

  perMinute(at) {
    return this.times.filter((time) => at - time < 60).length;
  }

  draw() {
    const newest = [...this.receipts.values()].sort((one, other) => endOf(other) - endOf(one));
    fill(this.panel, this.box, newest.length === 0);
    this.more.hidden = newest.length <= this.shown;
    keyed(this.list, newest.slice(0, this.shown), (item) => item.request_id, (item) => this.row(item), () => {});
  }

  row(item) {
    const [outcome, kind] = outcomeOf(item);
    const refused = item.admission === "refused";
    const adapters = addedTo(item.plan.specialist, item.plan.adapters.map((adapter) => adapter.name));
    const details = make("details", {}, make(
      "summary", {}, make("span", { class: "muted", text: clock(endOf(item)) }),
      make("span", { class: "name one-line", text: refused ? "refused" : [whoOf(item), ...adapters].join(" + ") }),
      make("span", { class: "why one-line muted", text: whyOf(item) }),
      make("span", { class: "num muted optional", text: `${count(item.prompt_tokens)} → ${count(item.completion_tokens)}` }),
      make("span", { class: "num optional", text: duration(item.timings.total_ms) }),
      make("span", { class: "num", title: outcome }, pill(outcome, kind)),
    ));
    // made when somebody looks
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(receiptView(item));
    });
    return make("li", { "data-receipt": item.request_id }, details);
  }
}

export class JobPanel {
  constructor() {
    this.panel = byId("jobs-body");
    this.list = make("ul", { class: "entries", "aria-label": "Jobs, newest first" });
  }

  show(section, now) {
    const counts = section.counts;
    setText(byId("jobs-count"), counts ? `${count(counts.processing)} running, ${count(counts.queued)} queued` : "");
    fill(this.panel, this.list, section.data.length === 0);
    const kinds = { succeeded: "good", failed: "bad", cancelled: "warn", processing: "busy" };
    keyed(this.list, section.data, (job) => job.job_id, () => make(
      "li", {}, make("div", { class: "head" }, make("span", { class: "mono one-line" }), pill("")), make("div", { class: "muted" }),
    ), (row, job) => {
      const [id, status] = row.firstChild.children;
      setText(id, job.job_id);
      setPill(status, job.status, kinds[job.status]);
      const ended = job.finished_at ?? now;
      const took = job.started_at ? `, ran ${age(ended - job.started_at)}` : "";
      setText(row.lastChild, `submitted ${clock(job.submitted_at)}${took}`);
    });
  }
}

// Says aloud what somebody who does not look must know: a specialist stopped or began to serve.
export class StateAnnouncer {
  constructor(stateOf) {
    this.stateOf = stateOf;
    this.before = new Map();
  }

  see(items) {
    for (const item of items) {
      const [state] = this.stateOf(item);
      const before = this.before.get(item.specialist);
      if (before !== undefined && before !== state) announce(`${item.specialist}: ${state}`);
      this.before.set(item.specialist, state);
    }
  }
}
