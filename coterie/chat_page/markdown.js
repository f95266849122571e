// Markdown as elements. Text of a model is only ever set as text: HTML in it stays text, a link is
// made only of an address that begins with http or https, and an image becomes a link. What is not
// known here stays as it was written. Every step is linear in the length of the text, because a
// model may write anything and an answer is drawn many times while it arrives.

import { make } from "../dashboard/dom.js";
import { copyButton } from "./clipboard.js";

// quotes and lists inside each other; what is deeper is a paragraph
const MAX_DEPTH = 8;
// marks of emphasis that may be open at once
const MAX_OPEN = 16;
const MAX_ADDRESS = 2000;
// the page's own headings are h1 and h2
const HEADING = ["h3", "h4", "h5", "h6", "h6", "h6"];
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

// Shows a text that grows: blocks that did not change stay the same elements.
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.sources = [];
  }

  show(text) {
    if (text === this.text) return;
    this.text = text;
    const found = blocksOf(linesOf(text), 0);
    let same = 0;
    while (same < this.sources.length && this.sources[same] === found[same]?.source) same += 1;
    while (this.node.children.length > same) this.node.lastElementChild.remove();
    for (const block of found.slice(same)) this.node.append(block.build());
    this.sources = found.map((block) => block.source);
  }
}

export function markdown(text) {
  const node = make("div");
  new MarkdownView(node).show(text);
  return node;
}

const linesOf = (text) => text.replace(/\r\n?/g, "\n").split("\n").map((line) => line.replace(/^[ \t]+/, expanded));
const expanded = (blank) => blank.replaceAll("\t", "    ");
const indentOf = (line) => line.length - line.trimStart().length;

// Each block: its lines as text, and a function that makes its one element.
function blocksOf(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = readBlock(lines, at, depth);
    found.push({ source: lines.slice(at, block.end).join("\n"), build: block.build });
    at = block.end;
  }
  return found;
}

function readBlock(lines, at, depth) {
  for (const read of READERS) {
    const block = read(lines, at, depth);
    if (block !== null) return block;
  }
  return readParagraph(lines, at);
}

function element(tag, blocks) {
  const node = make(tag);
  for (const block of blocks) node.append(block.build());
  return node;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})/;

function isFence(line) {
  const match = FENCE.exec(line);
  return match !== null && !(match[1][0] === "`" && line.slice(match[0].length).includes("`"));
}

