// The adapters there are: a table of them, and adding, pinning and removing.

import { $, arrange, bytes, el, named, number, setText, short } from './dom.js';
import { request } from './api.js';
import { loadModels } from './models.js';
import { notice } from './notices.js';

/** What is said on the document when there are others than before. */
export const CHANGED = 'adapterschanged';

/** Most rows that are drawn: beyond it, filtering is faster than scrolling. */
const MAX_ROWS = 500;

const COLUMNS = [
  { title: 'NAME', of: (row) => row.name, head: true, cell: (row) => [named(row.name), row.tenant
    && el('div', { class: 'soft small' }, 'tenant ', named(row.tenant))] },
  { title: 'GEN', of: (row) => row.generation, cell: (row) => [
    el('span', { class: 'mono', title: row.generation }, short(row.generation))] },
  { title: 'RANK', of: (row) => row.rank, numeric: true },
  { title: 'SIZE', of: (row) => row.bytes, numeric: true, cell: (row) => [bytes(row.bytes)] },
  { title: 'TIER', of: (row) => row.tier },
  { title: 'REQS', of: (row) => row.requests, numeric: true },
  { title: 'TOK/S', of: (row) => row.tokens_per_s, numeric: true },
  { title: 'PINNED', of: (row) => (row.pinned ? 'yes' : 'no') },
  { title: 'STATE', of: (row) => row.state, cell: (row) => [
    el('span', { class: 'state', 'data-state': { ready: 'ready', failed: 'lost' }[row.state] ?? 'loading' },
      el('span', { class: 'dot' }), String(row.state)),
    row.error && el('div', { class: 'small' }, named(row.error))] },
];
const order = { column: COLUMNS[0], down: false };
const [head, body] = [$('adapters').querySelector('thead tr'), $('adapters').querySelector('tbody')];

COLUMNS.forEach((column) => {
  column.button = el('button', { type: 'button', onclick: () => sortBy(column) }, column.title);
  column.header = el('th', { scope: 'col', class: column.numeric ? 'number' : null }, column.button);
  head.append(column.header);
});
head.append(el('td', {}, el('span', { class: 'unseen' }, 'What can be done')));

/** An adapter's line. It stays while the adapter does: a button somebody is on must not vanish under them. */
class Row {
  constructor() {
    this.cells = COLUMNS.map((column) => el(column.head ? 'th' : 'td', {
      class: column.numeric ? 'number' : null, scope: column.head ? 'row' : null }));
    this.pin = el('button', { class: 'quiet small', type: 'button', onclick: () => this.change() });
    this.remove = el('button', { class: 'quiet small', type: 'button', onclick: () => askToRemove(this.row) }, 'Remove');
    this.node = el('tr', {}, ...this.cells, el('td', { class: 'actions' }, this.pin, ' ', this.remove));
  }

  show(row) {
    this.row = row;
    COLUMNS.forEach((column, index) => {
      const value = column.of(row);
      const cell = column.cell?.(row) ?? [column.numeric ? number(value) : String(value ?? '–')];
      this.cells[index].replaceChildren(...cell.filter(Boolean));
    });
    setText(this.pin, row.pinned ? 'Unpin' : 'Pin');
    this.pin.setAttribute('aria-label', `${this.pin.textContent} ${row.name}`);
    this.remove.setAttribute('aria-label', `Remove ${row.name}`);
    this.pin.hidden = this.remove.hidden = row.state === 'draining';
  }

  change() {
    const { name, pinned } = this.row;
    change('v1/pin_lora_adapter', { lora_name: name, pinned: !pinned }, (now) => (
      `${now.name} ${now.pinned ? 'stays in memory.' : 'makes room for others where it has to.'}`));
  }
}

let rows = [];
const nodes = new Map();
const keyOf = (row) => JSON.stringify([row.name, row.generation, row.state === 'draining']);

/** Shows what `/v1/lora_adapters` says, and where `/v1/status` says that adapters may be read from. */
export function showAdapters(table, live) {
  rows = Array.isArray(table.data) ? table.data : [];
  if (live?.adapter_root) setText($('add-root'), String(live.adapter_root));
  const there = new Set(rows.map(keyOf));
  [...nodes.keys()].filter((key) => !there.has(key)).forEach((key) => nodes.delete(key));
  showRows();
}

function sortBy(column) {
  // Figures are looked at from the largest.
  order.down = order.column === column ? !order.down : Boolean(column.numeric);
  order.column = column;
  showRows();
}

function compareRows(a, b) {
  const [x, y] = [order.column.of(a), order.column.of(b)];
  const by = order.column.numeric ? (x ?? -1) - (y ?? -1)
    : String(x ?? '').localeCompare(String(y ?? ''), 'en', { numeric: true });
  return (order.down ? -by : by) || String(a.name).localeCompare(String(b.name), 'en', { numeric: true });
}

