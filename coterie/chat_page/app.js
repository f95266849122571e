// Connects conversations, their messages, the composer and the dialogs.

import { Refused, addPart, factsOf, readAnswer, receiptOf } from "./answer.js";
import { AnswerView, QuestionView } from "./messages.js";
import { ConversationStore, UNTITLED, forgetOldest, newConversation, newMessage, titleOf } from "./conversations.js";
import { ModelPicker } from "./models.js";
import { QuestionDialog, SettingsDialog } from "./dialogs.js";
import { announce, byId, keyed, make, setText } from "../dashboard/dom.js";
import { exportJson, exportMarkdown } from "./export.js";
import { keyOf, openKeys, setUpKeys } from "../dashboard/keys.js";
import { setUpTheme } from "../dashboard/theme.js";

const SAVE_MS = 1000;
const TICK_MS = 1000;
// nearer to the end than this, what arrives stays in view
const NEAR_END = 80;
const TOO_LONG = "The last message alone is longer than this model's context: shorten it, or choose another model.";

const log = byId("log");
const field = byId("text");
const settingsDialog = new SettingsDialog();
const questionDialog = new QuestionDialog();
// answers under way, by the id of their conversation
const runs = new Map();
let isLeaving = false;
const notices = { storage: "", server: "", asksKey: false };
const store = new ConversationStore((text) => {
  notices.storage = text;
  showNotice();
});
let shown = newConversation("auto");

function showNotice() {
  const text = notices.server || notices.storage;
  byId("notice").hidden = !text;
  setText(byId("notice-text"), text);
  byId("notice-button").hidden = !notices.asksKey;
}

const picker = new ModelPicker((text, asksKey) => {
  Object.assign(notices, { server: text, asksKey });
  showNotice();
});

const actions = {
  retry: (message) => again(message),
  edit: (message, text) => {
    const at = shown.messages.indexOf(message);
    shown.messages.splice(at);
    shown.from = Math.min(shown.from, at);
    send(text);
  },
  giveKey: openKeys,
  leaveOut: (message) => {
    if (forgetOldest(shown)) {
      again(message);
      return;
    }
    message.fault = { ...message.fault, code: "", message: TOO_LONG };
    saveIfKept(shown);
    draw();
  },
  sendResults: (message, results) => {
    message.calls.forEach((call, at) => {
      call.result = results[at] ?? "";
    });
    answer(shown);
  },
};

function draw() {
  const { messages, from } = shown;
  const isRunning = runs.has(shown.id);
  const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  keyed(
    byId("messages"),
    messages.map((message, at) => ({ message, isRunning, isLast: at === messages.length - 1, isLeftOut: at < from })),
    ({ message }) => message.id,
    ({ message }) => {
      const view = new (message.role === "user" ? QuestionView : AnswerView)(message, actions);
      view.node.view = view;
      return view.node;
    },
    (node, item) => node.view.update(item.message, item),
  );
  byId("welcome").hidden = messages.length > 0;
  const title = shown.title;
  setText(byId("title"), title);
  document.title = title === UNTITLED ? "Coterie" : `${title} · Coterie`;
  setText(byId("send"), isRunning ? "Stop" : "Send");
  const changed = Object.values(shown.settings).filter((value) => value !== "").length;
  setText(byId("settings"), changed ? `Settings (${changed})` : "Settings");
  if (isNear) log.scrollTop = log.scrollHeight;
}

function drawList() {
  const conversations = store.list();
  keyed(byId("conversations"), conversations, ({ id }) => id, ({ id }) => {
    const pick = make("button", { type: "button", class: "pick" });
    pick.addEventListener("click", () => open(id));
    return make("li", {}, pick);
  }, (item, { id, title }) => {
    const [pick] = item.children;
    setText(pick, title);
    if (id === shown.id) pick.setAttribute("aria-current", "true");
    else pick.removeAttribute("aria-current");
  });
  byId("no-conversations").hidden = conversations.length > 0;
  byId("delete-all").hidden = conversations.length === 0;
  byId("menu").hidden = store.get(shown.id) === undefined;
}

function drawAll() {
  draw();
  drawList();
  picker.show(shown.model);
}

function show(conversation) {
  shown = conversation;
  byId("menu").open = false;
  setView("talk");
  drawAll();
  log.scrollTop = log.scrollHeight;
}

// the address has the conversation, so that a reload and "back" find it
function open(id) {
  const hash = `#${id}`;
  if (location.hash !== hash) history.pushState(null, "", hash);
  followAddress();
  focusField();
}

function followAddress() {
  const found = store.get(location.hash.slice(1));
  show(found ?? newConversation(shown.model));
}

function begin() {
  history.pushState(null, "", location.pathname + location.search);
  show(newConversation(shown.model));
  focusField();
}

// On a screen without a keyboard the focus would open one.
function focusField() {
  if (!matchMedia("(pointer: coarse)").matches) field.focus();
}

function setView(name) {
  document.body.dataset.view = name;
}

function send(text) {
  if (shown.title === UNTITLED) shown.title = titleOf(text);
  shown.messages.push(newMessage("user", text));
  store.save(shown);
  if (location.hash !== `#${shown.id}`) history.replaceState(null, "", `#${shown.id}`);
  answer(shown);
  log.scrollTop = log.scrollHeight;
}

// The last answer once more; what it said is dropped.
function again(message) {
  const at = shown.messages.indexOf(message);
  if (at < 0 || runs.has(shown.id)) return;
  shown.messages.splice(at);
  answer(shown);
}

