// The field for an API key, which is kept in this tab's session storage alone.

import { $ } from './dom.js';
import { KEY_WANTED, forgetKey, keepKey, key } from './api.js';
import { greet } from './status.js';
import { isTalk, lookAgain } from './view.js';

document.addEventListener(KEY_WANTED, ({ detail: failure }) => askForKey(key() !== null
  ? `This server does not accept that key: ${failure.message}. Check it, or ask the operator for another.`
  : 'This server wants an API key. Its operator makes one with "holobiont key add".'));

/** Asks for a key, and says why; what was given before is forgotten. */
export function askForKey(why) {
  $('key-why').textContent = why;
  forgetKey();
  $('forget').hidden = true;
  if (!$('key').hidden) return;
  $('key').hidden = false;
  $('key-field').focus();
}

$('key').addEventListener('submit', (event) => {
  event.preventDefault();
  const given = $('key-field').value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    $('key-why').textContent = 'A key has letters, digits and signs only, without spaces. Copy it again, whole.';
    return;
  }
  keepKey(given);
  $('key-field').value = '';
  $('key').hidden = true;
  $('forget').hidden = false;
  greet();
  lookAgain();
  if (isTalk()) $('prompt').focus();
});

$('forget').addEventListener('click', () => {
  forgetKey();
  location.reload();
});
$('forget').hidden = key() === null;
