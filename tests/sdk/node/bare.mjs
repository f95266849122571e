// The browser's file in a realm that has nothing but the web's own names, as in a browser or in
// Deno; run with node --experimental-vm-modules.
import { readFileSync } from "node:fs";
import { SourceTextModule, createContext } from "node:vm";

const WEB = { AbortController, TextDecoder, URLSearchParams, clearTimeout, fetch, setTimeout };
const file = new URL("./node_modules/@coterie/client/dist/browser.js", import.meta.url);
const module = new SourceTextModule(readFileSync(file, "utf8"), { context: createContext(WEB) });
await module.link(() => {
  throw new Error("the file imports something");
});
await module.evaluate();
const { COTERIE_BASE_URL: baseUrl, COTERIE_API_KEY: apiKey } = process.env;
const client = new module.namespace.ExpertClient({ baseUrl, apiKey });
let text = "";
for await (const chunk of client.inferStream({ prompt: "x", regex: "q{7}" })) text += chunk.text;
const { name } = await client.infer({ prompt: "" }).catch((error) => error);
console.log(text, name);
