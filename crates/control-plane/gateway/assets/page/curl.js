// How an answer is asked for without this page.

import { $ } from './dom.js';
import { key } from './api.js';
import { copy } from './clipboard.js';

export const CHAT = 'v1/chat/completions';

/** Shows how `asked` is asked for at a terminal. */
export function showCurl(asked) {
  // In single quotes a shell reads everything as it stands, but for the quote itself.
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const auth = key() === null ? [] : ['-H "authorization: Bearer $HOLOBIONT_API_KEY"'];
  $('curl').querySelector('pre').textContent = [
    `curl -N ${quoted(new URL(CHAT, location.href).href)}`, ...auth, "-H 'content-type: application/json'",
    `-d ${quoted(JSON.stringify(asked, null, 2))}`,
  ].join(' \\\n  ');
  $('curl').showModal();
}

$('copy').addEventListener('click', () => {
  const text = $('curl').querySelector('pre');
  copy(text.textContent, text, $('copy'), 'Copy');
});
$('close').addEventListener('click', () => $('curl').close());
