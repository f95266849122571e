// The table of specialists: state, load, what they deliver against what they promise, KV.

import { byId, fill, keyed, make, pill, rowOf, setClass, setPill, setText, tableOf } from "./dom.js";
import { bytes, count, milliseconds, percent, rate } from "./format.js";
import { demote, drain, drainReplica, restore, undrain, undrainReplica } from "./controls.js";

const COLUMNS = [
  ["Specialist", "wide bare"], ["State"], ["Run / wait", "num"], ["First token ms", "num"],
  ["Gap ms", "num"], ["Valid", "num"], ["Tokens/s", "num"], ["KV"], ["", "bare act"],
];
const SPIKES = { fewer_shadows: "spike 1", spill: "spike 2", priority_floor: "spike 3" };

export function stateOf(item) {
  const down = Object.values(item.replicas).filter((state) => state !== "up");
  if (down.length && down.length === Object.keys(item.replicas).length) return [down[0], "bad"];
  if (item.draining) return ["draining", "warn"];
  if (item.breaker !== "closed") return [item.held ? "demoted" : item.breaker.replaceAll("_", " "), "bad"];
  if (SPIKES[item.spike]) return [SPIKES[item.spike], "warn"];
  return down.length ? [`${down.length} ${down[0]}`, "warn"] : ["serving", "good"];
}

// A button in a row, if the operator may use it.
function offer(parent, button, isOffered, verb, name) {
  if (!isOffered) return button.remove();
  setText(button, `${verb}…`);
  button.setAttribute("aria-label", `${verb} ${name}`);
  if (button.parentElement === null) parent.append(button);
}

function canRestore(item) {
  return item.held || ["shadow_only", "ejected"].includes(item.breaker) || item.spike !== "normal" || item.ejected.length > 0;
}

function quantiles(cell, values, isKept) {
  const text = values.count ? `${milliseconds(values.p50_s)} / ${milliseconds(values.p95_s)}` : "–";
  setText(cell, isKept === false ? `${text} !` : text);
  cell.classList.toggle("broken", isKept === false);
  cell.title = values.count ? `p50 / p95 of ${count(values.count)}${isKept === false ? "; over the promise" : ""}` : "";
}

function valid(cell, item) {
  const found = item.correctness;
  const broken = item.kept.correctness === false;
  setText(cell, found.rate === null ? "–" : `${percent(found.rate)} of ${count(found.judged)}${broken ? " !" : ""}`);
  cell.classList.toggle("broken", broken);
  cell.title = found.floor === null ? "" : `promised: ${percent(found.floor)}`;
}

export function setMeter(meter, used, cached, total) {
  const [first, second] = meter.children;
  first.style.width = total ? `${(100 * used) / total}%` : "0";
  second.style.width = total ? `${(100 * cached) / total}%` : "0";
}

export function makeMeter() {
  return make("div", { class: "meter" }, make("span", { class: "used" }), make("span", { class: "cached" }));
}

export class SpecialistPanel {
  constructor() {
    this.panel = byId("specialists-body");
    const { table, body } = tableOf("Specialists", COLUMNS);
    this.table = table;
    this.body = body;
    this.lanes = make("div", { class: "lanes" });
    // tokens that were generated, by specialist, at the frame before
    this.before = null;
    this.rates = new Map();
  }

  show(items, at, canControl) {
    this.measure(items, at);
    fill(this.panel, this.table, items.length === 0);
    keyed(this.body, items, (item) => item.specialist, () => this.row(), (row, item) => this.update(row, item, canControl));
    this.showLanes(items.filter((item) => !item.is_remote));
  }

  measure(items, at) {
    const now = new Map(items.map((item) => [item.specialist, item.generation_tokens]));
    if (this.before !== null && at > this.before.at) {
      for (const [name, tokens] of now) {
        const gained = Math.max(tokens - (this.before.tokens.get(name) ?? tokens), 0);
        this.rates.set(name, gained / (at - this.before.at));
      }
    }
    this.before = { at, tokens: now };
  }

  row() {
    const row = rowOf(COLUMNS);
    const cells = row.children;
    cells[0].append(make("span", { class: "name" }), make("span", { class: "sub one-line" }));
    cells[1].append(pill(""));
    cells[7].append(makeMeter());
    row.act = make("button", { type: "button", class: "quiet" });
    row.act.addEventListener("click", () => (canRestore(row.item) ? restore : demote)(row.item));
    row.drain = make("button", { type: "button", class: "quiet" });
    row.drain.addEventListener("click", () => (row.item.draining ? undrain : drain)(row.item));
    return row;
  }

