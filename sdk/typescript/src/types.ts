/** What is sent and what is answered. Written by scripts/generate_sdk.py from docs/api/openapi.json; do not edit. */

/** One adapter of a stack, identified by the digest of its bytes. */
export interface AdapterChoice {
  name: string;
  digest: string;
  weight: number;
}

/** One adapter that was considered, and the result. */
export interface Candidate {
  name: string;
  digest: string;
  similarity: number;
  success: number;
  memory: number;
  score: number;
  probability: number;
  chosen: boolean;
  why: string;
  part: number;
}

export interface ChangedExpert {
  id: string;
  object: "expert";
  name: string;
  version: string;
  digest: string;
  kind: string;
  bases: string[];
  numVirtualTokens: number;
  bytes: number;
  installedAt: number;
  signer: string | null;
  pinned: boolean;
  description: string;
  current: boolean;
  canary?: Record<string, unknown> | null;
}

export interface DeletedExpert {
  id: string;
  object: "expert";
  deleted: boolean;
}

/** `deleted` is false for a job that was cancelled: it can still be read. */
export interface DeletedJob {
  jobId: string;
  status: "queued" | "processing" | "succeeded" | "failed" | "cancelled";
  submittedAt: string;
  startedAt: string | null;
  finishedAt: string | null;
  userId: string | null;
  text: string;
  result: InferenceResult | null;
  error: JobFault | null;
  deleted: boolean;
}

/** One installed version of an expert. */
export interface Expert {
  id: string;
  object: "expert";
  name: string;
  version: string;
  digest: string;
  kind: string;
  bases: string[];
  numVirtualTokens: number;
  bytes: number;
  installedAt: number;
  signer: string | null;
  pinned: boolean;
  description: string;
  current: boolean;
}

export interface ExpertList {
  object: "list";
  data: Expert[];
  aliases: Record<string, string>;
}

/** `version` makes an installed version the current one; `alias` gives it another name too. */
export interface ExpertPatch {
  version?: string | null;
  alias?: string | null;
}

/** How a request was routed: the experts in order, the sampling values, and the reasons. */
export interface ExpertPlan {
  experts: AdapterChoice[];
  compositionOrder: string[];
  generationParams: GenerationParams;
  promptModified: string | null;
  confidence: number;
  reasons: string[];
  reasoningTrace: RouteTrace | null;
}

/** A verdict that was counted. */
export interface FeedbackAnswer {
  jobId: string;
  verdict: "good" | "bad";
}

/** Whether the answer of one of your jobs was good. One verdict per job. */
export interface FeedbackBody {
  jobId: string;
  verdict: "good" | "bad" | boolean;
  comment?: string | null;
}

/** The sampling values that the request ran with. */
export interface GenerationParams {
  temperature: number | null;
  topP: number | null;
  topK: number | null;
  minP: number | null;
  repetitionPenalty: number | null;
  maxTokens: number | null;
}

/** A grammar's text and the language it is written in. */
export interface GrammarItem {
  type: "lark" | "gbnf";
  text: string;
}

/** A prompt and optionally a document. The router chooses everything else that is left out. */
export interface InferBody {
  /** Unicode-normalised (NFC) and trimmed before it is counted. */
  prompt: string;
  /** Text with `{prompt}`, and with `{body}` where the body belongs. */
  template?: string | null;
  /** The document or data that the prompt is about. */
  body?: string | null;
  temperature?: number | null;
  maxTokens?: number | null;
  topP?: number | null;
  /** 0 = off. */
  topK?: number | null;
  minP?: number | null;
  typicalP?: number | null;
  repetitionPenalty?: number | null;
  /** Exactly these, in this order: `name` or `name@version`. */
  forceExperts?: string[] | null;
  /** Never chosen by the router. */
  excludeExperts?: string[] | null;
  maxExperts?: number | null;
  /** With model "auto", a specialist that serves this intent answers. */
  intent?: string | null;
  /** Most tokens of prompt plus output. */
  contextSize?: number | null;
  /** Whose rate limit this counts against. */
  userId?: string | null;
  /** Higher is sooner. */
  priority?: number;
  /** The answer is cut there and says so. */
  timeoutMs?: number | null;
  model?: string;
  stream?: boolean;
  seed?: number | null;
  /** More than 1 searches instead of drawing. */
  numBeams?: number | null;
  /** Of a beam search: above 0 favours long answers. */
  lengthPenalty?: number | null;
  stop?: string | string[] | null;
  /** OpenAI's: `json_object`, or `json_schema` with a schema. */
  responseFormat?: Record<string, unknown> | null;
  /** Lark or GBNF; told apart by their first rules where only a text is sent. */
  grammar?: string | GrammarItem | null;
  regex?: string | null;
  /** The conversation this belongs to. */
  sessionId?: string | null;
  /** Answer with the router's plan too. */
  explain?: boolean;
}

/** Data of a stream's `delta` event: the next piece of the text. */
export interface InferDelta {
  text: string;
}

/** Data of a stream's `started` event. */
export interface InferStarted {
  jobId: string;
  model: string;
  expertsUsed: string[];
  confidence: number;
  taskType: string;
  degraded: string[];
  plan?: ExpertPlan | null;
}