function showRows() {
  COLUMNS.forEach(({ header }) => header.removeAttribute('aria-sort'));
  order.column.header.setAttribute('aria-sort', order.down ? 'descending' : 'ascending');
  const wanted = $('adapters-filter').value.trim().toLowerCase();
  const found = rows.filter((row) => String(row.name).toLowerCase().includes(wanted)).sort(compareRows);
  arrange(body, found.slice(0, MAX_ROWS).map(nodeOf));
  setText($('adapters-count'), wanted ? `${number(found.length)} of ${number(rows.length)}` : number(rows.length));
  setText($('adapters-rest'), below(found.length));
}

function nodeOf(row) {
  const key = keyOf(row);
  if (!nodes.has(key)) nodes.set(key, new Row());
  nodes.get(key).show(row);
  return nodes.get(key).node;
}

function below(found) {
  if (rows.length === 0) return 'None is loaded. Add one here, with "holobiont adapters add" or POST /v1/load_lora_adapter.';
  if (found === 0) return 'No adapter has a name like that.';
  return found > MAX_ROWS ? `${number(found - MAX_ROWS)} more: filter by name to see them.` : '';
}

$('adapters-filter').addEventListener('input', showRows);

// --- Changes --------------------------------------------------------------------------------------------------------

/** Asks for a change, and says `done` of what is there then; says in `place` if it was refused. True if it was not. */
async function change(path, body, done, place = $('adapters-note')) {
  try {
    const answer = await (await request(path, { body })).json();
    $('adapters-note').replaceChildren(el('p', { class: 'notice calm' }, done(answer)));
  } catch (failure) {
    place.replaceChildren(notice(failure));
    return false;
  }
  document.dispatchEvent(new Event(CHANGED));
  // What cannot be listed now is listed when the list is opened.
  loadModels().catch(() => {});
  return true;
}

function showAdding(shown) {
  $('add').hidden = !shown;
  $('add-open').setAttribute('aria-expanded', String(shown));
  (shown ? $('add-name') : $('add-open')).focus();
}

$('add-open').addEventListener('click', () => showAdding($('add').hidden));
$('add').addEventListener('keydown', (event) => { if (event.key === 'Escape') showAdding(false); });
$('add').addEventListener('change', () => {
  const isHere = $('add-from-here').checked;
  $('add-here').hidden = $('add-files').disabled = !isHere;
  $('add-there').hidden = $('add-path').disabled = isHere;
});

/** The files that make an adapter; beside them in a folder of PEFT's lie others that nobody needs. */
const isPart = ({ name }) => /^adapter_(?:config\.json|model\.safetensors)$|\.gguf$/.test(name);

/** What is asked for, as a form: what is said of the files stands before them. */
function formOf(asked, files) {
  const form = new FormData();
  Object.entries(asked).forEach(([name, value]) => form.append(name, String(value)));
  const parts = files.filter(isPart);
  // If none is a part, the server says what is wanted.
  (parts.length > 0 ? parts : files).forEach((file) => form.append('file', file));
  return form;
}

$('add').addEventListener('submit', async (event) => {
  event.preventDefault();
  const [tenant, isHere] = [$('add-tenant').value.trim(), $('add-from-here').checked];
  const asked = { lora_name: $('add-name').value.trim(), ...(tenant && { tenant }), pinned: $('add-pinned').checked,
    load_inplace: $('add-replace').checked };
  $('add-send').disabled = true;
  $('adapters-note').replaceChildren(el('p', { class: 'soft' }, isHere ? 'Sending the files …' : 'Loading …'));
  const added = await change(isHere ? 'v1/upload_lora_adapter' : 'v1/load_lora_adapter',
    isHere ? formOf(asked, [...$('add-files').files]) : { ...asked, lora_path: $('add-path').value.trim() },
    (row) => `${row.name} answers: rank ${row.rank}, ${bytes(row.bytes)}, generation ${short(row.generation)}.`);
  $('add-send').disabled = false;
  if (!added) return;
  $('add').reset();
  $('add').dispatchEvent(new Event('change'));
  showAdding(false);
});

let leaving = null;

function askToRemove(row) {
  leaving = row;
  $('remove-title').replaceChildren('Remove ', named(row.name), '?');
  $('remove-note').replaceChildren();
  $('remove').showModal();
  $('remove-no').focus();
}

$('remove-no').addEventListener('click', () => $('remove').close());
$('remove-yes').addEventListener('click', async () => {
  $('remove-yes').disabled = true;
  // Only what was looked at: if another has the name by now, it stays.
  const removed = await change('v1/unload_lora_adapter',
    { lora_name: leaving.name, expected_generation: leaving.generation },
    ({ name, freed_bytes: freed }) => `${name} is gone, and ${bytes(freed)} are free.`, $('remove-note'));
  $('remove-yes').disabled = false;
  if (removed) {
    $('remove').close();
    $('adapters-filter').focus();
  }
});
