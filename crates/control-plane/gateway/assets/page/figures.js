// What goes on, over time: drawn from what `/v1/status` and `/metrics` have said while this page looked.

import { $, bytes, duration, el, isNumber, named, number, uptime } from './dom.js';
import { count, histograms, quantile, since } from './metrics.js';
import { Plot, binaryCeiling } from './plot.js';

/** How far back the plots can be made to go. */
const KEPT_MS = 3600000;
/** What is further apart was not looked at meanwhile. */
const GAP_MS = 8000;
/** Most adapters whose first tokens are shown, those that were asked most. */
const MAX_ADAPTERS = 8;

const series = (keys) => keys.map((key) => ({ key, label: key }));
const memory = { format: bytes, stacked: true, round: binaryCeiling, least: 1 << 20 };
const plots = {
  generated: new Plot('Tokens per second, generated', series(['generated'])),
  prompts: new Plot('Tokens per second, prompts', series(['prompts'])),
  requests: new Plot('Requests', series(['running', 'waiting'])),
  device: new Plot('Device memory by kind', series(['running', 'history', 'adapters']), memory),
  held: new Plot('Host memory by kind', series(
    ['weights', 'blocks', 'adapters', 'history', 'workers', 'clients', 'drafts']), memory),
};

/** What was looked at, as one point for each plot. */
let samples = [];

/** Takes over what `/v1/status` says now. */
export function addSample(live) {
  const at = performance.now();
  const parts = live.executors?.map((executor) => executor.memory) ?? [live.memory];
  const points = {
    generated: { generated: live.tokens_per_s?.generated },
    prompts: { prompts: live.tokens_per_s?.prompt },
    requests: { running: live.requests?.running, waiting: live.requests?.waiting },
    device: sums(parts, ({ block_bytes: size = 0, device = {} }) => ({
      running: device.running * size, history: device.history * size, adapters: device.adapters * size })),
    held: sums(parts, ({ held = {} }) => Object.fromEntries(
      plots.held.series.map(({ key }) => [key, held[`${key}_bytes`]]))),
  };
  const whole = sums(parts, ({ block_bytes: size = 0, device = {}, held = {} }) => ({
    device: device.total * size, held: held.limit_bytes }));
  samples = [...samples.filter((sample) => at - sample.at < KEPT_MS), { at, points, whole }];
  draw();
}

/** Of several executors, what all of them have together. */
function sums(parts, of) {
  const sum = {};
  for (const [key, value] of parts.flatMap((part) => Object.entries(of(part ?? {})))) {
    if (isNumber(value)) sum[key] = (sum[key] ?? 0) + value;
  }
  return sum;
}

const windowMs = () => Number($('window').value);

function draw() {
  const to = samples.at(-1)?.at ?? performance.now();
  const shown = samples.filter(({ at }) => to - at < windowMs());
  // A young curve is stretched: a few dots at the edge would say nothing.
  const from = Math.min(to - 20000, Math.max(shown[0]?.at ?? to, to - windowMs()));
  const ends = [`${ago((to - from) / 1000)} ago`, 'now'];
  const { device, held } = samples.at(-1)?.whole ?? {};
  for (const [name, plot] of Object.entries(plots)) {
    plot.show(shown.map(({ at, points }) => ({ at, values: points[name] })), {
      from, to, ends, gap: GAP_MS, most: name === 'device' && device,
      note: name === 'device' ? `of ${bytes(device)}` : name === 'held' && held ? `of at most ${bytes(held)}` : '',
    });
  }
  if ($('numbers').open) showNumbers();
}

const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : uptime(seconds + 30));

/** The plots as a table, for those who cannot see them or want to know exactly. */
function showNumbers() {
  const row = (title, { label, now, lowest, mean, highest }) => el('tr', {},
    el('th', { scope: 'row' }, plots.generated.title === title || plots.prompts.title === title ? title : `${title}: ${label}`),
    ...[now, lowest, mean, highest].map((value) => el('td', { class: 'number' }, value)));
  $('numbers').querySelector('tbody').replaceChildren(
    ...Object.values(plots).flatMap((plot) => plot.rows().map((figures) => row(plot.title, figures))));
}

