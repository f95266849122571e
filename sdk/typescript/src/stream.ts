/** An answer as it comes: an async iterator over chunks. Leaving it gives the request up. */

import type { Call } from "./calls.js";
import { UnexpectedAnswer } from "./errors.js";
import { Frames, type Chunk } from "./frames.js";
import type { Patience } from "./patience.js";
import type { CallOptions, Transport } from "./transport.js";
import type { InferenceResult } from "./types.js";

/** Sent when its first chunk is asked for; `break` or `close()` stop it early. */
export class InferStream implements AsyncIterableIterator<Chunk> {
  /** The whole answer, once it has ended. */
  result: InferenceResult | null = null;
  private readonly chunks: AsyncGenerator<Chunk, void, void>;
  private patience: Patience | null = null;

  constructor(
    private readonly transport: Transport,
    private readonly call: Call<unknown>,
    private readonly options: CallOptions,
  ) {
    this.chunks = this.run();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  next(): Promise<IteratorResult<Chunk, void>> {
    return this.chunks.next();
  }

  async return(): Promise<IteratorResult<Chunk, void>> {
    await this.close();
    return { done: true, value: undefined };
  }

  async close(): Promise<void> {
    // a read under way is ended first: a generator cannot be left in the middle of one
    this.patience?.end();
    await this.chunks.return();
  }

  private async *run(): AsyncGenerator<Chunk, void, void> {
    const patience = this.transport.patience(this.options);
    this.patience = patience;
    try {
      const response = await this.transport.open(this.call, this.options, patience);
      const reader = response.body?.getReader();
      if (reader === undefined) throw new UnexpectedAnswer("the answer has no body");
      const frames = new Frames(response.headers.get("x-request-id"));
      for (;;) {
        const { done, value } = await this.transport.reading(reader.read(), patience);
        if (done) break;
        for (const chunk of frames.feed(value)) {
          this.result = frames.result;
          yield chunk;
        }
      }
      frames.end();
    } finally {
      patience.end();
    }
  }
}
