/** Sends calls with fetch, again where that is safe. Knows no routes. */

import { Attempts, broken } from "./attempts.js";
import type { Call } from "./calls.js";
import { CoterieError, UnexpectedAnswer, ofAnswer } from "./errors.js";
import { fromWire } from "./names.js";
import { Patience } from "./patience.js";

export interface Settings {
  baseUrl: string;
  apiKey: string | undefined;
  adminKey: string | undefined;
  timeoutMs: number;
  maxRetries: number;
  fetch: typeof globalThis.fetch;
}

/** For one call. */
export interface CallOptions {
  /** Gives the call up; it then rejects with the signal's own reason. */
  signal?: AbortSignal;
  /** Longest silence of the server; 0 = no limit. */
  timeoutMs?: number;
  maxRetries?: number;
}

export class Transport {
  constructor(readonly settings: Settings) {}

  /** The whole answer. */
  async send<T>(call: Call<T>, options: CallOptions = {}): Promise<T> {
    const patience = this.patience(options);
    try {
      const response = await this.open(call, options, patience);
      const text = await this.reading(response.text(), patience);
      return fromWire<T>(call.answer, answer(text, response));
    } finally {
      patience.end();
    }
  }

  async pause(ms: number, options: CallOptions): Promise<void> {
    const patience = this.patience(options);
    try {
      await patience.pause(ms);
    } finally {
      patience.end();
    }
  }

  patience(options: CallOptions): Patience {
    return new Patience(options.timeoutMs ?? this.settings.timeoutMs, options.signal);
  }

  /** An answer that is a success; its body is still to be read. */
  async open(call: Call<unknown>, options: CallOptions, patience: Patience): Promise<Response> {
    const { baseUrl, fetch } = this.settings;
    const attempts = new Attempts(call, options.maxRetries ?? this.settings.maxRetries);
    for (;;) {
      let pauseMs: number;
      try {
        const response = await fetch(baseUrl + call.path, this.request(call, patience));
        if (response.ok) return response;
        const error = ofAnswer(response.status, response.headers, await response.text());
        pauseMs = attempts.refused(error, response.headers);
      } catch (error) {
        if (patience.signal.aborted) throw patience.signal.reason;
        if (error instanceof CoterieError) throw error;
        pauseMs = attempts.failed(error, baseUrl);
      }
      await patience.pause(pauseMs);
    }
  }

  /** What a read gives, or the reason why it was given up or broke. */
  async reading<T>(read: Promise<T>, patience: Patience): Promise<T> {
    try {
      const value = await read;
      patience.heard();
      return value;
    } catch (error) {
      if (patience.signal.aborted) throw patience.signal.reason;
      throw broken(error, this.settings.baseUrl);
    }
  }

  private request(call: Call<unknown>, patience: Patience): RequestInit {
    const { adminKey, apiKey } = this.settings;
    const key = call.admin ? (adminKey ?? apiKey) : apiKey;
    const headers: Record<string, string> = { ...call.headers };
    if (key) headers["authorization"] = `Bearer ${key}`;
    const { method, body } = call;
    const signal = patience.signal;
    return body === undefined
      ? { method, headers, signal }
      : { method, headers, signal, body: body as BodyInit };
  }
}

function answer(text: string, response: Response): object {
  try {
    const value: unknown = JSON.parse(text);
    if (typeof value === "object" && value !== null) return value;
  } catch {
    // told below, as one error for both
  }
  throw new UnexpectedAnswer("the answer is no JSON object: is a Coterie server there?", {
    status: response.status,
    requestId: response.headers.get("x-request-id"),
  });
}