async function answer(conversation) {
  const message = newMessage("assistant", "", { state: "open" });
  const run = { abort: new AbortController(), message, heardAt: Date.now(), savedAt: Date.now(), isDrawn: true };
  conversation.messages.push(message);
  conversation.changed = Date.now();
  runs.set(conversation.id, run);
  store.save(conversation);
  drawAll();
  try {
    message.finish = await readAnswer(conversation, run.abort.signal, {
      onStart: (begun) => Object.assign(message, begun),
      onPart: (delta) => heard(conversation, run, delta),
    });
    message.state = "done";
  } catch (error) {
    fail(message, error, run.abort.signal.aborted);
  }
  runs.delete(conversation.id);
  await end(conversation, message);
}

// It may have been deleted meanwhile, or not been begun.
function saveIfKept(conversation) {
  if (store.has(conversation)) store.save(conversation);
}

function heard(conversation, run, delta) {
  addPart(run.message, delta);
  run.heardAt = Date.now();
  if (run.heardAt - run.savedAt > SAVE_MS) {
    run.savedAt = run.heardAt;
    saveIfKept(conversation);
  }
  if (conversation !== shown || !run.isDrawn) return;
  // at most once for each picture of the screen
  run.isDrawn = false;
  requestAnimationFrame(() => {
    run.isDrawn = true;
    draw();
  });
}

function fail(message, error, isStopped) {
  // a page that is left stops its answers
  if (isStopped || isLeaving) {
    message.state = "stopped";
    return;
  }
  if (!(error instanceof Refused)) console.error(error);
  const { status = 0, code = "", waitMs = 0 } = error;
  message.state = "failed";
  message.fault = { message: error.message, status, code, hasKey: Boolean(keyOf("api")), retryAt: waitMs ? Date.now() + waitMs : 0 };
  if (status === 401 && !byId("keys-dialog").open) openKeys();
}

async function end(conversation, message) {
  saveIfKept(conversation);
  drawAll();
  if (message.state === "done") announce(`${message.name} has answered`);
  else if (message.state === "stopped") announce("Stopped");
  if (message.state !== "done" || !message.receipt) return;
  const receipt = await receiptOf(message.receipt);
  if (receipt === null) return;
  message.facts = factsOf(receipt);
  saveIfKept(conversation);
  draw();
}

function stop() {
  runs.get(shown.id)?.abort.abort();
}

setInterval(() => {
  const run = runs.get(shown.id);
  if (run === undefined) return;
  byId("messages").lastElementChild?.view.wait?.(run.heardAt);
}, TICK_MS);

function fit() {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (runs.has(shown.id)) {
    stop();
    return;
  }
  const text = field.value.trim();
  if (!text) return;
  field.value = "";
  fit();
  send(text);
});
field.addEventListener("input", fit);
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!runs.has(shown.id)) byId("composer").requestSubmit();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]") !== null) return;
  if (byId("menu").open) {
    byId("menu").open = false;
    byId("menu").firstElementChild.focus();
  } else if (document.body.dataset.view === "list") setView("talk");
  else stop();
});
byId("model").addEventListener("change", () => {
  shown.model = byId("model").value;
  picker.show(shown.model);
  saveIfKept(shown);
});

function onClick(id, act) {
  byId(id).addEventListener("click", () => {
    byId("menu").open = false;
    act();
  });
}

function drop(id) {
  runs.get(id)?.abort.abort();
  store.remove(id);
}

onClick("new", begin);
onClick("show-side", () => {
  setView("list");
  byId("new").focus();
});
onClick("settings", () => settingsDialog.open(shown.settings, picker.card(), (settings) => {
  shown.settings = settings;
  saveIfKept(shown);
  draw();
}));
onClick("rename", () => questionDialog.open({ title: "Rename", text: "The title in the list.", yes: "Rename", value: shown.title }, (title) => {
  shown.title = title || UNTITLED;
  store.save(shown);
  drawAll();
}));
onClick("delete", () => questionDialog.open({ title: "Delete this conversation?", text: `“${shown.title}” is kept in this browser only.`, yes: "Delete", isDangerous: true }, () => {
  drop(shown.id);
  begin();
}));
onClick("delete-all", () => questionDialog.open({ title: "Delete all conversations?", text: `All ${store.list().length} are kept in this browser only.`, yes: "Delete all", isDangerous: true }, () => {
  for (const { id } of store.list()) drop(id);
  begin();
}));
onClick("export-json", () => exportJson(shown));
onClick("export-markdown", () => exportMarkdown(shown));
addEventListener("click", (event) => {
  if (!byId("menu").contains(event.target)) byId("menu").open = false;
});
addEventListener("popstate", followAddress);
addEventListener("pageshow", () => {
  isLeaving = false;
});
addEventListener("pagehide", () => {
  isLeaving = true;
  for (const id of runs.keys()) if (store.get(id) !== undefined) store.save(store.get(id));
});

setUpTheme();
setUpKeys(() => {
  picker.load();
  const last = shown.messages.at(-1);
  if (keyOf("api") && last?.fault?.status === 401) again(last);
});
store.watch((id) => runs.has(id), (id) => {
  const found = store.get(id);
  if (found === undefined) runs.get(id)?.abort.abort();
  if (id === shown.id) shown = found ?? newConversation(shown.model);
  drawAll();
});
followAddress();
picker.load();
focusField();
