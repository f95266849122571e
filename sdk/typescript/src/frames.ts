/** A stream's bytes as chunks: server-sent events, cut anywhere, and what each one says. */

import { ConnectionFailed, UnexpectedAnswer, ofFrame } from "./errors.js";
import { fromWire } from "./names.js";
import type { InferStarted, InferenceResult } from "./types.js";

const MAX_EVENT_CHARACTERS = 64 * 2 ** 20;

/** One event of an answer: `started`, then a `delta` per piece of text, then `finished`. */
export interface Chunk {
  event: "started" | "delta" | "finished";
  /** The next piece of the answer; empty at its start and at its end. */
  text: string;
  /** Of `started`: who answers, and why. */
  started?: InferStarted;
  /** Of `finished`: the whole answer. */
  result?: InferenceResult;
}

/** Reads one stream. `result` is there once it has ended well. */
export class Frames {
  result: InferenceResult | null = null;
  private readonly decoder = new TextDecoder();
  private tail = "";
  private event = "";
  private data: string[] = [];

  constructor(private readonly requestId: string | null) {}

  /** The chunks that `bytes` complete; throws the error that they tell. */
  *feed(bytes: Uint8Array): Generator<Chunk> {
    const text = this.tail + this.decoder.decode(bytes, { stream: true });
    // a \r at the end may be the first half of \r\n
    const held = text.endsWith("\r") ? 1 : 0;
    const lines = text.slice(0, text.length - held).split(/\r\n|\n|\r/);
    this.tail = (lines.pop() ?? "") + text.slice(text.length - held);
    if (this.tail.length > MAX_EVENT_CHARACTERS) {
      throw new UnexpectedAnswer(`an event is longer than ${MAX_EVENT_CHARACTERS} characters`);
    }
    for (const line of lines) {
      const chunk = line === "" ? this.dispatch() : this.take(line);
      if (chunk !== null) yield chunk;
    }
  }

  /** The connection is over; an answer without an end is not an answer. */
  end(): void {
    if (this.result === null) {
      const message = "the stream broke off before its end";
      throw new ConnectionFailed(message, { requestId: this.requestId });
    }
  }

  private take(line: string): null {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.event = value;
    else if (name === "data") this.data.push(value);
    return null;
  }

  private dispatch(): Chunk | null {
    const event = this.event;
    const data = this.data.join("\n");
    this.event = "";
    this.data = [];
    return data === "" ? null : this.chunk(event, fields(data));
  }

  private chunk(event: string, data: Record<string, unknown>): Chunk | null {
    switch (event) {
      case "delta":
        return { event, text: String(data["text"] ?? "") };
      case "started":
        return { event, text: "", started: fromWire<InferStarted>("InferStarted", data) };
      case "finished":
        this.result = fromWire<InferenceResult>("InferenceResult", data);
        return { event, text: "", result: this.result };
      case "error":
        throw ofFrame(data, this.requestId);
      default:
        return null;
    }
  }
}

function fields(data: string): Record<string, unknown> {
  let value: unknown;
  try {
    value = JSON.parse(data);
  } catch (cause) {
    throw new UnexpectedAnswer("an event is not JSON", { cause });
  }
  if (typeof value !== "object" || value === null) {
    throw new UnexpectedAnswer("an event is not a JSON object");
  }
  return value as Record<string, unknown>;
}