function readFence(lines, at) {
  if (!isFence(lines[at])) return null;
  const [head, mark] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  const closes = (line) => {
    const rest = line.trim();
    return rest.length >= mark.length && indentOf(line) < 4 && rest === mark[0].repeat(rest.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  const language = lines[at].slice(head.length).trim().split(/\s/)[0];
  return { end: Math.min(end + 1, lines.length), build: () => codeBlock(code, language) };
}

function codeBlock(code, language) {
  const head = make("div", { class: "code-head" }, make("span", { text: language || "code" }), copyButton("Copy code", () => code));
  // it may scroll, so the keyboard must reach it
  const body = make("pre", { tabindex: "0" }, make("code", { text: code }));
  return make("div", { class: "code" }, head, body);
}

const CODE_INDENT = 4;

function readIndented(lines, at) {
  if (indentOf(lines[at]) < CODE_INDENT) return null;
  let end = at;
  let next = at;
  while (next < lines.length && (!lines[next].trim() || indentOf(lines[next]) >= CODE_INDENT)) {
    next += 1;
    if (lines[next - 1].trim()) end = next;
  }
  const code = lines.slice(at, end).map((line) => line.slice(CODE_INDENT)).join("\n");
  return { end, build: () => codeBlock(code, "") };
}

const HEAD = /^ {0,3}(#{1,6})(?: |$)/;

function readHeading(lines, at) {
  const match = HEAD.exec(lines[at]);
  if (match === null) return null;
  const text = lines[at].slice(match[0].length).trim();
  const closing = / #+$/.exec(` ${text.slice(-8)}`);
  const shown = closing === null ? text : text.slice(0, Math.max(text.length - closing[0].length + 1, 0)).trimEnd();
  return { end: at + 1, build: () => make(HEADING[match[1].length - 1], {}, ...inline(shown)) };
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length > 2 && indentOf(line) < 4 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function readRule(lines, at) {
  return isRule(lines[at]) ? { end: at + 1, build: () => make("hr") } : null;
}

const isQuote = (line) => indentOf(line) < 4 && line.trimStart().startsWith(">");

function readQuote(lines, at, depth) {
  if (depth >= MAX_DEPTH || !isQuote(lines[at])) return null;
  let end = at;
  while (end < lines.length && isQuote(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ *> ?/, ""));
  return { end, build: () => element("blockquote", blocksOf(inner, depth + 1)) };
}

const MARKER = /^( *)([-*+]|\d{1,9}[.)])( {1,4}|$)/;

function markerOf(line) {
  const match = MARKER.exec(line);
  if (match === null || isRule(line)) return null;
  const [whole, blank, mark] = match;
  return { indent: blank.length, ordered: mark.length > 1, number: Number.parseInt(mark, 10), size: whole.length };
}

function readList(lines, at, depth) {
  const first = markerOf(lines[at]);
  if (first === null || depth >= MAX_DEPTH) return null;
  const items = [];
  let end = at;
  let marker = first;
  while (marker !== null && marker.ordered === first.ordered && marker.indent < first.indent + 2) {
    const item = readItem(lines, end, marker);
    items.push(item.lines);
    end = item.end;
    marker = end < lines.length ? markerOf(lines[end]) : null;
  }
  return { end, build: () => listOf(items, first, depth) };
}

// The lines of one item without their indent, and where it ends.
function readItem(lines, at, { indent, size }) {
  const found = [lines[at].slice(size)];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      // blank lines belong to the item if something of it follows
      let next = end;
      while (next < lines.length && !lines[next].trim()) next += 1;
      const another = next < lines.length ? markerOf(lines[next]) : null;
      if (next === lines.length || (indentOf(lines[next]) < indent + 2 && another === null)) break;
      if (indentOf(lines[next]) < indent + 2) {
        end = next;
        break;
      }
      found.push(...lines.slice(end, next));
      end = next;
    } else if (indentOf(line) >= indent + 2) {
      found.push(line.slice(Math.min(indentOf(line), size)));
      end += 1;
    } else if (markerOf(line) !== null || begins(line) || !found.at(-1).trim()) break;
    else {
      found.push(line.trimStart());
      end += 1;
    }
  }
  return { lines: found, end };
}

function listOf(items, { ordered, number }, depth) {
  const list = make(ordered ? "ol" : "ul", ordered && number !== 1 ? { start: number } : {});
  for (const lines of items) {
    const item = make("li");
    for (const block of blocksOf(lines, depth + 1)) {
      const node = block.build();
      // the first sentence of an item is not a paragraph of its own
      if (node.tagName === "P" && !item.hasChildNodes()) item.append(...node.childNodes);
      else item.append(node);
    }
    list.append(item);
  }
  return list;
}

function cellsOf(line) {
  const cells = [""];
  let inCode = false;
  const row = line.trim().replace(/^\|/, "");
  for (let at = 0; at < row.length; at += 1) {
    const char = row[at];
    if (char === "\\" && row[at + 1] === "|") {
      cells[cells.length - 1] += "|";
      at += 1;
    } else if (char === "|" && !inCode) cells.push("");
    else {
      if (char === "`") inCode = !inCode;
      cells[cells.length - 1] += char;
    }
  }
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim());
}

const RULE_CELL = /^:?-+:?$/;

function isTable(lines, at) {
  const rule = lines[at + 1];
  if (rule === undefined || !lines[at].includes("|") || !rule.includes("-")) return false;
  const cells = cellsOf(rule);
  return cells.every((cell) => RULE_CELL.test(cell)) && cells.length === cellsOf(lines[at]).length;
}

function readTable(lines, at) {
  if (!isTable(lines, at)) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  return { end, build: () => tableNode(lines.slice(at, end)) };
}

