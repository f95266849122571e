// The keys that a person typed: in the storage of this tab, which ends with it.

import { byId } from "./dom.js";

const NAMES = { api: "coterie.api-key", admin: "coterie.admin-key" };

export const keyOf = (kind) => sessionStorage.getItem(NAMES[kind]) ?? "";

export function headersOf(kind) {
  const key = keyOf(kind);
  return key ? { authorization: `Bearer ${key}` } : {};
}

function keep(kind, value) {
  // a header holds visible ASCII only
  const key = value.replace(/[^\x21-\x7e]/g, "");
  if (key) sessionStorage.setItem(NAMES[kind], key);
  else sessionStorage.removeItem(NAMES[kind]);
}

// (kind, field) of the keys that this page asks for; the chat page has no use for an admin key.
function fields() {
  return Object.keys(NAMES).map((kind) => [kind, byId(`${kind}-key`)]).filter(([, field]) => field !== null);
}

export function openKeys() {
  for (const [kind, field] of fields()) field.value = keyOf(kind);
  byId("keys-dialog").showModal();
}

export function setUpKeys(onChange) {
  const dialog = byId("keys-dialog");
  const use = (valueOf) => {
    for (const [kind, field] of fields()) keep(kind, valueOf(field));
    dialog.close();
    onChange();
  };
  byId("keys").addEventListener("click", openKeys);
  byId("notice-button").addEventListener("click", openKeys);
  byId("keys-cancel").addEventListener("click", () => dialog.close());
  byId("keys-forget").addEventListener("click", () => use(() => ""));
  byId("keys-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use((field) => field.value);
  });
  dialog.addEventListener("close", () => {
    for (const [, field] of fields()) field.value = "";
  });
}

// The address of an endpoint beside the page, also behind a proxy that adds a prefix.
export const address = (path) => new URL(path, document.baseURI).href;

export async function problemOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}
