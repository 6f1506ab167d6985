// The event stream of an answer.

import { Failure } from './api.js';

/** Longest event that is read: a stream without ends of lines must not fill the memory. */
const MAX_EVENT_CHARS = 1 << 20;

/** The `data` of every server-sent event of `body`, as the HTML standard parses them. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '', data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // A CR at the end may be half of a CRLF: it waits for what follows.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === '' && data.length > 0) yield data.splice(0).join('\n');
        else if (line.startsWith('data:')) data.push(line.slice(line[5] === ' ' ? 6 : 5));
      }
      if (rest.length > MAX_EVENT_CHARS) throw new Failure('an event is too long', { code: 'broken_stream' });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of a streamed answer. Throws a Failure unless the stream ends as it has to, with `[DONE]`. */
export async function* chunks(response) {
  if (!response.headers.get('content-type')?.startsWith('text/event-stream')) {
    throw new Failure('the answer is not an event stream', { code: 'not_holobiont' });
  }
  try {
    for await (const data of events(response.body)) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(String(chunk.error.message), { code: String(chunk.error.code ?? '') });
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || error.name === 'AbortError') throw error;
    throw new Failure('the connection was cut in the middle of the answer', { code: 'broken_stream' });
  }
  throw new Failure('the stream ended without a reason', { code: 'broken_stream' });
}