function tableNode([head, rule, ...rows]) {
  const aligned = cellsOf(rule).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const rowNode = (line, tag, more = {}) => {
    const cells = cellsOf(line);
    const row = make("tr");
    aligned.forEach((align, at) => row.append(make(tag, { class: align, ...more }, ...inline(cells[at] ?? ""))));
    return row;
  };
  const body = make("tbody");
  for (const line of rows) body.append(rowNode(line, "td"));
  const table = make("table", {}, make("thead", {}, rowNode(head, "th", { scope: "col" })), body);
  // it may scroll, so the keyboard must reach it
  return make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

// Whether a line begins a block that ends a paragraph.
function begins(line) {
  if (isFence(line) || HEAD.test(line) || isRule(line) || isQuote(line)) return true;
  const marker = markerOf(line);
  return marker !== null && marker.indent < 4 && marker.size < line.length && (!marker.ordered || marker.number === 1);
}

const UNDERLINE = /^ {0,3}(=+|-+) *$/;

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim()) {
    const underline = UNDERLINE.exec(lines[end]);
    if (underline !== null && !lines[at].includes("|")) {
      const text = lines.slice(at, end).join("\n").trim();
      const tag = underline[1][0] === "=" ? HEADING[0] : HEADING[1];
      return { end: end + 1, build: () => make(tag, {}, ...inline(text)) };
    }
    if (begins(lines[end]) || isTable(lines, end)) break;
    end += 1;
  }
  // white space is kept: small models write code without marks around it
  const text = lines.slice(at, end).map((line) => line.trimEnd()).join("\n").trimStart();
  return { end, build: () => make("p", {}, ...inline(text)) };
}

const READERS = [readFence, readHeading, readRule, readQuote, readList, readIndented, readTable];

// The nodes of one paragraph.
export function inline(text, inLink = false) {
  const reader = new InlineReader(text, inLink);
  while (reader.at < text.length) reader.step();
  return reader.end();
}

const PLAIN = /[^\\`*_~[!<h]+/y;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const MARKED = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

class InlineReader {
  constructor(text, inLink) {
    this.text = text;
    this.inLink = inLink;
    this.at = 0;
    this.plain = "";
    // marks that are open, the innermost last, with what is inside of each
    this.frames = [{ mark: "", nodes: [] }];
    this.ticks = null;
    this.pairs = null;
  }

  step() {
    PLAIN.lastIndex = this.at;
    const run = PLAIN.exec(this.text);
    if (run !== null) {
      this.plain += run[0];
      this.at += run[0].length;
      return;
    }
    const char = this.text[this.at];
    const next = this.text[this.at + 1] ?? "";
    if (char === "\\" && MARKED.test(next)) this.take(next, 2);
    else if (char === "`") this.code();
    else if ("*_~".includes(char)) this.emphasis(char);
    else if (!this.inLink && (char === "[" || (char === "!" && next === "[")) && this.link()) return;
    else if (!this.inLink && "h<".includes(char) && this.bareAddress(char)) return;
    else this.take(char, 1);
  }

  take(text, size) {
    this.plain += text;
    this.at += size;
  }

  add(node, size) {
    this.flush();
    this.frames.at(-1).nodes.push(node);
    this.at += size;
  }

  flush() {
    if (this.plain) this.frames.at(-1).nodes.push(this.plain);
    this.plain = "";
  }

  end() {
    this.flush();
    this.flatten(0);
    return this.frames[0].nodes;
  }

  // Marks that nothing closed are text.
  flatten(index) {
    while (this.frames.length > index + 1) {
      const { mark, nodes } = this.frames.pop();
      const outer = this.frames.at(-1).nodes;
      outer.push(mark);
      for (const node of nodes) outer.push(node);
    }
  }

  code() {
    const size = runOf(this.text, this.at);
    this.ticks ??= tickRuns(this.text);
    const ends = this.ticks.get(size);
    while (ends.length && ends.at(-1) <= this.at) ends.pop();
    if (!ends.length) {
      this.take("`".repeat(size), size);
      return;
    }
    const end = ends.at(-1);
    const inner = this.text.slice(this.at + size, end).replaceAll("\n", " ");
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
    this.add(make("code", { text: padded ? inner.slice(1, -1) : inner }), end + size - this.at);
  }

  emphasis(char) {
    const size = runOf(this.text, this.at);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + size] ?? " ";
    this.at += size;
    const fits = char === "~" ? size === 2 : size < 4;
    // within a word only stars are marks
    const opens = fits && after.trim() && !(char === "_" && WORD.test(before));
    const closes = fits && before.trim() && !(char === "_" && WORD.test(after));
    let left = size;
    while (closes && left > 0) {
      const index = this.frames.findLastIndex(({ mark }) => mark[0] === char && mark.length <= left);
      if (index < 0) break;
      left -= this.frames[index].mark.length;
      this.close(index);
    }
    if (left === 0) return;
    if (!opens || this.frames.length > MAX_OPEN) {
      this.plain += char.repeat(left);
      return;
    }
    this.flush();
    for (const mark of left === 3 ? [char + char, char] : [char.repeat(left)]) this.frames.push({ mark, nodes: [] });
  }

  close(index) {
    this.flush();
    this.flatten(index);
    const { mark, nodes } = this.frames.pop();
    const node = make(TAGS[mark]);
    for (const child of nodes) node.append(child);
    this.frames.at(-1).nodes.push(node);
  }

  // [text](address "title"), and an image, of which only the address is shown
  link() {
    const begin = this.at + (this.text[this.at] === "!" ? 1 : 0);
    this.pairs ??= bracketPairs(this.text);
    const close = this.pairs.get(begin);
    if (close === undefined || this.text[close + 1] !== "(") return false;
    const found = destination(this.text, close + 2);
    if (found === null) return false;
    const size = found.end - this.at;
    const address = webAddress(found.address);
    if (address === null) this.take(this.text.slice(this.at, found.end), size);
    else {
      const label = this.text.slice(begin + 1, close);
      this.add(linkTo(address, label.trim() ? inline(label, true) : [address]), size);
    }
    return true;
  }

  bareAddress(char) {
    const begin = this.at + (char === "<" ? 1 : 0);
    if (char === "h" && WORD.test(this.text[this.at - 1] ?? " ")) return false;
    ADDRESS.lastIndex = begin;
    const match = ADDRESS.exec(this.text);
    if (match === null) return false;
    const enclosed = char === "<" && this.text[begin + match[0].length] === ">";
    if (char === "<" && !enclosed) return false;
    const shown = enclosed ? match[0] : withoutEnd(match[0]);
    const address = webAddress(shown);
    if (address === null) return false;
    this.add(linkTo(address, [shown]), shown.length + (enclosed ? 2 : 0));
    return true;
  }
}

