// The line that says whether the server can answer.

import { $, isNumber, poll, setText } from './dom.js';
import { get } from './api.js';
import { loadModels, models } from './models.js';

let state = 'unknown';
let version = '';

async function readiness() {
  try {
    const response = await fetch('ready', { cache: 'no-store' });
    const body = await response.json();
    const { percent, stage, detail } = body;
    return { state: String(body.status), percent, stage, detail };
  } catch {
    return { state: 'unreachable' };
  }
}

function showStatus({ state: found, percent, stage, detail }) {
  const [kind, word] = {
    ready: ['ready', 'ready'],
    loading: ['loading', isNumber(percent) ? `loading ${Math.round(percent)} %` : 'loading'],
    lost: ['lost', 'model lost, restarting'],
    stopping: ['lost', 'stopping'],
  }[found] ?? ['lost', 'no answer'];
  const base = models.find((model) => model.base)?.id;
  $('status').dataset.state = kind;
  $('status').title = detail ?? '';
  // Written only when it changes: a live region is read out at every write.
  setText($('status').querySelector('.word'), word);
  setText($('status').querySelector('.more'), kind === 'ready' ? [base, version].filter(Boolean).join(' · ')
    : String(stage ?? detail ?? ''));
  $('loading').hidden = kind !== 'loading';
  if (isNumber(percent)) $('loading').value = percent;
  else $('loading').removeAttribute('value');
}

/** What is asked for once, as soon as the server can answer. */
export async function greet() {
  try {
    await loadModels();
    version = String((await get('version')).version);
  } catch { /* The status line and the key field say what is wrong. */ }
  showStatus({ state });
}

export const pollStatus = poll(async () => {
  const found = await readiness();
  const returned = found.state === 'ready' && state !== 'ready';
  state = found.state;
  showStatus(found);
  if (returned) await greet();
}, () => (state === 'ready' ? 10000 : 2000));
