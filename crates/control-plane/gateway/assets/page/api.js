// This server's API, asked with the key of this tab.

const KEY = 'holobiont.key';

/** The key of this tab, or null. */
export const key = () => sessionStorage.getItem(KEY);
export const keepKey = (given) => sessionStorage.setItem(KEY, given);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** What is said on the document when a request was refused for want of a key; the failure is its `detail`. */
export const KEY_WANTED = 'keywanted';

/** Why a request failed, in the server's words and in a form the page can act on. */
export class Failure extends Error {
  constructor(message, { status = 0, code = '', retryAfterS = 0, requestId = '' } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfterS, requestId });
  }

  static async of(response) {
    const shape = await response.json().then((body) => body?.error, () => null);
    const seconds = Number(response.headers.get('retry-after'));
    return new Failure(String(shape?.message ?? `the answer was HTTP status ${response.status}, without a reason`), {
      status: response.status,
      code: String(shape?.code ?? ''),
      retryAfterS: seconds > 0 ? Math.min(Math.ceil(seconds), 3600) : 0,
      requestId: response.headers.get('x-request-id') ?? '',
    });
  }
}

/** Sends a request with the key of this tab. Throws a Failure, or an AbortError if `signal` fired. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  // The browser says itself what a form is.
  const isForm = body instanceof FormData;
  if (body && !isForm) headers['content-type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, {
      method: body ? 'POST' : 'GET', headers, body: body && (isForm ? body : JSON.stringify(body)), signal, cache: 'no-store',
    });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Failure('the connection was refused or cut', { code: 'unreachable' });
  }
  if (response.ok) return response;
  const failure = await Failure.of(response);
  if (failure.status === 401) document.dispatchEvent(new CustomEvent(KEY_WANTED, { detail: failure }));
  throw failure;
}

export const get = async (path) => (await request(path)).json().catch(() => {
  throw new Failure('the answer is not JSON', { code: 'not_holobiont' });
});
