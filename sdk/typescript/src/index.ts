export { ExpertClient, Experts } from "./client.js";
export type { InferRequest, JobFilter, LogFilter, Verdict } from "./calls.js";
export type { ClientOptions } from "./environment.js";
export {
  BadRequest,
  Conflict,
  ConnectionFailed,
  CoterieError,
  Forbidden,
  NotFound,
  RateLimited,
  ServerError,
  Timeout,
  Unauthorized,
  Unavailable,
  UnexpectedAnswer,
} from "./errors.js";
export type { Chunk } from "./frames.js";
export { InferStream } from "./stream.js";
export type { CallOptions } from "./transport.js";
export type * from "./types.js";
