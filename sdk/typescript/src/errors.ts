/** What can go wrong, as one tree, and which answer stands for which error. */

export interface Told {
  code?: string | null;
  param?: string | null;
  status?: number;
  requestId?: string | null;
  retryAfterMs?: number | null;
  cause?: unknown;
}

/** Base. `code` is the server's stable word; `status` is null where no answer came. */
export class CoterieError extends Error {
  readonly code: string | null;
  readonly param: string | null;
  readonly status: number | null;
  readonly requestId: string | null;
  readonly retryAfterMs: number | null;

  constructor(message: string, told: Told = {}) {
    super(message, told.cause === undefined ? undefined : { cause: told.cause });
    this.name = new.target.name;
    this.code = told.code ?? null;
    this.param = told.param ?? null;
    this.status = told.status ?? null;
    this.requestId = told.requestId ?? null;
    this.retryAfterMs = told.retryAfterMs ?? null;
  }
}

/** A field is wrong; `param` names it. */
export class BadRequest extends CoterieError {}
/** No key, or a wrong one. */
export class Unauthorized extends CoterieError {}
/** Not with this key. */
export class Forbidden extends CoterieError {}
/** No such model, expert or job. */
export class NotFound extends CoterieError {}
/** Done already. */
export class Conflict extends CoterieError {}
/** Come again after `retryAfterMs`. */
export class RateLimited extends CoterieError {}
/** Models still load, or no worker is healthy. */
export class Unavailable extends CoterieError {}
/** The server failed. */
export class ServerError extends CoterieError {}
/** No answer in time. */
export class Timeout extends CoterieError {}
/** No server there, or the connection broke. */
export class ConnectionFailed extends CoterieError {}
/** An answer that no Coterie server gives. */
export class UnexpectedAnswer extends CoterieError {}

type Kind = new (message: string, told?: Told) => CoterieError;

const BY_STATUS: Readonly<Record<number, Kind>> = {
  401: Unauthorized,
  403: Forbidden,
  404: NotFound,
  409: Conflict,
  429: RateLimited,
  503: Unavailable,
  504: Timeout,
};

/** An error inside a stream has no status of its own. */
const BY_CODE: Readonly<Record<string, Kind>> = {
  invalid_api_key: Unauthorized,
  permission_denied: Forbidden,
  model_not_found: NotFound,
  not_found: NotFound,
  conflict: Conflict,
  rate_limit_exceeded: RateLimited,
  specialist_unavailable: Unavailable,
  deadline_exceeded: Timeout,
};

interface WireError {
  message?: string;
  type?: string;
  param?: string | null;
  code?: string | null;
}

/** The error that a refusing answer stands for. */
export function ofAnswer(status: number, headers: Headers, body: string): CoterieError {
  const told = wireError(parsed(body));
  const kind = BY_STATUS[status] ?? (status >= 500 ? ServerError : BadRequest);
  return new kind(told.message ?? `the server answered ${status}`, {
    code: told.code ?? null,
    param: told.param ?? null,
    status,
    requestId: headers.get("x-request-id"),
    retryAfterMs: retryAfterMs(headers),
  });
}

/** The error that ended a stream. */
export function ofFrame(data: unknown, requestId: string | null): CoterieError {
  const told = wireError(data);
  const wrong = told.type === "invalid_request_error";
  const kind = BY_CODE[told.code ?? ""] ?? (wrong ? BadRequest : ServerError);
  const message = told.message ?? "the server ended the stream with an error";
  return new kind(message, { code: told.code ?? null, param: told.param ?? null, requestId });
}

/** What a body says, if it is one of ours: a proxy may have answered instead. */
function wireError(data: unknown): WireError {
  const error = (data as { error?: unknown } | null)?.error;
  return typeof error === "object" && error !== null ? error : {};
}

function parsed(body: string): unknown {
  try {
    return JSON.parse(body);
  } catch {
    return null;
  }
}

/** `retry-after-ms` is the exact one; `retry-after` has seconds or a date. */
function retryAfterMs(headers: Headers): number | null {
  const number = /^\d{1,9}(\.\d+)?$/;
  const exact = headers.get("retry-after-ms");
  if (exact !== null && number.test(exact)) return Number(exact);
  const rough = headers.get("retry-after");
  if (rough === null) return null;
  if (number.test(rough)) return Number(rough) * 1000;
  const at = Date.parse(rough);
  return Number.isNaN(at) ? null : Math.max(0, at - Date.now());
}
