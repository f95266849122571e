/** The client: what can be asked of a Coterie server. */

import {
  actOnExpert,
  cancel,
  changeExpert,
  expert,
  experts,
  feedback,
  infer,
  inferences,
  installExpert,
  job,
  jobEvents,
  jobs,
  removeExpert,
  submit,
  uploadExpert,
} from "./calls.js";
import type { InferRequest, JobFilter, LogFilter, Verdict } from "./calls.js";
import { settings, type ClientOptions } from "./environment.js";
import { ConnectionFailed, Timeout, Unavailable } from "./errors.js";
import { InferStream } from "./stream.js";
import { Transport, type CallOptions } from "./transport.js";
import type {
  ChangedExpert,
  DeletedExpert,
  DeletedJob,
  Expert,
  ExpertList,
  FeedbackAnswer,
  InferenceMetrics,
  InferenceResult,
  InstallBody,
  JobView,
  JobSubmission,
  ShownExpert,
} from "./types.js";

const FIRST_POLL_MS = 50;
const MAX_POLL_MS = 2_000;
/** A server that starts again is back within this. */
const MAX_AWAY_MS = 60_000;

/** Asks a Coterie server. */
export class ExpertClient {
  /** What is installed on the server. Needs an admin key. */
  readonly experts: Experts;
  private readonly transport: Transport;

  constructor(options: ClientOptions = {}) {
    this.transport = new Transport(settings(options));
    this.experts = new Experts(this.transport);
  }

  /** Answers a prompt. */
  infer(request: InferRequest, options: CallOptions = {}): Promise<InferenceResult> {
    return this.transport.send(infer(request, false), options);
  }

  /** The answer as it comes: chunks with `text`. Leaving the loop gives the request up. */
  inferStream(request: InferRequest, options: CallOptions = {}): InferStream {
    return new InferStream(this.transport, infer(request, true), options);
  }

  /** Has a prompt answered later; `wait` or `job` tell what came of it. */
  submit(request: InferRequest, options: CallOptions = {}): Promise<JobSubmission> {
    return this.transport.send(submit(request), options);
  }

  /** Where a job stands: its text so far, its result once it has ended. */
  job(jobId: string, options: CallOptions = {}): Promise<JobView> {
    return this.transport.send(job(jobId), options);
  }

  /** Every job, newest first; pages are fetched as they are needed. */
  async *jobs(filter: JobFilter = {}, options: CallOptions = {}): AsyncGenerator<JobView, void, void> {
    let after: string | null = null;
    do {
      const page: { data: JobView[]; next: string | null } = await this.transport.send(
        jobs(filter, after),
        options,
      );
      yield* page.data;
      after = page.next;
    } while (after !== null);
  }

  /** Cancels a job that has not ended; removes one that has. */
  cancel(jobId: string, options: CallOptions = {}): Promise<DeletedJob> {
    return this.transport.send(cancel(jobId), options);
  }

  /** The job once it has ended, well or not. Rejects with `Timeout` after `forMs`. */
  async wait(jobId: string, forMs = Infinity, options: CallOptions = {}): Promise<JobView> {
    const deadline = Date.now() + forMs;
    let heardAt = Date.now();
    for (let pauseMs = FIRST_POLL_MS; ; pauseMs = Math.min(MAX_POLL_MS, pauseMs * 1.5)) {
      try {
        const found = await this.job(jobId, options);
        if (found.status !== "queued" && found.status !== "processing") return found;
        heardAt = Date.now();
      } catch (error) {
        // a job outlives its server: one that is away for a while is waited for
        const away = error instanceof ConnectionFailed || error instanceof Unavailable;
        if (!away || Date.now() - heardAt > MAX_AWAY_MS) throw error;
      }
      const leftMs = deadline - Date.now();
      if (leftMs <= 0) throw new Timeout(`the job has not ended within ${forMs} ms`);
      await this.transport.pause(Math.min(pauseMs, leftMs), options);
    }
  }

  /** Follows a job: its text so far, then what comes. Leaving it leaves the job alone. */
  jobEvents(jobId: string, options: CallOptions = {}): InferStream {
    return new InferStream(this.transport, jobEvents(jobId), options);
  }

  /** Says whether an answer was any good: once per job. */
  feedback(
    jobId: string,
    verdict: Verdict,
    comment?: string,
    options: CallOptions = {},
  ): Promise<FeedbackAnswer> {
    return this.transport.send(feedback(jobId, verdict, comment), options);
  }

  /** The log of your requests, newest first. */
  async *inferences(
    filter: LogFilter = {},
    options: CallOptions = {},
  ): AsyncGenerator<InferenceMetrics, void, void> {
    let after: string | null = null;
    do {
      const page: { data: InferenceMetrics[]; next: string | null } = await this.transport.send(
        inferences(filter, after),
        options,
      );
      yield* page.data;
      after = page.next;
    } while (after !== null);
  }
}

/** What is installed on the server. */
export class Experts {
  constructor(private readonly transport: Transport) {}

  list(options: CallOptions = {}): Promise<ExpertList> {
    return this.transport.send(experts(), options);
  }

  /** `name` or `name@version`. */
  show(name: string, options: CallOptions = {}): Promise<ShownExpert> {
    return this.transport.send(expert(name), options);
  }

  /**
   * Uploads a `.expert` file's bytes. The first version of a name becomes current; a later one is
   * staged until it is promoted, or current at once with `now`.
   */
  install(
    file: Uint8Array | Blob,
    options: CallOptions & { now?: boolean } = {},
  ): Promise<Expert> {
    return this.transport.send(uploadExpert(file, options.now ?? false), options);
  }

  /** Installs a file or directory of the server's machine, by its absolute path. */
  installFrom(install: InstallBody, options: CallOptions = {}): Promise<Expert> {
    return this.transport.send(installExpert(install), options);
  }

  remove(name: string, options: CallOptions = {}): Promise<DeletedExpert> {
    return this.transport.send(removeExpert(name), options);
  }

  pin(name: string, options: CallOptions = {}): Promise<ChangedExpert> {
    return this.transport.send(actOnExpert(name, "pin"), options);
  }

  unpin(name: string, options: CallOptions = {}): Promise<ChangedExpert> {
    return this.transport.send(actOnExpert(name, "unpin"), options);
  }

  /**
   * Lets a staged version answer: as a canary where checks or a floor can judge it, else it becomes
   * current at once. `name` alone means the version that was installed last.
   */
  promote(name: string, options: CallOptions = {}): Promise<ChangedExpert> {
    return this.transport.send(actOnExpert(name, "promote"), options);
  }

  rollback(name: string, options: CallOptions = {}): Promise<ChangedExpert> {
    return this.transport.send(actOnExpert(name, "rollback"), options);
  }

  /** Makes an installed version the one that `name` stands for. */
  use(name: string, version: string, options: CallOptions = {}): Promise<Expert> {
    return this.transport.send(changeExpert(name, { version }), options);
  }

  /** Gives `name` or `name@version` another name. */
  alias(alias: string, name: string, options: CallOptions = {}): Promise<Expert> {
    return this.transport.send(changeExpert(name, { alias }), options);
  }
}
