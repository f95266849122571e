// Connects the stream with the panels.

import { AdapterPanel, ResidencyPanel } from "./memory.js";
import { announce, byId, keyed, make, setText } from "./dom.js";
import { AnswerPanel, JobPanel, RequestPanel, StateAnnouncer } from "./requests.js";
import { Chat } from "./chat.js";
import { EnginePanel, SpecialistPanel, stateOf } from "./specialists.js";
import { LiveStream } from "./stream.js";
import { OperatorPanel, setUpControls } from "./controls.js";
import { address, headersOf, keyOf, problemOf, setUpKeys } from "./keys.js";
import { clock, count, rate } from "./format.js";
import { setUpTheme } from "./theme.js";

const panels = {
  specialists: new SpecialistPanel(),
  requests: new RequestPanel(),
  answers: new AnswerPanel(),
  engines: new EnginePanel(),
  adapters: new AdapterPanel(),
  residency: new ResidencyPanel(),
  jobs: new JobPanel(),
  operator: new OperatorPanel(),
};
const chat = new Chat();
const announcer = new StateAnnouncer(stateOf);
// the newest of each section
let state = {};
let hello = { view: "", controls: false };
// what to add to this machine's clock to get the server's
let offset = 0;
const speeds = [];
const SPEEDS = 60;
// whether the stream broke since it was last live
let isLost = false;

const serverNow = () => Date.now() / 1000 + offset;

function setLink(text, kind) {
  setText(byId("link-text"), text);
  byId("dot").className = `dot ${kind}`.trim();
}

function notice(text, asksKey = false) {
  byId("notice").hidden = !text;
  setText(byId("notice-text"), text);
  byId("notice-button").hidden = !asksKey;
}

function greet(data) {
  hello = data;
  state = {};
  speeds.length = 0;
  panels.specialists.before = null;
  panels.answers.clear();
  const views = { operator: "operator", tenant: "your requests", local: "local" };
  setLink(`live, ${views[data.view]} · ${data.version}`, "live");
  if (isLost) announce("Connected again");
  isLost = false;
  notice("");
  panels.operator.greet(data);
  if (data.view === "tenant") for (const id of ["engines-part", "adapters-part", "residency-part"]) byId(id).hidden = true;
  chat.showModels();
}

// Without a key that is accepted nothing of what was seen before stays on the page.
function forget() {
  hello = { view: "", controls: false };
  state = {};
  speeds.length = 0;
  panels.specialists.rates.clear();
  panels.specialists.show([], 0, false);
  panels.requests.show({ total: 0, data: [] });
  panels.answers.clear();
  panels.engines.show([], false);
  panels.adapters.show({ total: 0, data: [] });
  panels.residency.show({}, []);
  panels.jobs.show({ counts: null, data: [] }, 0);
  panels.operator.showAudit([]);
  panels.operator.greet({ view: "tenant", controls: false, has_admins: true });
  chat.showModels();
  summarise();
  drawTimes();
}

function update(data) {
  offset = data.at - Date.now() / 1000;
  Object.assign(state, data);
  if (data.specialists) {
    panels.specialists.show(data.specialists, data.at, hello.controls);
    announcer.see(data.specialists);
  } else if (state.specialists) panels.specialists.show(state.specialists, data.at, hello.controls);
  if (data.requests) panels.requests.show(data.requests);
  if (data.engines) {
    panels.engines.show(data.engines, hello.controls);
    panels.adapters.showRoom(data.engines);
  }
  if (data.adapters) panels.adapters.show(data.adapters);
  if (data.residency || (data.engines && state.residency)) panels.residency.show(state.residency, state.engines);
  if (data.ensemble) panels.operator.showEnsemble(data.ensemble, hello.controls);
  if (data.audit) panels.operator.showAudit(data.audit);
  if (data.jobs) panels.jobs.show(data.jobs, data.at);
  if (data.receipts) panels.answers.add(data.receipts, data.at);
  if (data.server && !data.server.ready) notice("The server cannot take every request now: models load, or a worker is down.");
  else if (data.server) notice("");
  summarise();
  drawTimes();
}

function summarise() {
  const specialists = state.specialists ?? [];
  const running = specialists.reduce((sum, item) => sum + item.running, 0);
  const waiting = specialists.reduce((sum, item) => sum + item.waiting, 0);
  const speed = specialists.reduce((sum, item) => sum + (panels.specialists.rates.get(item.specialist) ?? 0), 0);
  speeds.push(speed);
  if (speeds.length > SPEEDS) speeds.shift();
  const workers = new Map(specialists.flatMap((item) => Object.entries(item.replicas)));
  const up = [...workers.values()].filter((found) => found === "up").length;
  const serving = specialists.filter((item) => stateOf(item)[1] !== "bad").length;
  const tiles = [
    ["Running", count(running), ""], ["Waiting", count(waiting), ""],
    ["Tokens", rate(speed), "per second"], ["Answers", count(panels.answers.perMinute(serverNow())), "in a minute"],
    ["Specialists", `${serving}/${specialists.length}`, "serving"], ["Workers", `${up}/${workers.size}`, "up"],
  ];
  keyed(byId("summary"), tiles, ([label]) => label, ([label]) => {
    const tile = make("div", { class: "tile" }, make("div", { class: "label", text: label }), make("div", { class: "value" }, make("span"), make("span", { class: "unit" })));
    return tile;
  }, (tile, [, value, unit]) => {
    setText(tile.children[1].children[0], value);
    setText(tile.children[1].children[1], unit);
  });
  drawSpark();
}

function drawSpark() {
  const tile = byId("summary").children[2];
  let svg = tile.querySelector("svg");
  if (svg === null) {
    const space = "http://www.w3.org/2000/svg";
    svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "spark");
    svg.setAttribute("viewBox", `0 0 ${SPEEDS - 1} 20`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.append(document.createElementNS(space, "polyline"));
    tile.append(svg);
  }
  const highest = Math.max(...speeds, 1);
  const points = speeds.map((value, at) => `${SPEEDS - speeds.length + at},${(19 - (18 * value) / highest).toFixed(1)}`);
  svg.firstChild.setAttribute("points", points.join(" "));
}

function drawTimes() {
  panels.requests.draw(serverNow(), hello.view === "operator");
}

const stream = new LiveStream(
  (signal) => fetch(address("v1/dashboard/events"), { headers: headersOf(keyOf("admin") ? "admin" : "api"), signal, cache: "no-store" }),
  {
    event(name, data) {
      if (name === "hello") greet(data);
      else if (name === "update") update(data);
    },
    async refused(response) {
      const problem = await problemOf(response);
      if (response.status !== 401 && response.status !== 403) {
        // too many dashboards, or the server is about to end
        notice(`The server refused: ${problem}`);
        return false;
      }
      forget();
      setLink("no key", "lost");
      notice(keyOf("admin") || keyOf("api") ? `The key was not accepted: ${problem}` : "This server asks for a key.", true);
      announce("This server asks for a key.");
      return true;
    },
    lost() {
      const of = state.at ? `, figures of ${clock(state.at)}` : "";
      setLink(`connection lost, trying again${of}`, "lost");
      if (!isLost) announce("Connection lost");
      isLost = true;
    },
  },
);

setUpTheme(() => panels.residency.draw());
setUpKeys(() => {
  if (!keyOf("api") && !keyOf("admin")) chat.clear();
  setLink("connecting", "");
  stream.start();
});
setUpControls();
setInterval(() => isLost || drawTimes(), 1000);
stream.start();
