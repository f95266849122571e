// The picker of models and experts, and what their list says of the server.

import { address, headersOf, keyOf, problemOf } from "../dashboard/keys.js";
import { byId, make } from "../dashboard/dom.js";

// a server that loads its models is asked again after this time
const AGAIN_MS = 2000;

export class ModelPicker {
  // `onState(text, asksKey)`: why there is no list, "" when there is one
  constructor(onState) {
    this.select = byId("model");
    this.onState = onState;
    this.cards = [];
    this.chosen = "auto";
    this.timer = null;
  }

  async load() {
    clearTimeout(this.timer);
    const response = await fetch(address("v1/models"), { headers: headersOf("api") }).catch(() => null);
    this.cards = response?.ok ? (await response.json()).data.filter((item) => item.kind !== "encoder") : [];
    const asksKey = response?.status === 401;
    if (!response?.ok && !asksKey) this.timer = setTimeout(() => this.load(), AGAIN_MS);
    this.onState(await stateOf(response), asksKey);
    this.show(this.chosen);
  }

  // What /v1/models says of the chosen model; undefined if it is not there.
  card() {
    return this.cards.find((item) => item.id === this.chosen);
  }

  show(chosen) {
    this.chosen = chosen;
    const groups = new Map([["Models", []], ["Experts", []], ["Other names", []]]);
    for (const item of this.cards) if (item.id !== "auto") groups.get(this.groupOf(item)).push(item.id);
    // what was chosen may be gone, or not known yet
    if (chosen !== "auto" && this.card() === undefined) groups.set(this.cards.length ? "Not here now" : "Chosen", [chosen]);
    // an open list stays open while nothing has changed
    const drawn = JSON.stringify([...groups]);
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      const nodes = [make("option", { value: "auto", text: "auto: the router chooses" })];
      for (const [label, names] of groups) {
        if (names.length) nodes.push(make("optgroup", { label }, ...names.map((name) => make("option", { value: name, text: name }))));
      }
      this.select.replaceChildren(...nodes);
    }
    this.select.value = chosen;
  }

  groupOf(item) {
    if (this.cards.some((other) => other.id === item.root && other.id !== item.id)) return "Other names";
    return item.parent ? "Experts" : "Models";
  }
}

async function stateOf(response) {
  if (response === null) return "There is no connection to the server.";
  if (response.ok) return "";
  if (response.status === 401) return keyOf("api") ? "The API key was not accepted." : "This server asks for an API key.";
  return `The server is not ready: ${await problemOf(response)}`;
}
