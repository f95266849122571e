/** How long one request is waited for: a limit on silence, and the caller's own signal. */

import { Timeout } from "./errors.js";

export class Patience {
  private readonly controller = new AbortController();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly follow: () => void;

  constructor(
    private readonly timeoutMs: number,
    private readonly given?: AbortSignal,
  ) {
    this.follow = () => this.controller.abort(given?.reason);
    if (given?.aborted) this.follow();
    else given?.addEventListener("abort", this.follow, { once: true });
    this.heard();
  }

  get signal(): AbortSignal {
    return this.controller.signal;
  }

  /** Something came; the silence begins anew. */
  heard(): void {
    clearTimeout(this.timer);
    if (this.timeoutMs <= 0 || this.signal.aborted) return;
    const error = new Timeout(`no answer within ${this.timeoutMs} ms`);
    this.timer = setTimeout(() => this.controller.abort(error), this.timeoutMs);
  }

  /** Gives the request up, if it still runs. */
  end(): void {
    clearTimeout(this.timer);
    this.given?.removeEventListener("abort", this.follow);
    this.controller.abort();
  }

  /** Resolves after `ms`; rejects when the caller's signal says so. */
  async pause(ms: number): Promise<void> {
    clearTimeout(this.timer);
    await new Promise<void>((resolve, reject) => {
      const stop = () => {
        clearTimeout(timer);
        reject(this.signal.reason);
      };
      const timer = setTimeout(() => {
        this.signal.removeEventListener("abort", stop);
        resolve();
      }, ms);
      if (this.signal.aborted) stop();
      else this.signal.addEventListener("abort", stop, { once: true });
    });
    this.heard();
  }
}
