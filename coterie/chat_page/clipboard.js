// Copies text. The clipboard's own interface is missing where the page came over plain HTTP from
// another machine, as on a phone; there a selection is copied.

import { announce, make, setText } from "../dashboard/dom.js";

const SHOWN_MS = 2000;

async function copy(text) {
  if (navigator.clipboard !== undefined) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser refused");
}

export function copyButton(label, textOf) {
  const button = make("button", { type: "button", class: "quiet small", "aria-label": label, text: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await copy(textOf());
      setText(button, "Copied");
      announce("Copied");
    } catch {
      setText(button, "Not allowed");
      announce("The browser does not allow copying");
    }
    button.focus();
    setTimeout(() => setText(button, "Copy"), SHOWN_MS);
  });
  return button;
}