function runOf(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// Where runs of backticks are, by their length, the last first.
function tickRuns(text) {
  const found = new Map();
  for (let at = text.indexOf("`"); at >= 0; at = text.indexOf("`", at)) {
    const size = runOf(text, at);
    if (!found.has(size)) found.set(size, []);
    found.get(size).push(at);
    at += size;
  }
  for (const places of found.values()) places.reverse();
  return found;
}

// The closing bracket of each opening one.
function bracketPairs(text) {
  const pairs = new Map();
  const open = [];
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) pairs.set(open.pop(), at);
  }
  return pairs;
}

// The address behind "(", and the place behind ")".
function destination(text, begin) {
  let at = begin;
  let depth = 0;
  const last = Math.min(text.length, begin + MAX_ADDRESS);
  while (at < last && text[at].trim() && (text[at] !== ")" || depth > 0)) {
    if (text[at] === "(") depth += 1;
    else if (text[at] === ")") depth -= 1;
    if (depth > 32) return null;
    at += 1;
  }
  const address = text.slice(begin, at).replace(/^<(.*)>$/, "$1");
  const title = /^\s+(?:"[^"]*"|'[^']*')\s*/.exec(text.slice(at, at + 300));
  if (title !== null) at += title[0].length;
  return text[at] === ")" && address ? { address, end: at + 1 } : null;
}

// The address in full if a browser would ask a web server for it, otherwise null.
export function webAddress(text) {
  try {
    const found = new URL(text);
    return found.protocol === "http:" || found.protocol === "https:" ? found.href : null;
  } catch {
    return null;
  }
}

// What ends a sentence belongs to the sentence.
function withoutEnd(address) {
  let end = address.length;
  const count = (char) => address.slice(0, end).split(char).length;
  let left = count("(") - count(")");
  while (end > 0) {
    const char = address[end - 1];
    if (char === ")" && left < 0) left += 1;
    else if (!".,;:!?*_~'".includes(char)) break;
    end -= 1;
  }
  return address.slice(0, end);
}

function linkTo(address, nodes) {
  // the title says where it leads, whatever its text says
  const node = make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address });
  for (const child of nodes) node.append(child);
  return node;
}
