// The pool of adapters, and where each expert of a mixture-of-experts model is.

import { byId, keyed, make, pill, rowOf, setPill, setText, tableOf } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";

const COLUMNS = [["Adapter", "wide bare"], ["Where"], ["In use", "num"], ["Size", "num"], ["Loads", "num"], ["A load", "num"]];

export class AdapterPanel {
  constructor() {
    const { table, body } = tableOf("Adapter pool", COLUMNS);
    this.body = body;
    this.room = make("p", { class: "muted" });
    byId("adapters-body").append(this.room, table);
  }

  showRoom(engines) {
    const parts = engines.filter((item) => item.adapters).map((item) => {
      const stats = item.stats;
      const loading = stats.adapter_loading ? `, ${count(stats.adapter_loading)} loading` : "";
      return `${item.name}: ${bytes(stats.adapter_resident_bytes)} of ${bytes(item.adapters.device_bytes)} on the device, ${bytes(stats.adapter_host_bytes)} of ${bytes(item.adapters.host_bytes)} in RAM${loading}`;
    });
    setText(this.room, parts.join("; "));
  }

  show(section) {
    byId("adapters-part").hidden = section.total === 0;
    const hidden = section.total - section.data.length;
    setText(byId("adapters-count"), `${count(section.total)}${hidden ? `, ${count(hidden)} not shown` : ""}`);
    keyed(this.body, section.data, (item) => item.name, () => {
      const row = rowOf(COLUMNS);
      row.children[0].append(make("span", { class: "name" }), make("span", { class: "muted" }));
      row.children[1].append(pill(""));
      return row;
    }, (row, item) => {
      const cells = row.children;
      setText(cells[0].children[0], item.name);
      setText(cells[0].children[1], ` ${item.version} ${item.kind}${item.pinned ? ", pinned" : ""}`);
      setPill(cells[1].firstChild, item.resident.length ? "on the device" : "on disk", item.resident.length ? "good" : "");
      cells[1].firstChild.title = item.resident.join(", ");
      setText(cells[2], item.waiting ? `${item.running} + ${item.waiting} waiting` : item.running || "–");
      setText(cells[3], bytes(item.bytes));
      setText(cells[4], count(item.loads));
      setText(cells[5], item.loads ? duration((1000 * item.load_s) / item.loads) : "–");
    });
  }
}

const TIERS = ["on disk", "in RAM", "on the device", "on the device, pinned", "not in the store"];

export class ResidencyPanel {
  constructor() {
    this.body = byId("residency-body");
    this.maps = {};
  }

  show(maps, engines) {
    this.maps = maps;
    this.engines = new Map((engines ?? []).map((item) => [item.name, item]));
    byId("residency-part").hidden = Object.keys(maps).length === 0;
    this.draw();
  }

  // also called when the colours change
  draw() {
    keyed(this.body, Object.entries(this.maps), ([name]) => name, () => this.map(), (node, [name, found]) => this.update(node, name, found));
  }

  map() {
    const legend = make("p", { class: "legend" });
    TIERS.forEach((label, tier) => {
      const swatch = make("i");
      swatch.style.background = `var(--tier-${tier})`;
      legend.append(make("span", { class: "key" }, swatch, make("span", { text: label })));
    });
    const rows = make("tbody");
    const table = make("details", {}, make("summary", { class: "muted", text: "By layer" }), make(
      "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Experts by layer" }, make(
        "table", { "aria-label": "MoE experts by layer and tier" }, make(
          "thead", {}, make("tr", {}, ...["Layer", "Device", "RAM", "Disk", "Found on the device"].map((text, at) => make("th", { scope: "col", class: at ? "num" : "", text }))),
        ), rows,
      ),
    ));
    const node = make("div", { class: "map" }, make("p"), make("canvas", { role: "img" }), legend, table);
    node.rows = rows;
    table.addEventListener("toggle", () => node.found && table.open && this.showRows(node));
    return node;
  }

  update(node, name, found) {
    const [title, canvas, legend, table] = node.children;
    node.found = found;
    const counts = [0, 0, 0, 0, 0];
    for (const tier of found.tiers) counts[tier] += 1;
    const total = found.tiers.length;
    const stats = this.engines.get(name)?.stats ?? {};
    const hits = (stats.moe_device_hits ?? 0) + (stats.moe_prefetch_hits ?? 0);
    const asked = hits + (stats.moe_device_misses ?? 0) + (stats.moe_host_runs ?? 0);
    const rate = asked ? `, ${percent(hits / asked)} of demands found on the device` : "";
    const words = `${name}: ${found.layers.length} layers by ${found.num_experts} experts, ${found.strategy}${rate}`;
    setText(title, words);
    legend.querySelectorAll(".key").forEach((key, tier) => {
      key.hidden = counts[tier] === 0;
      setText(key.lastChild, `${TIERS[tier]} ${count(counts[tier])} (${percent(counts[tier] / total)})`);
    });
    canvas.setAttribute("aria-label", `Where experts are. ${words}. ${TIERS.map((tier, at) => counts[at] ? `${tier}: ${counts[at]}` : "").filter(Boolean).join(", ")}`);
    this.paint(canvas, legend, found);
    if (table.open) this.showRows(node);
  }

  paint(canvas, legend, found) {
    const width = found.num_experts;
    const height = found.layers.length;
    canvas.width = width;
    canvas.height = height;
    canvas.style.height = `${Math.max(Math.min(height * 7, 420), 24)}px`;
    const colours = [...legend.querySelectorAll("i")].map((swatch) => rgb(getComputedStyle(swatch).backgroundColor));
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    for (let at = 0; at < found.tiers.length; at += 1) {
      const [red, green, blue] = colours[found.tiers[at]];
      image.data.set([red, green, blue, 255], 4 * at);
    }
    context.putImageData(image, 0, 0);
  }

  showRows(node) {
    const found = node.found;
    const rows = found.layers.map((layer, at) => {
      const tiers = found.tiers.slice(at * found.num_experts, (at + 1) * found.num_experts);
      const of = (...kinds) => [...tiers].filter((tier) => kinds.includes(tier)).length;
      return [layer, of("2", "3"), of("1"), of("0"), percent(found.hit_rates[at])];
    });
    keyed(node.rows, rows, ([layer]) => layer, () => make("tr", {}, ...[0, 1, 2, 3, 4].map((at) => make("td", { class: at ? "num" : "" }))), (row, values) => {
      values.forEach((value, at) => setText(row.children[at], value));
    });
  }
}

function rgb(colour) {
  return (colour.match(/[\d.]+/g) ?? [0, 0, 0]).slice(0, 3).map(Number);
}
