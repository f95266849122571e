// ollama for JavaScript, with its constructor's `host`.
import { Ollama } from "ollama";
import { model, question, spoken, tooLong, tried, url } from "./tried.mjs";

const client = new Ollama({ host: url });
const messages = [{ role: "user", content: question }];
const asked = { model, options: { num_predict: 12, temperature: 0 } };
const city = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};

async function refused(status, run) {
  try {
    await run();
  } catch (error) {
    if (error.status_code === status) return error.message;
    throw error;
  }
  throw new Error(`nothing with status ${status} was raised`);
}

await tried("models", async () => {
  const { models } = await client.list();
  if (!(await client.ps()).models.length) throw new Error("nothing is loaded");
  const shown = await client.show({ model });
  if (!shown.capabilities.includes("completion")) throw new Error("no capability");
  return models.map((one) => one.name).join(", ");
});
await tried("plain", async () => {
  const answer = await client.chat({ ...asked, messages });
  if (!(answer.eval_count > 0 && answer.done)) throw new Error("no count");
  return spoken(answer.message.content);
});
await tried("stream", async () => {
  let text = "", last;
  for await (last of await client.chat({ ...asked, messages, stream: true })) {
    text += last.message.content;
  }
  if (!(last.done && last.total_duration > 0)) throw new Error("no end");
  return spoken(text);
});
await tried("generate", async () => {
  const answer = await client.generate({ ...asked, prompt: question, stream: false });
  return spoken(answer.response);
});
await tried("abort in a stream", async () => {
  const long = { ...asked, options: { num_predict: 2000 } };
  let parts = 0;
  try {
    for await (const _ of await client.chat({ ...long, messages, stream: true })) {
      if (++parts === 3) client.abort();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    return `${parts} parts, ${error.name}`;
  }
  throw new Error("it was not aborted");
});
await tried("schema", async () => {
  const wanted = { ...asked, options: { num_predict: 60, temperature: 0 } };
  const answer = await client.chat({ ...wanted, messages, format: city });
  return JSON.parse(answer.message.content).city;
});
await tried("unknown model", async () =>
  refused(404, () => client.chat({ ...asked, model: "nobody", messages })),
);
await tried("too long", async () =>
  refused(400, () => client.chat({ ...asked, messages: [{ role: "user", content: tooLong }] })),
);
