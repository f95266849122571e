/** Every call of the API as a value: what is sent, and what its answer becomes. Pure. */

import { toWire } from "./names.js";
import type {
  ChangedExpert,
  DeletedExpert,
  DeletedJob,
  Expert,
  ExpertList,
  ExpertPatch,
  FeedbackAnswer,
  InferBody,
  InferenceLog,
  InferenceResult,
  InstallBody,
  JobView,
  JobList,
  JobSubmission,
  ShownExpert,
} from "./types.js";

/** A prompt, and whatever else is to be said. */
export type InferRequest = Omit<InferBody, "stream">;
export type Verdict = "good" | "bad";
export type JobFilter = { status?: string; userId?: string; pageSize?: number };
export type LogFilter = { expert?: string; since?: number; pageSize?: number };
type Query = Record<string, string | number | null | undefined>;

/** `T` is what the answer becomes; `answer` names its shape. */
export interface Call<T> {
  method: "GET" | "POST" | "PATCH" | "DELETE";
  path: string;
  answer: string;
  body?: string | Uint8Array | Blob;
  headers?: Record<string, string>;
  /** Needs a key of the server's admins. */
  admin?: boolean;
  /** Never there; carries `T`. */
  result?: T;
}

const JSON_TYPE = { "content-type": "application/json" };
const PAGE_SIZE = 50;

export function infer(request: InferRequest, stream: boolean): Call<InferenceResult> {
  return json("POST", "/v1/infer", "InferenceResult", wire("InferBody", request, { stream }));
}

export function submit(request: InferRequest): Call<JobSubmission> {
  const call = json<JobSubmission>("POST", "/v1/infer", "JobSubmission", wire("InferBody", request));
  return { ...call, headers: { ...call.headers, prefer: "respond-async" } };
}

export function job(id: string): Call<JobView> {
  return { method: "GET", path: named("/v1/jobs", id), answer: "JobView" };
}

export function jobs(filter: JobFilter, after: string | null): Call<JobList> {
  const { status, userId, pageSize } = filter;
  const path = `/v1/jobs${query({ status, user_id: userId, limit: pageSize ?? PAGE_SIZE, after })}`;
  return { method: "GET", path, answer: "JobList" };
}

export function cancel(id: string): Call<DeletedJob> {
  return { method: "DELETE", path: named("/v1/jobs", id), answer: "DeletedJob" };
}

export function jobEvents(id: string): Call<InferenceResult> {
  return { method: "GET", path: `${named("/v1/jobs", id)}/events`, answer: "InferenceResult" };
}

export function feedback(jobId: string, verdict: Verdict, comment?: string): Call<FeedbackAnswer> {
  return json("POST", "/v1/feedback", "FeedbackAnswer", { job_id: jobId, verdict, comment });
}

export function inferences(filter: LogFilter, after: string | null): Call<InferenceLog> {
  const { expert, since, pageSize } = filter;
  const path = `/v1/inferences${query({ expert, since, limit: pageSize ?? PAGE_SIZE, after })}`;
  return { method: "GET", path, answer: "InferenceLog" };
}

export function experts(): Call<ExpertList> {
  return { method: "GET", path: "/v1/experts", answer: "ExpertList", admin: true };
}

export function expert(name: string): Call<ShownExpert> {
  return { method: "GET", path: named("/v1/experts", name), answer: "ShownExpert", admin: true };
}

export function uploadExpert(file: Uint8Array | Blob, now: boolean): Call<Expert> {
  const headers = { "content-type": "application/octet-stream" };
  const path = now ? "/v1/experts?now=true" : "/v1/experts";
  return { method: "POST", path, answer: "Expert", body: file, headers, admin: true };
}

export function installExpert(install: InstallBody): Call<Expert> {
  return admin(json("POST", "/v1/experts", "Expert", wire("InstallBody", install)));
}

export function actOnExpert(name: string, action: string): Call<ChangedExpert> {
  const path = `${named("/v1/experts", name)}/${action}`;
  return { method: "POST", path, answer: "ChangedExpert", admin: true };
}

export function changeExpert(name: string, patch: ExpertPatch): Call<Expert> {
  const body = wire("ExpertPatch", patch);
  return admin(json("PATCH", named("/v1/experts", name), "Expert", body));
}

export function removeExpert(name: string): Call<DeletedExpert> {
  return { method: "DELETE", path: named("/v1/experts", name), answer: "DeletedExpert", admin: true };
}

function json<T>(method: "POST" | "PATCH", path: string, answer: string, body: object): Call<T> {
  return { method, path, answer, body: JSON.stringify(body), headers: { ...JSON_TYPE } };
}

function admin<T>(call: Call<T>): Call<T> {
  return { ...call, admin: true };
}

function wire(shape: string, value: object, more: object = {}): object {
  return { ...(toWire(shape, value) as object), ...more };
}

function named(folder: string, name: string): string {
  if (name === "") throw new TypeError("a name or id must not be empty");
  return `${folder}/${encodeURIComponent(name)}`;
}

function query(values: Query): string {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== null);
  return `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}`;
}
