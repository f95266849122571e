// The AI SDK through its three providers. `openai(...)` asks for /v1/responses, `openai.chat(...)`
// for /v1/chat/completions.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { model, question, raised, spoken, tooLong, tried, url } from "./tried.mjs";

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "coterie", baseURL: `${url}/v1` });
const sides = {
  "openai, responses": (name) => openai(name),
  "openai, chat": (name) => openai.chat(name),
  anthropic: (name) => anthropic(name),
  "openai-compatible": (name) => compatible(name),
};
const asked = { prompt: question, maxOutputTokens: 12, temperature: 0, maxRetries: 0 };

for (const [side, named] of Object.entries(sides)) {
  const chat = named(model);
  await tried(`plain (${side})`, async () => {
    const { text, usage } = await generateText({ model: chat, ...asked });
    if (!(usage.outputTokens > 0)) throw new Error("no usage");
    return spoken(text);
  });
  await tried(`stream (${side})`, async () => {
    const faults = [];
    const answer = streamText({ model: chat, ...asked, onError: ({ error }) => faults.push(error) });
    let text = "";
    for await (const part of answer.textStream) text += part;
    if (faults.length) throw faults[0];
    return spoken(text);
  });
  await tried(`tool round trip (${side})`, async () => {
    const called = [];
    const weather = tool({
      description: "The weather in a city",
      inputSchema: z.object({ city: z.string().max(12) }).strict(),
      execute: async ({ city }) => (called.push(city), "sunny"),
    });
    const answer = await generateText({
      model: chat,
      ...asked,
      maxOutputTokens: 60,
      tools: { weather },
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    if (called.length !== 1) throw new Error(`${called.length} calls`);
    return `weather(${called[0]}), ${spoken(answer.text).slice(0, 40)}`;
  });
  await tried(`unknown model (${side})`, async () => {
    const error = await raised(404, () => generateText({ model: named("nobody"), ...asked }));
    return error.message;
  });
  await tried(`too long (${side})`, async () => {
    const error = await raised(400, () => generateText({ model: chat, ...asked, prompt: tooLong }));
    return error.message;
  });
}
