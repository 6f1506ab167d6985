// Bars: what is taken of a whole.

import { $, bytes, el, number, plural } from './dom.js';

/** A bar of one or two parts of a whole. */
class Meter {
  constructor(title) {
    this.parts = [el('i'), el('i')];
    this.bar = el('div', { class: 'bar', role: 'meter', 'aria-label': title, 'aria-valuemin': '0' }, ...this.parts);
    this.text = el('dd');
    this.node = el('div', { class: 'meter' }, el('dt', {}, title), el('dd', {}, this.bar), this.text);
    $('meters').append(this.node);
  }

  set(total, parts, text) {
    const whole = Math.max(1, total || 0, parts.reduce((sum, part) => sum + (part || 0), 0));
    this.parts.forEach((node, index) => { node.style.width = `${(parts[index] || 0) * 100 / whole}%`; });
    this.bar.setAttribute('aria-valuemax', String(total || 0));
    this.bar.setAttribute('aria-valuenow', String(parts[0] || 0));
    this.bar.setAttribute('aria-valuetext', text);
    this.text.textContent = text;
  }
}

const meters = {
  kv: new Meter('KV blocks'), bytes: new Meter('Adapters in memory'), device: new Meter('Adapters on the device'),
  drafts: new Meter('Drafted tokens'), weights: new Meter('Weights from the disk'),
};

/** Shows what `/v1/status` says. */
export function showMeters(live) {
  const { kv_blocks: kv = {}, adapters = {} } = live;
  meters.kv.set(kv.total, [kv.used, kv.cached],
    `${number(kv.used)} in use, ${number(kv.cached)} kept for reuse, of ${number(kv.total)}${keptBelow(live.memory)}`);
  meters.bytes.set(adapters.budget_bytes, [adapters.bytes],
    `${bytes(adapters.bytes)} of ${bytes(adapters.budget_bytes)}, ${number(adapters.resident)} of `
    + plural(adapters.registered, 'adapter'));
  if (live.device) meters.device.set(live.device.budget_bytes, [live.device.bytes], deviceText(live));
  // Of several executors each has a device of its own.
  meters.device.node.hidden = Boolean(live.executors);
  showDrafts(live.speculation ?? {});
  showWeights(live.memory?.weights ?? {});
  live.executors?.forEach(showExecutor);
  if (live.classes?.length > 1) live.classes.forEach(showClass);
}

/** Of what was drafted and verified, what came true. */
function showDrafts({ drafted_tokens: drafted, accepted_tokens: accepted, mean_accepted_tokens: mean }) {
  meters.drafts.node.hidden = !drafted;
  meters.drafts.set(drafted, [accepted],
    `${number(accepted)} accepted of ${number(drafted)}, ${number(mean)} in a verification`);
}

/** Of the time that reading weights took, what was hidden behind computing. */
function showWeights({ read_bytes: read, read_ms: took = 0, waited_ms: waited = 0, bytes_per_token: token }) {
  meters.weights.node.hidden = !read;
  const hidden = Math.max(0, took - waited);
  meters.weights.set(took, [hidden], `${bytes(read)} read${token == null ? '' : `, ${bytes(token)} a token`}, `
    + `${number(hidden * 100 / Math.max(1, took))} % of the time hidden behind computing`);
}

/** One of several executors. */
function showExecutor({
  name, address, state, detail, kv_blocks: kv = {}, requests = {}, adapters = {}, tokens_per_s: rate = {}, device = {},
}) {
  const meter = meters[`executor ${name}`] ??= new Meter(`Executor ${name}`);
  meter.set(kv.total, [kv.used, kv.cached], [
    address, state, detail, `${number(requests.running)} running, ${number(requests.waiting)} waiting`,
    `${number(rate.generated)} tokens/s`, plural(adapters.resident, 'adapter'), groupText(device),
  ].filter(Boolean).join(', '));
}

/** A service class: of what was promised, what was kept. */
function showClass({ name, requests, waiting, throttled, ttft = {}, tpot = {} }) {
  const meter = meters[`class ${name}`] ??= new Meter(`Class ${name}`);
  const met = (ttft.met ?? 0) + (tpot.met ?? 0);
  const told = (what, { mean_ms: mean, promised_ms: promised }) => mean == null ? null
    : `${what} ${number(mean)}${promised ? ` of ${number(promised)}` : ''} ms`;
  const refused = (ttft.refused ?? 0) + (tpot.refused ?? 0);
  meter.set(met + (ttft.missed ?? 0) + (tpot.missed ?? 0), [met], [
    plural(requests, 'request'), `${number(waiting)} waiting`, told('first token', ttft), told('a token', tpot),
    refused ? `${number(refused)} refused early` : null, throttled ? `${number(throttled)} throttled` : null,
  ].filter(Boolean).join(', '));
}

/** What the tiers below the device keep, if there are any. */
function keptBelow({ block_bytes: size = 0, host = {}, disk = {} } = {}) {
  const tier = (name, { total, used }) => total ? `, ${bytes(used * size)} of ${bytes(total * size)} on ${name}` : '';
  return tier('the host', host) + tier('disk', disk);
}

/** Weights on each device of a device group, if there is one. */
function groupText({ group_weight_bytes: parts = [] }) {
  return parts.length ? `weights of ${parts.map(bytes).join(' and ')} on ${number(parts.length)} devices` : null;
}

/** What the device holds, who computes what it does not, and what waiting for it cost. */
function deviceText({ device, cold_starts: cold = {}, workers = {} }) {
  const seated = workers.seated?.length ?? 0;
  const missing = Math.max(0, (workers.expected ?? 0) - seated);
  return [
    `${bytes(device.bytes)} of ${bytes(device.budget_bytes)}`,
    `${plural(cold.count, 'cold start')}, ${number(cold.mean_load_wait_ms)} ms each`,
    plural(seated, 'worker') + (missing ? ` (${number(missing)} missing)` : ''),
    device.emulated_link_bytes_per_s ? `emulated link of ${bytes(device.emulated_link_bytes_per_s)}/s` : null,
    groupText(device),
  ].filter(Boolean).join(', ');
}