  update(row, item, canControl) {
    row.item = item;
    const cells = row.children;
    setText(cells[0].children[0], item.specialist);
    setText(cells[0].children[1], item.is_remote ? `remote: ${item.model}` : item.model);
    cells[0].children[1].title = item.model;
    setPill(cells[1].firstChild, ...stateOf(item));
    setText(cells[2], `${item.running} / ${item.waiting}`);
    quantiles(cells[3], item.ttft, item.kept.ttft_p95_s);
    quantiles(cells[4], item.itl, item.kept.itl_p95_s);
    valid(cells[5], item);
    const speed = this.rates.get(item.specialist) ?? 0;
    setText(cells[6], speed > 0 ? rate(speed) : "–");
    const used = item.kv_total - item.kv_free;
    const meter = cells[7].firstChild;
    setMeter(meter, used, item.kv_cached, item.kv_total);
    const share = item.kv_total ? percent(used / item.kv_total) : "0%";
    meter.title = `${share} used`;
    meter.setAttribute("role", "img");
    meter.setAttribute("aria-label", `KV ${share} used`);
    // without a fallback nobody would answer in its place
    const mayAct = canControl && (canRestore(item) || item.fallback !== item.specialist);
    offer(cells[8], row.act, mayAct, canRestore(item) ? "Restore" : "Demote", item.specialist);
    offer(cells[8], row.drain, canControl, item.draining ? "Undrain" : "Drain", item.specialist);
  }

  showLanes(items) {
    const parent = byId("kv-body");
    if (this.legend === undefined) {
      this.legend = make("p", { class: "legend" });
      for (const [name, colour] of [["in use", "--used"], ["cached", "--cached"], ["free", "--tier-0"]]) {
        const swatch = make("i");
        swatch.style.background = `var(${colour})`;
        this.legend.append(make("span", { class: "key" }, swatch, name));
      }
      parent.append(this.lanes, this.legend);
    }
    keyed(this.lanes, items, (item) => item.specialist, () => {
      const lane = make("div", { class: "lane" }, make("span"), makeMeter(), make("span", { class: "muted num" }));
      return lane;
    }, (lane, item) => {
      const [name, meter, text] = lane.children;
      setText(name, item.specialist);
      const used = item.kv_total - item.kv_free;
      setMeter(meter, used, item.kv_cached, item.kv_total);
      setText(text, `${count(used)} in use, ${count(item.kv_cached)} cached of ${count(item.kv_total)} tokens`);
    });
  }
}

export class EnginePanel {
  constructor() {
    this.list = make("ul", { class: "entries" });
    byId("engines-body").append(this.list);
  }

  show(engines, canControl) {
    byId("engines-part").hidden = engines.length === 0;
    const served = new Map();
    for (const item of engines) served.set(String(item.specialists), (served.get(String(item.specialists)) ?? 0) + 1);
    keyed(this.list, engines, (item) => item.name, () => {
      const state = pill("");
      const row = make("li", {}, make("div", { class: "head" }, make("span", { class: "name" }), state), make("div", { class: "muted" }), make("div", { class: "muted" }));
      row.drain = make("button", { type: "button", class: "quiet" });
      row.drain.addEventListener("click", () => (row.item.state === "draining" ? undrainReplica : drainReplica)(row.item));
      return row;
    }, (row, item) => {
      row.item = item;
      const [head, facts, figures] = row.children;
      setText(head.children[0], `${item.name}: ${item.specialists.join(", ")}`);
      const isDraining = item.state === "draining";
      setPill(head.children[1], item.state, item.state === "up" ? "good" : isDraining ? "warn" : "bad");
      // the last one is not drained: its specialist is
      const mayDrain = canControl && (isDraining || served.get(String(item.specialists)) > 1);
      offer(head, row.drain, mayDrain, isDraining ? "Undrain" : "Drain", item.name);
      setText(facts, [
        item.architecture, item.dtype, item.device, item.threads ? `${item.threads} threads` : "",
        item.weight_bytes ? `${bytes(item.weight_bytes)} weights` : "", item.kv_bytes ? `${bytes(item.kv_bytes)} KV` : "",
      ].filter(Boolean).join(" · "));
      setText(figures, this.figures(item));
      setClass(figures, item.restarts ? "broken" : "muted");
    });
  }

  figures(item) {
    const stats = item.stats;
    const parts = [`${count(item.in_flight)} in flight`];
    if (stats.prefix_queries_tokens) parts.push(`${percent(stats.prefix_hits_tokens / stats.prefix_queries_tokens)} of prompt tokens from the prefix cache`);
    if (stats.preemptions) parts.push(`${count(stats.preemptions)} preempted`);
    if (item.restarts) parts.push(`started again ${count(item.restarts)} times`);
    return parts.join(" · ");
  }
}
