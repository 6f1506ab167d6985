// What is resident and what goes on: looked at every two seconds, as long as somebody does.

import { $, el, poll, uptime } from './dom.js';
import { get, request } from './api.js';
import { CHANGED, showAdapters } from './adapters.js';
import { addMetrics, addSample } from './figures.js';
import { askForKey } from './key.js';
import { showMeters } from './meters.js';
import { notice } from './notices.js';
import { canLook, onView, view } from './view.js';

const PERIOD_MS = 2000;
/** Histograms of many adapters are long, and say little more after two seconds. */
const METRICS_MS = 10000;

const FORBIDDEN = [
  'Your key may chat, but not see what others do.',
  'This view needs a key of role admin ("holobiont key add NAME --role admin").',
];

function note(failure) {
  if (!failure) return [];
  if (failure.status !== 403) return [notice(failure)];
  const other = () => askForKey('Enter a key of role admin.');
  return [el('div', { class: 'notice calm' }, ...FORBIDDEN.map((text) => el('p', {}, text)),
    el('button', { class: 'button', type: 'button', onclick: other }, 'Use another key'))];
}

let failure = null;
let metricsAt = -Infinity;

async function readMetrics() {
  if (performance.now() - metricsAt < METRICS_MS) return;
  metricsAt = performance.now();
  // Without it, one plot is missing; what is wrong is said by the others.
  await request('metrics').then((response) => response.text()).then(addMetrics, () => {});
}

const isPaused = () => $('pause').getAttribute('aria-pressed') === 'true';

const look = poll(async () => {
  if (!canLook('residency') || isPaused()) return;
  const [table, live] = await Promise.allSettled([get('v1/lora_adapters'), get('v1/status')]);
  $('adapters').hidden = table.status === 'rejected';
  $('live').hidden = live.status === 'rejected';
  const found = table.reason ?? live.reason ?? null;
  // Written only when it changes: an alert is read out at every write.
  if (found?.message !== failure?.message) $('residency-note').replaceChildren(...note(found));
  failure = found;
  if (table.value) showAdapters(table.value, live.value);
  if (!live.value) return;
  addSample(live.value);
  showMeters(live.value);
  $('uptime').textContent = `up ${uptime(live.value.uptime_s)}, looked at every 2 s`;
  await readMetrics();
  // Another key is needed first: asking again would only fill the server's log.
}, () => (view() === 'residency' && !isPaused() && ![401, 403].includes(failure?.status) ? PERIOD_MS : null));

$('pause').addEventListener('click', () => {
  $('pause').setAttribute('aria-pressed', String(!isPaused()));
  look();
});
document.addEventListener(CHANGED, look);
onView('residency', look);
