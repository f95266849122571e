/** Where the server is and whose keys are sent: arguments first, then the environment, if any. */

import type { Settings } from "./transport.js";

const DEFAULT_URL = "http://127.0.0.1:8000";
const TIMEOUT_MS = 600_000;
const MAX_RETRIES = 2;

export interface ClientOptions {
  /** Default: COTERIE_API_KEY. */
  apiKey?: string;
  /** For what is installed on the server. Default: COTERIE_ADMIN_KEY, then `apiKey`. */
  adminKey?: string;
  /** Default: COTERIE_BASE_URL, then http://127.0.0.1:8000. */
  baseUrl?: string;
  /** Longest silence of the server; a request's own `timeoutMs` bounds its answer. 0 = no limit. */
  timeoutMs?: number;
  maxRetries?: number;
  fetch?: typeof globalThis.fetch;
}

export function settings(options: ClientOptions): Settings {
  const url = options.baseUrl ?? variable("COTERIE_BASE_URL") ?? DEFAULT_URL;
  if (!/^https?:\/\//.test(url)) {
    throw new TypeError(`baseUrl must begin with http:// or https://, not ${url}`);
  }
  return {
    baseUrl: url.replace(/\/+$/, "").replace(/\/v1$/, ""),
    apiKey: options.apiKey ?? variable("COTERIE_API_KEY"),
    adminKey: options.adminKey ?? variable("COTERIE_ADMIN_KEY"),
    timeoutMs: options.timeoutMs ?? TIMEOUT_MS,
    maxRetries: options.maxRetries ?? MAX_RETRIES,
    // browsers refuse to run fetch as a method of something else
    fetch: options.fetch ?? ((input, init) => globalThis.fetch(input, init)),
  };
}

/** Browsers have no environment, and Deno may refuse to show it. */
function variable(name: string): string | undefined {
  const host = globalThis as { process?: { env?: Record<string, string | undefined> } };
  try {
    return host.process?.env?.[name] || undefined;
  } catch {
    return undefined;
  }
}