/** One page of the log, newest first. */
export interface InferenceLog {
  object: "list";
  data: InferenceMetrics[];
  hasMore: boolean;
  next: string | null;
}

/**
 * All measurements of one request. Times are in milliseconds; `submitted_at` and other times
 * of day are seconds since 1970, so that the stages of several requests can be compared.
 */
export interface InferenceMetrics {
  jobId: string;
  submittedAt: number;
  routerLatencyMs: number;
  expertLoadLatencyMs: number;
  inferenceLatencyMs: number;
  totalLatencyMs: number;
  expertsUsed: string[];
  numExperts: number;
  vramPeakMb: number;
  inputTokens: number;
  outputTokens: number;
  tokensPerSecond: number;
  success: boolean;
  error: string | null;
  validationPassed: boolean | null;
  finishReason: string;
  taskType: string;
  specialist: string;
  cachedTokens: number;
  queueMs: number;
  firstTokenMs: number;
  routedAt: number;
  firstTokenAt: number;
  finishedAt: number;
  userId: string;
  seed: number;
}

/** The answer of /v1/infer: as one body, at the end of a stream, or as the result of a job. */
export interface InferenceResult {
  jobId: string;
  text: string;
  tokensGenerated: number;
  expertsUsed: string[];
  latencyMs: number;
  finishReason: string;
  model: string;
  taskType: string;
  confidence: number;
  degraded: string[];
  seed: number;
  validation: ValidationResult | null;
  metrics: InferenceMetrics | null;
  telemetry: Record<string, unknown> | null;
  plan?: ExpertPlan;
}

/** A `.expert` file or a PEFT directory on the server's machine. */
export interface InstallBody {
  path: string;
  name?: string | null;
  version?: string | null;
  base?: string | null;
  now?: boolean;
}

/** Why a job failed, as a direct request would have received it. */
export interface JobFault {
  message: string;
  type: string;
  param: string | null;
  code: string | null;
}

/** One page, newest first. Send `next` as `after` to get the following page. */
export interface JobList {
  object: "list";
  data: JobView[];
  hasMore: boolean;
  next: string | null;
}

/** A request that is answered later. */
export interface JobSubmission {
  jobId: string;
  status: "queued" | "processing";
  submittedAt: string;
  estimatedWaitMs: number | null;
}

/** The status of a job. `text` is the text so far; times are ISO 8601. */
export interface JobView {
  jobId: string;
  status: "queued" | "processing" | "succeeded" | "failed" | "cancelled";
  submittedAt: string;
  startedAt: string | null;
  finishedAt: string | null;
  userId: string | null;
  text: string;
  result: InferenceResult | null;
  error: JobFault | null;
}

export interface OpenAIError {
  error: Record<string, unknown>;
}

/** How many of the requests a canary gets. */
export interface PromoteBody {
  /** Of the traffic. */
  share?: number;
}

/** How one decision was made. Times are milliseconds, by stage. */
export interface RouteTrace {
  taskType: string;
  language: string;
  features: Record<string, string | number | boolean>;
  candidates: Candidate[];
  threshold: number;
  degraded: string[];
  timingsMs: Record<string, number>;
  routerVersion: string;
}

export interface ShownExpert {
  id: string;
  object: "expert";
  name: string;
  version: string;
  digest: string;
  kind: string;
  bases: string[];
  numVirtualTokens: number;
  bytes: number;
  installedAt: number;
  signer: string | null;
  pinned: boolean;
  description: string;
  current: boolean;
  versions: Expert[];
  manifest: Record<string, unknown> | null;
}

/**
 * The result for one answer. `validator` is its name: json, json_schema, python, a command
 * ... An answer that no validator can check has no result. That does not mean that it is
 * valid.
 */
export interface ValidationResult {
  valid: boolean;
  validator: string;
  error: string | null;
  durationMs: number;
}

/** Fields that hold named objects. Whatever is in other fields is the caller's own. */
export const SHAPES: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  AdapterChoice: {},
  Candidate: {},
  ChangedExpert: {},
  DeletedExpert: {},
  DeletedJob: { result: "InferenceResult", error: "JobFault" },
  Expert: {},
  ExpertList: { data: "Expert" },
  ExpertPatch: {},
  ExpertPlan: { experts: "AdapterChoice", generation_params: "GenerationParams", reasoning_trace: "RouteTrace" },
  FeedbackAnswer: {},
  FeedbackBody: {},
  GenerationParams: {},
  GrammarItem: {},
  InferBody: { grammar: "GrammarItem" },
  InferDelta: {},
  InferStarted: { plan: "ExpertPlan" },
  InferenceLog: { data: "InferenceMetrics" },
  InferenceMetrics: {},
  InferenceResult: { validation: "ValidationResult", metrics: "InferenceMetrics", plan: "ExpertPlan" },
  InstallBody: {},
  JobFault: {},
  JobList: { data: "JobView" },
  JobSubmission: {},
  JobView: { result: "InferenceResult", error: "JobFault" },
  OpenAIError: {},
  PromoteBody: {},
  RouteTrace: { candidates: "Candidate" },
  ShownExpert: { versions: "Expert" },
  ValidationResult: {},
};
