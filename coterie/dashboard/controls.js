// What an operator may change. Every change is confirmed first and is in the audit log afterwards.

import { announce, byId, keyed, make, pill, setText } from "./dom.js";
import { age, clock, count, percent } from "./format.js";
import { address, headersOf, problemOf } from "./keys.js";

async function send(method, path, body) {
  const response = await fetch(address(path), {
    method,
    headers: { ...headersOf("admin"), ...(body ? { "content-type": "application/json" } : {}) },
    body: body ? JSON.stringify(body) : undefined,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  return response.json();
}

let pending = null;

function ask(question) {
  pending = question;
  setText(byId("confirm-title"), question.title);
  setText(byId("confirm-text"), question.text);
  setText(byId("confirm-do"), question.verb);
  setText(byId("confirm-fault"), "");
  byId("confirm-do").disabled = false;
  byId("confirm-reason").value = "";
  byId("confirm-reason-part").hidden = !question.asksReason;
  byId("confirm-dialog").showModal();
}

export function setUpControls() {
  const dialog = byId("confirm-dialog");
  byId("confirm-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => (pending = null));
  byId("confirm-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const question = pending;
    byId("confirm-do").disabled = true;
    try {
      const said = await question.act(byId("confirm-reason").value);
      // the dialog may have been closed, and ask about something else by now
      if (pending === question) dialog.close();
      announce(said);
    } catch (error) {
      if (pending !== question) return announce(error.message);
      setText(byId("confirm-fault"), error.message);
      byId("confirm-do").disabled = false;
    }
  });
  byId("reload").addEventListener("click", () => ask({
    title: "Reload settings?",
    text: "The server reads its settings and key files again. All of it takes effect, or none. Running requests keep the settings they began with.",
    verb: "Reload",
    asksReason: false,
    act: async () => {
      const result = await send("POST", "v1/config/reload");
      return result.changed.length ? `Settings reloaded: ${result.changed.join(", ")}` : "Settings reloaded: nothing changed";
    },
  }));
}

const specialistPath = (name, action) => `v1/ensemble/specialists/${encodeURIComponent(name)}/${action}`;

export function demote(item) {
  ask({
    title: `Demote ${item.specialist}?`,
    text: `It answers nobody from now on, only shadows: its requests go to ${item.fallback === item.specialist ? "its fallback" : item.fallback}. It stays so until somebody restores it.`,
    verb: "Demote",
    asksReason: true,
    act: async (reason) => {
      await send("POST", specialistPath(item.specialist, "demote"), { reason });
      return `${item.specialist} is demoted`;
    },
  });
}

export function restore(item) {
  ask({
    title: `Restore ${item.specialist}?`,
    text: "Requests go to it again at once, and its breaker judges it anew.",
    verb: "Restore",
    asksReason: true,
    act: async (reason) => {
      await send("POST", specialistPath(item.specialist, "restore"), { reason });
      return `${item.specialist} serves again`;
    },
  });
}

// `kind`: specialists or replicas
function drainOrNot(kind, name, action, words) {
  ask({
    ...words,
    asksReason: true,
    act: async (reason) => {
      await send("POST", `v1/ensemble/${kind}/${encodeURIComponent(name)}/${action}`, { reason });
      return action === "drain" ? `${name} is draining` : `${name} takes requests again`;
    },
  });
}

export function drain(item) {
  const name = item.specialist;
  const others = item.fallback === name ? "they are refused: it has no fallback" : `they go to ${item.fallback}`;
  drainOrNot("specialists", name, "drain", {
    title: `Drain ${name}?`,
    text: `It takes no new requests: ${others}; those that name it are refused. What runs or waits ends as usual. It stays so until somebody undrains it.`,
    verb: "Drain",
  });
}

export function undrain(item) {
  drainOrNot("specialists", item.specialist, "undrain", {
    title: `Undrain ${item.specialist}?`, text: "Requests go to it again at once.", verb: "Undrain",
  });
}

export function drainReplica(item) {
  drainOrNot("replicas", item.name, "drain", {
    title: `Drain ${item.name}?`,
    text: `It takes no new requests: the other replicas of ${item.specialists.join(", ")} do. What it has begun ends as usual. It stays so until somebody undrains it.`,
    verb: "Drain",
  });
}

export function undrainReplica(item) {
  drainOrNot("replicas", item.name, "undrain", {
    title: `Undrain ${item.name}?`, text: "Requests go to it again at once.", verb: "Undrain",
  });
}

function stopCanary(item) {
  ask({
    title: `Stop the canary of ${item.subject}?`,
    text: `${item.label} gets no share of the traffic any more.`,
    verb: "Stop canary",
    asksReason: false,
    act: async () => {
      await send("DELETE", `v1/ensemble/canaries/${encodeURIComponent(item.subject)}`);
      return `the canary of ${item.subject} is stopped`;
    },
  });
}

export class OperatorPanel {
  constructor() {
    this.shadows = make("p", { class: "muted" });
    this.canaries = make("ul", { class: "entries", "aria-label": "Canaries" });
    byId("ensemble-body").append(this.shadows, this.canaries);
    this.audit = make("ul", { class: "entries", "aria-label": "Changes, newest first" });
  }

  greet(hello) {
    const sees = hello.view !== "tenant";
    byId("operator-part").hidden = !sees;
    byId("operator-controls").hidden = !hello.controls;
    const hint = byId("operator-hint");
    hint.hidden = hello.controls;
    setText(hint, hello.has_admins
      ? "Controls need an admin key: give it under Keys."
      : "Nothing can be changed from here: this server was started without --admin-key-file.");
  }

  showEnsemble(status, canControl) {
    const shadows = status.shadows;
    setText(this.shadows, `Shadows: ${count(shadows.running)} of ${count(shadows.most)} running, ${count(shadows.waiting)} waiting`);
    const running = status.canaries.filter((item) => item.ended_at === null || !item.ended_at);
    keyed(this.canaries, running, (item) => `${item.kind} ${item.subject}`, () => {
      const stop = make("button", { type: "button", class: "quiet", text: "Stop…" });
      const row = make("li", {}, make("div", { class: "head" }, make("span", { class: "name" }), stop), make("div", { class: "muted" }));
      stop.addEventListener("click", () => stopCanary(row.item));
      row.stop = stop;
      return row;
    }, (row, item) => {
      row.item = item;
      row.stop.hidden = !canControl;
      row.stop.setAttribute("aria-label", `Stop the canary of ${item.subject}`);
      setText(row.firstChild.firstChild, `Canary ${item.label}`);
      setText(row.lastChild, `${percent(item.share)} of the traffic; valid ${count(item.candidate_valid)} of ${count(item.candidate_judged)}, before ${count(item.current_valid)} of ${count(item.current_judged)}`);
    });
  }

  showAudit(changes) {
    const body = byId("audit-body");
    body.querySelector(".empty").hidden = changes.length > 0;
    if (this.audit.parentElement === null) body.append(this.audit);
    keyed(this.audit, changes, (item) => `${item.at} ${item.kind} ${item.subject}`, (item) => {
      const details = item.details ?? {};
      const said = details.reason || (Array.isArray(details.changed) ? details.changed.join(", ") || "nothing changed" : "");
      return make("li", {}, make(
        "div", { class: "head" }, make("span", {}, make("span", { class: "name", text: item.subject }), " ", pill(item.kind.replaceAll("_", " "))),
        make("time", { class: "muted", datetime: new Date(item.at * 1000).toISOString(), title: `${age(Date.now() / 1000 - item.at)} ago`, text: clock(item.at) }),
      ), make("div", { class: "muted", text: said ? `${item.actor}: ${said}` : item.actor }));
    }, () => {});
  }
}
