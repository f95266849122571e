// Server-sent events over fetch, which can send a key; EventSource cannot.

export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const event = parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { name, data: data.join("\n") } : null;
}

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
// the server says at least every five seconds that nothing has changed
const SILENCE_MS = 12000;
// a page that nobody sees for this long lets the stream go
const HIDDEN_MS = 60000;

// Keeps one stream open: after a fault it tries again, later each time.
export class LiveStream {
  constructor(open, handlers) {
    this.open = open;
    this.handlers = handlers;
    this.waitMs = FIRST_WAIT_MS;
    this.abort = null;
    this.timer = null;
    this.hiddenTimer = null;
    document.addEventListener("visibilitychange", () => this.seen());
  }

  seen() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) this.hiddenTimer = setTimeout(() => this.stop(), HIDDEN_MS);
    else if (this.abort === null && this.timer === null) this.start();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.abort?.abort();
    this.abort = null;
  }

  start() {
    this.stop();
    this.abort = new AbortController();
    this.run(this.abort);
  }

  async run(abort) {
    let silence = null;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      heard();
      const response = await this.open(abort.signal);
      if (!response.ok) {
        if (await this.handlers.refused(response)) {
          if (this.abort === abort) this.stop();
          return;
        }
      } else {
        for await (const event of eventsOf(response)) {
          heard();
          this.waitMs = FIRST_WAIT_MS;
          this.handlers.event(event.name, JSON.parse(event.data));
        }
      }
    } catch (error) {
      if (!abort.signal.aborted && !(error instanceof TypeError)) console.error(error);
    } finally {
      clearTimeout(silence);
    }
    // another stream may have taken the place of this one
    if (this.abort !== abort) return;
    this.abort = null;
    this.handlers.lost();
    this.timer = setTimeout(() => {
      this.timer = null;
      this.start();
    }, this.waitMs);
    this.waitMs = Math.min(this.waitMs * 2, LONGEST_WAIT_MS);
  }
}
