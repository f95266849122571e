// The browser's file where Node's own globals are gone, as in a browser or in Deno.
const { COTERIE_BASE_URL: baseUrl, COTERIE_API_KEY: apiKey } = process.env;
// Node's own fetch needs them once, when it is loaded
await fetch(`${baseUrl}/health/live`);
for (const name of ["process", "Buffer", "global", "setImmediate", "clearImmediate"]) {
  delete globalThis[name];
}
const { ExpertClient } = await import("@coterie/client/browser");
const client = new ExpertClient({ baseUrl, apiKey });
let text = "";
for await (const chunk of client.inferStream({ prompt: "x", regex: "q{7}" })) text += chunk.text;
const { name } = await client.infer({ prompt: "" }).catch((error) => error);
console.log(text, name);
