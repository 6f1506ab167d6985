// What is served, and the list somebody picks from.

import { el, named, number, plural, short, svg } from './dom.js';
import { get } from './api.js';

/** What is served: bases first, adapters by name. Entries are `{ id, base, generation, asleep }`. */
export let models = [];
const pickers = [];

export async function loadModels() {
  const list = await get('v1/models');
  const found = (Array.isArray(list.data) ? list.data : []).map((card) => (
    { id: String(card.id), base: !card.parent, generation: card.adapter_generation, asleep: card.state === 'asleep' }));
  models = found.sort((a, b) => b.base - a.base || a.id.localeCompare(b.id, 'en', { numeric: true }));
  pickers.forEach((picker) => picker.refresh());
}

/** Most entries of an open list: beyond it, searching is faster than scrolling. */
const MAX_OPTIONS = 100;

/** A button with the chosen model, and a list with a search field behind it. */
export class Picker {
  constructor(label, choose) {
    this.id = `picker-${pickers.length}`;
    this.choose = choose;
    this.value = null;
    this.active = 0;
    this.name = named('…');
    this.kind = el('span', { class: 'kind' });
    this.button = el('button', {
      class: 'button', type: 'button', 'aria-haspopup': 'dialog', 'aria-expanded': 'false', 'data-picker': label,
      onclick: () => (this.panel.hidden ? this.open() : this.close()),
    }, el('span', { class: 'unseen' }, `${label}: `), this.name, this.kind, arrow());
    this.search = el('input', {
      type: 'search', role: 'combobox', 'aria-label': `Search models for ${label}`, 'aria-expanded': 'true',
      'aria-controls': `${this.id}-list`, 'aria-autocomplete': 'list', autocomplete: 'off', placeholder: 'Search',
      oninput: () => { this.active = 0; this.list(); }, onkeydown: (event) => this.key(event),
    });
    this.options = el('ul', { id: `${this.id}-list`, role: 'listbox', 'aria-label': label });
    this.rest = el('p', { class: 'soft small' });
    this.panel = el('div', { class: 'panel', hidden: true }, this.search, this.options, this.rest);
    this.root = el('div', { class: 'picker' }, this.button, this.panel);
    this.root.addEventListener('focusout', (event) => {
      if (event.relatedTarget && !this.root.contains(event.relatedTarget)) this.close();
    });
    document.addEventListener('pointerdown', (event) => {
      if (!this.root.contains(event.target)) this.close();
    });
    pickers.push(this);
  }

  get model() { return models.find((model) => model.id === this.value); }

  refresh() {
    if (this.value === null && models.length > 0) this.value = this.choose(models).id;
    this.name.textContent = this.value ?? '…';
    this.kind.textContent = this.told();
    if (!this.panel.hidden) this.list();
  }

  /** What stands beside the name. */
  told() {
    if (this.value === null) return '';
    if (!this.model) return 'gone';
    const kind = this.model.base ? 'base model' : `adapter ${short(this.model.generation)}`;
    return this.model.asleep ? `${kind}, asleep` : kind;
  }

  open() {
    loadModels().catch(() => {});
    this.panel.hidden = false;
    this.button.setAttribute('aria-expanded', 'true');
    this.search.value = '';
    this.active = Math.max(0, models.findIndex((model) => model.id === this.value));
    this.list();
    this.search.focus();
  }

  close() {
    this.panel.hidden = true;
    this.button.setAttribute('aria-expanded', 'false');
  }

  pick(model) {
    this.value = model.id;
    this.refresh();
    this.close();
    this.button.focus();
  }

  list() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = models.filter((model) => model.id.toLowerCase().includes(wanted));
    this.shown = found.slice(0, MAX_OPTIONS);
    this.active = Math.min(this.active, Math.max(0, this.shown.length - 1));
    this.options.replaceChildren(...this.shown.map((model, index) => this.option(model, index)));
    const hidden = found.length - this.shown.length;
    this.rest.textContent = found.length === 0 ? 'No model has a name like that.'
      : hidden > 0 ? `${number(hidden)} more: search to narrow the list.` : plural(found.length, 'model');
    this.mark();
  }

  option(model, index) {
    const kind = el('span', { class: model.base ? 'soft' : 'mono' }, model.base ? 'base' : short(model.generation));
    return el('li', {
      id: `${this.id}-${index}`, role: 'option', 'aria-selected': String(model.id === this.value),
      // Before the click, the search field would lose the focus and the list would close.
      onpointerdown: (event) => event.preventDefault(), onclick: () => this.pick(model),
    }, named(model.id), kind);
  }

  mark() {
    [...this.options.children].forEach((option, index) => option.classList.toggle('active', index === this.active));
    const active = this.options.children[this.active];
    active?.scrollIntoView({ block: 'nearest' });
    this.search.setAttribute('aria-activedescendant', active?.id ?? '');
  }

  key(event) {
    const last = this.shown.length - 1;
    const moved = {
      ArrowDown: Math.min(last, this.active + 1), ArrowUp: Math.max(0, this.active - 1),
      PageDown: Math.min(last, this.active + 10), PageUp: Math.max(0, this.active - 10),
    }[event.key];
    if (moved !== undefined) { this.active = moved; this.mark(); }
    else if (event.key === 'Enter') { if (this.shown[this.active]) this.pick(this.shown[this.active]); }
    else if (event.key === 'Escape') { this.close(); this.button.focus(); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

function arrow() {
  return svg('svg', { viewBox: '0 0 10 10', 'aria-hidden': 'true' },
    svg('path', { d: 'M1 3l4 4 4-4', fill: 'none', stroke: 'currentColor', 'stroke-width': '1.6' }));
}

