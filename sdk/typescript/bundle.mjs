// Joins the compiled modules of dist, or of another folder, into its browser.js: one file, no imports. Each module's top-level
// names must differ from all others'; the file does not parse otherwise.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const DIST = process.argv[2] ? pathToFileURL(`${process.argv[2]}/`) : new URL("./dist/", import.meta.url);
const IMPORT = /^import (?:type )?\{[^}]*\} from "\.\/([\w-]+)\.js";\n/gm;
const EXPORTS = /^export \{([^}]*)\} from "\.\/([\w-]+)\.js";\n/gm;
const done = new Set();
const parts = [];

function add(name) {
  if (done.has(name)) return;
  done.add(name);
  const text = readFileSync(new URL(`${name}.js`, DIST), "utf8");
  for (const [, other] of text.matchAll(IMPORT)) add(other);
  const body = text.replace(IMPORT, "").replace(/^export (?!\{)/gm, "");
  if (/^(import|export) /m.test(body)) throw new Error(`${name}.js: an import that cannot be joined`);
  parts.push(body);
}

const index = readFileSync(new URL("index.js", DIST), "utf8");
const names = [];
for (const [, listed, module] of index.matchAll(EXPORTS)) {
  add(module);
  names.push(...listed.split(",").map((name) => name.trim()).filter(Boolean));
}
if (names.length === 0) throw new Error("index.js exports nothing");
writeFileSync(new URL("browser.js", DIST), `${parts.join("")}export { ${names.join(", ")} };\n`);