// --- First tokens ---------------------------------------------------------------------------------------------------

const FIRST_TOKEN = 'holobiont_adapter_time_to_first_token_seconds';

/** What `/metrics` said, while it is younger than a window may be long. */
let readings = [];
const firstTokens = {
  note: el('span', { class: 'soft small' }),
  axis: el('span', { class: 'axis' }),
  rows: el('tbody'),
};
const firstTokenFigure = el('figure', { class: 'plot', hidden: true },
  el('figcaption', {}, 'First token by adapter ', firstTokens.note),
  el('table', { class: 'spread' },
    el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Adapter'), el('th', { scope: 'col' }, firstTokens.axis),
      ...['Median', '95 %', 'Requests'].map((title) => el('th', { scope: 'col', class: 'number' }, title)))),
    firstTokens.rows));

/** Takes over what `/metrics` says now. */
export function addMetrics(text) {
  const at = performance.now();
  readings = [...readings.filter((reading) => at - reading.at < KEPT_MS),
    { at, histograms: histograms(text, FIRST_TOKEN) }];
  drawFirstTokens();
}

function drawFirstTokens() {
  const now = readings.at(-1);
  if (!now) return;
  const before = readings.find(({ at }) => now.at - at <= windowMs());
  const recent = spreads(now.histograms, before.histograms);
  // Of a page that was just opened, or of a quiet server, all that is known says more than nothing.
  const shown = recent.length > 0 ? recent : spreads(now.histograms, new Map());
  firstTokens.note.textContent = recent.length > 0 ? `in the last ${ago((now.at - before.at) / 1000)}`
    : shown.length > 0 ? 'since the server started' : 'nobody has asked yet';
  firstTokenFigure.hidden = false;
  firstTokenFigure.querySelector('thead').hidden = shown.length === 0;
  const [low, high] = [Math.min(...shown.map(({ median }) => median)), Math.max(...shown.map(({ most }) => most))];
  const scale = [Math.floor(Math.log10(low)), Math.max(Math.floor(Math.log10(low)) + 1, Math.ceil(Math.log10(high)))];
  firstTokens.axis.replaceChildren(...scale.map((power) => el('span', {}, decade(power))));
  firstTokens.rows.replaceChildren(...shown.slice(0, MAX_ADAPTERS).map((spread) => spreadRow(spread, scale)));
}

const decade = (power) => (power < 0 ? `${10 ** (power + 3)} ms` : `${10 ** power} s`);

/** Of each adapter that was asked, how long first tokens took, in seconds; those first that were asked most. */
function spreads(now, before) {
  return [...now].map(([name, buckets]) => {
    const fresh = since(buckets, before.get(name));
    return { name, requests: count(fresh), buckets: fresh };
  }).filter(({ requests }) => requests > 0)
    .map(({ name, requests, buckets }) => (
      { name, requests, median: quantile(buckets, 0.5) || 1e-4, most: quantile(buckets, 0.95) || 1e-4 }))
    .sort((a, b) => b.requests - a.requests || a.name.localeCompare(b.name));
}

function spreadRow({ name, requests, median, most }, [least, greatest]) {
  const place = (seconds) => Math.max(0, (Math.log10(seconds) - least) * 100 / (greatest - least));
  const bar = el('i');
  bar.style.marginLeft = `${place(median)}%`;
  bar.style.width = `${place(most) - place(median)}%`;
  return el('tr', {}, el('th', { scope: 'row' }, named(name)), el('td', { 'aria-hidden': 'true' },
    el('span', { class: 'track' }, bar)), ...[duration(median * 1000), duration(most * 1000), number(requests)]
    .map((value) => el('td', { class: 'number' }, value)));
}

$('plots').append(...Object.values(plots).slice(0, 3).map(({ node }) => node), firstTokenFigure,
  plots.device.node, plots.held.node);
$('window').addEventListener('change', () => { draw(); drawFirstTokens(); });
$('numbers').addEventListener('toggle', draw);
