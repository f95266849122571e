// Makes and updates elements. Text is only ever set as text, so nothing that a caller, a model or a
// settings file wrote can become markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function setText(node, text) {
  const shown = String(text ?? "");
  if (node.textContent !== shown) node.textContent = shown;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

export function pill(text, kind = "") {
  return make("span", { class: `pill ${kind}`.trim(), text });
}

export function setPill(node, text, kind = "") {
  setText(node, text);
  setClass(node, `pill ${kind}`.trim());
}

// The children of `parent`, one for each item and in their order. A child stays the same element
// while its key stays, so focus and open details are kept.
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.keyedChildren ?? (parent.keyedChildren = new Map());
  const seen = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (seen.has(key)) continue;
    seen.add(key);
    let child = known.get(key);
    if (child === undefined) {
      child = create(item);
      known.set(key, child);
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    // in the document, so that it has its styles
    update(child, item);
  }
  for (const [key, child] of known) {
    if (!seen.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}

// A table that narrow screens show as cards. Roles are written out, because a changed `display`
// would take them away. `columns`: [label, class of its cells].
export function tableOf(caption, columns) {
  const head = make("tr", { role: "row" });
  for (const [label, kind] of columns) {
    head.append(make("th", { role: "columnheader", scope: "col", class: kind ?? "", text: label }));
  }
  const body = make("tbody", { role: "rowgroup" });
  const table = make(
    "table",
    { class: "cards", role: "table", "aria-label": caption },
    make("thead", { role: "rowgroup" }, head),
    body,
  );
  return { table, body, columns };
}

export function rowOf(columns) {
  const row = make("tr", { role: "row" });
  for (const [label, kind] of columns) {
    row.append(make("td", { role: "cell", class: kind ?? "", "data-label": label }));
  }
  return row;
}

// Shows `node` in a panel in place of its sentence about emptiness, or that sentence again.
export function fill(panel, node, isEmpty) {
  const empty = panel.querySelector(":scope > .empty");
  if (empty !== null) empty.hidden = !isEmpty;
  if (node.parentElement !== panel) panel.append(node);
  node.hidden = isEmpty;
}

export function announce(text) {
  setText(byId("announcer"), text);
}
