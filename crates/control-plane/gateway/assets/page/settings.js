// How answers are asked for: the fields below the message.

import { $ } from './dom.js';

/** A seed of nobody's choice. */
export const anySeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

const text = (id) => $(id).value.trim();
/** What is left empty is not sent: the model's own default holds. */
const numbers = (fields) => Object.fromEntries(Object.entries(fields)
  .filter(([, id]) => text(id) !== '').map(([name, id]) => [name, Number(text(id))]));

/** True if every field says something that can be asked for; shows which one does not. */
export function settingsHold() {
  if ($('composer').checkValidity()) return true;
  $('settings').open = true;
  return $('composer').reportValidity();
}

export const settings = () => ({
  system: text('system'),
  sampling: numbers({ temperature: 'temperature', top_p: 'top-p', top_k: 'top-k', max_tokens: 'max-tokens' }),
  // Drawn here and shown with the answer, so that any answer can be had again.
  seed: text('seed') === '' ? anySeed() : Number(text('seed')),
});

function summarize() {
  const said = (id, word) => (text(id) === '' ? null : `${word} ${text(id)}`);
  $('settings').querySelector('summary').textContent = [
    text('system') === '' ? null : 'system prompt', said('temperature', 'temperature'), said('top-p', 'top p'),
    said('top-k', 'top k'), `${text('max-tokens')} tokens`, said('seed', 'seed') ?? 'random seed',
  ].filter(Boolean).join(' · ');
}

$('composer').addEventListener('input', summarize);
summarize();
