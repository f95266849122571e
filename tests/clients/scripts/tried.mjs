// tried.py for Node: one line of JSON for each thing that was tried.
export const url = process.env.COTERIE_URL;
export const model = process.env.COTERIE_MODEL;
export const tooLong = "word ".repeat(9000);
export const question = "What is the capital of France? Answer in one word.";

export async function tried(name, run) {
  let said, passed;
  try {
    [said, passed] = [await run(), true];
  } catch (error) {
    [said, passed] = [`${error.name}: ${error.message}`, false];
  }
  console.log(JSON.stringify({ tried: name, passed, said: String(said) }));
}

export function spoken(text) {
  if (typeof text !== "string" || !text.trim()) throw new Error(`no text: ${JSON.stringify(text)}`);
  return text.trim();
}

export async function raised(status, run) {
  try {
    await run();
  } catch (error) {
    if (error.statusCode === status) return error;
    throw error;
  }
  throw new Error(`nothing with status ${status} was raised`);
}
