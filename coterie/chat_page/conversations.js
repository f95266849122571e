// Conversations, kept in the storage of this browser, each under a name of its own, so that two tabs
// that talk in two conversations do not undo each other.

const PREFIX = "coterie.conversation.";
const MAX_TITLE = 60;
export const UNTITLED = "New conversation";

// crypto.randomUUID is missing where the page came over plain HTTP from another machine
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const NO_SETTINGS = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", tools: "" };

// `from`: the first message that is sent; older ones are only shown.
export function newConversation(model) {
  return { id: newId(), title: UNTITLED, changed: Date.now(), model, settings: { ...NO_SETTINGS }, from: 0, messages: [] };
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0].trim();
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE).trimEnd()}…` : line || UNTITLED;
}

// A message has `role` and `content`. An answer may also have `reasoning`, `calls` (id, name,
// arguments, result), `name` (who gave it), `receipt`, `facts` of the receipt, and `state`: "open", "done", "stopped", "failed".
export function newMessage(role, content, more = {}) {
  return { id: newId(), role, content, at: Date.now(), ...more };
}

export class ConversationStore {
  // `onTrouble` gets a sentence when the browser keeps nothing, "" when it does again
  constructor(onTrouble) {
    this.onTrouble = onTrouble;
    this.known = new Map();
    try {
      for (const name of Object.keys(localStorage)) if (name.startsWith(PREFIX)) this.read(name, localStorage.getItem(name));
      // the page was closed while they arrived
      for (const { messages } of this.known.values()) for (const message of messages) if (message.state === "open") message.state = "stopped";
    } catch {
      onTrouble("This browser keeps nothing for this page: conversations end with the tab.");
    }
  }

  read(name, text) {
    let found;
    try {
      found = JSON.parse(text);
    } catch {
      return;
    }
    if (!Array.isArray(found?.messages) || PREFIX + found.id !== name) return;
    found.settings = { ...NO_SETTINGS, ...found.settings };
    this.known.set(found.id, found);
  }

  // Calls `onChange` with the id of a conversation that another tab changed or deleted. What another
  // tab writes into a conversation that is being answered here (`isBusy`) is overwritten.
  watch(isBusy, onChange) {
    addEventListener("storage", ({ key, newValue }) => {
      if (key === null || !key.startsWith(PREFIX)) return;
      const id = key.slice(PREFIX.length);
      if (newValue === null) this.known.delete(id);
      else if (isBusy(id)) return;
      else this.read(key, newValue);
      onChange(id);
    });
  }

  get(id) {
    return this.known.get(id);
  }

  list() {
    return [...this.known.values()].sort((one, other) => other.changed - one.changed);
  }

  has(conversation) {
    return this.known.get(conversation.id) === conversation;
  }

  save(conversation) {
    this.known.set(conversation.id, conversation);
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      this.onTrouble("");
    } catch {
      this.onTrouble("The browser's storage is full: export or delete conversations, or this one ends with the tab.");
    }
  }

  remove(id) {
    this.known.delete(id);
    localStorage.removeItem(PREFIX + id);
  }
}

const isSent = (message) => message.role === "user" || message.content || message.calls?.length;

// The messages as the server takes them. A question whose answer never came is left out with it:
// many templates refuse two questions in a row.
export function sentMessages({ settings, messages, from }) {
  const sent = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const kept = messages.slice(from);
  kept.forEach((message, at) => {
    const following = kept[at + 1];
    const hasNoAnswer = following !== undefined && following.state !== "open" && !isSent(following);
    if (!isSent(message) || (message.role === "user" && hasNoAnswer)) return;
    if (message.role === "user") sent.push({ role: "user", content: message.content });
    else sent.push(...answerMessages(message));
  });
  return sent;
}

function answerMessages({ content, calls = [] }) {
  if (!calls.length) return [{ role: "assistant", content }];
  const named = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  const results = calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" }));
  return [{ role: "assistant", content, tool_calls: named }, ...results];
}

// About half of the questions that are sent now are not sent any more. False if one is left.
export function forgetOldest(conversation) {
  const questions = conversation.messages.flatMap((message, at) => (message.role === "user" && at >= conversation.from ? [at] : []));
  if (questions.length < 2) return false;
  conversation.from = questions[Math.ceil(questions.length / 2)];
  return true;
}
