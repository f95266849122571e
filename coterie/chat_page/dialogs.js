// The dialogs: settings of a conversation, a new title, and questions before something is deleted.

import { byId, setText } from "../dashboard/dom.js";
import { NO_SETTINGS } from "./conversations.js";

const FIELDS = Object.keys(NO_SETTINGS);

// What is wrong with the tools, or "".
function faultOf(text) {
  if (!text.trim()) return "";
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    return `Tools must be JSON: ${error.message}`;
  }
  const named = Array.isArray(tools) && tools.every((tool) => typeof tool?.function?.name === "string");
  return named ? "" : 'Tools must be a list such as [{"type": "function", "function": {"name": "weather", "parameters": {…}}}].';
}

export class SettingsDialog {
  constructor() {
    this.dialog = byId("settings-dialog");
    this.onUse = null;
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.use();
    });
    byId("settings-cancel").addEventListener("click", () => this.dialog.close());
    byId("settings-reset").addEventListener("click", () => this.show(NO_SETTINGS));
  }

  show(settings) {
    for (const name of FIELDS) byId(`set-${name}`).value = settings[name];
    setText(byId("settings-fault"), "");
  }

  // `card`: of the model, as /v1/models describes it; undefined if it is not there now
  open(settings, card, onUse) {
    this.onUse = onUse;
    this.show(settings);
    for (const name of ["temperature", "top_p"]) {
      byId(`set-${name}`).placeholder = card?.sampling?.[name]?.value ?? "";
    }
    byId("set-system").placeholder = card?.system_prompt ?? "";
    this.dialog.showModal();
  }

  use() {
    const settings = Object.fromEntries(FIELDS.map((name) => [name, byId(`set-${name}`).value]));
    const fault = faultOf(settings.tools);
    setText(byId("settings-fault"), fault);
    if (fault) return;
    this.dialog.close();
    this.onUse(settings);
  }
}

// Asks for a text (`value` is the one so far) or, without `value`, for a yes; `onYes` gets the text.
export class QuestionDialog {
  constructor() {
    this.dialog = byId("question-dialog");
    this.onYes = null;
    byId("question-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.dialog.close();
      this.onYes(byId("question-text").value.trim());
    });
    byId("question-cancel").addEventListener("click", () => this.dialog.close());
  }

  open({ title, text, yes, value, isDangerous = false }, onYes) {
    this.onYes = onYes;
    setText(byId("question-title"), title);
    setText(byId("question-about"), text);
    setText(byId("question-yes"), yes);
    byId("question-yes").className = isDangerous ? "primary danger" : "primary";
    byId("question-field").hidden = value === undefined;
    byId("question-text").value = value ?? "";
    this.dialog.showModal();
  }
}
