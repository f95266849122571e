/**
 * Whether to ask again, and when. Told what happened, answers with a pause or throws.
 *
 * A request that may have run is never sent twice unless that is harmless: everything but a GET is
 * repeated only where no connection came about, or where the server said that it did not take it.
 */

import type { Call } from "./calls.js";
import { ConnectionFailed, type CoterieError } from "./errors.js";

const FIRST_PAUSE_MS = 250;
const MAX_PAUSE_MS = 8_000;
/** A server that asks for more patience than this is not waited for. */
const MAX_RETRY_AFTER_MS = 120_000;
const REFUSALS: ReadonlySet<number> = new Set([429, 503]);
const PASSING: ReadonlySet<number> = new Set([429, 502, 503, 504]);
const UNSENT =
  /ECONNREFUSED|ENOTFOUND|EAI_AGAIN|EHOSTUNREACH|ENETUNREACH|CONNECT_TIMEOUT|connection refused|dns error/i;

/** All attempts at one call. */
export class Attempts {
  private retries = 0;

  constructor(
    private readonly call: Call<unknown>,
    private readonly maxRetries: number,
  ) {}

  /** Milliseconds to wait after no answer came. */
  failed(error: unknown, baseUrl: string): number {
    const passing = this.call.method === "GET" || isUnsent(error);
    if (passing && this.retries < this.maxRetries) return this.pause(null);
    throw broken(error, baseUrl);
  }

  /** Milliseconds to wait after an answer that is no success. */
  refused(error: CoterieError, headers: Headers): number {
    const asked = error.retryAfterMs;
    const passing = this.isPassing(error.status ?? 0, headers.get("x-should-retry"));
    if (passing && this.retries < this.maxRetries && (asked ?? 0) <= MAX_RETRY_AFTER_MS) {
      return this.pause(asked);
    }
    throw error;
  }

  private isPassing(status: number, advice: string | null): boolean {
    if (advice === "false") return false;
    if (this.call.method !== "GET") return REFUSALS.has(status);
    return PASSING.has(status) || advice === "true";
  }

  private pause(asked: number | null): number {
    const backoff = Math.min(MAX_PAUSE_MS, FIRST_PAUSE_MS * 2 ** this.retries);
    this.retries += 1;
    // spread, so that those who were refused together do not come back together
    const spread = Math.random();
    return asked === null ? backoff * (0.5 + spread / 2) : asked * (1 + spread / 4);
  }
}

export function broken(cause: unknown, baseUrl: string): ConnectionFailed {
  return new ConnectionFailed(`cannot talk to ${baseUrl}: ${reasons(cause).at(-1)}`, { cause });
}

/** Whether it is certain that nothing was sent; where nobody can tell, it is not. */
function isUnsent(error: unknown): boolean {
  return reasons(error).some((reason) => UNSENT.test(reason));
}

function reasons(error: unknown): string[] {
  const found: string[] = [];
  for (let next = error; next instanceof Error && found.length < 8; next = next.cause) {
    const code = (next as { code?: unknown }).code;
    found.push(typeof code === "string" ? `${next.message || next.name} (${code})` : next.message);
  }
  return found.length > 0 ? found : [String(error)];
}
