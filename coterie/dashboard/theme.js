// The theme: as the system has it, or as it was chosen with the button `theme`.

import { byId, setText } from "./dom.js";

const THEMES = ["system", "light", "dark"];
const NAME = "coterie.theme";

export function setUpTheme(onChange = () => {}) {
  const set = (name) => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    setText(byId("theme"), `Theme: ${name}`);
    onChange();
  };
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "system";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    localStorage.setItem(NAME, next);
    set(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  const chosen = localStorage.getItem(NAME);
  set(THEMES.includes(chosen) ? chosen : "system");
}
