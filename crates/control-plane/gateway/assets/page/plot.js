// Plots: lines, or areas on one another, with axes in words, a legend that says the values, and the same as text.

import { el, isNumber, number, svg } from './dom.js';

/** Where a plot's line is drawn, so that one of zeros is seen. */
const FLOOR = 99.5;

/** The next number above that halves well: an axis is read at its middle, too. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 10].find((factor) => factor * power >= value * (1 - 1e-9));
}

/** The same for bytes. */
export const binaryCeiling = (value) => 2 ** Math.ceil(Math.log2(value));

/** A plot of `series`, each `{ key, label }`. Its points are `{ at, values }`, with a value by key where there is one. */
export class Plot {
  constructor(title, series, { format = number, stacked = false, least = 2, round = ceiling } = {}) {
    Object.assign(this, { title, series, format, stacked, least, round, points: [], chosen: null });
    this.paths = series.map((_, index) => svg('path', { class: `${stacked ? 'area' : 'line'} c${index}` }));
    this.rule = svg('path', { class: 'rule' });
    const grid = svg('path', { class: 'grid', d: 'M0 .5H100M0 50H100M0 99.5H100' });
    this.svg = svg('svg', { viewBox: '0 0 100 100', preserveAspectRatio: 'none', role: 'img' }, grid, ...this.paths,
      this.rule);
    this.heights = [0, 1, 2].map(() => el('span'));
    this.ends = [el('span'), el('span')];
    this.keys = series.map(({ label }, index) => {
      const value = el('b');
      return { value, node: el('li', {}, el('i', { class: `c${index} ${stacked ? 'area' : 'line'}` }), `${label} `, value) };
    });
    this.note = el('span', { class: 'soft small' });
    this.node = el('figure', { class: 'plot' }, el('figcaption', {}, title, ' ', this.note),
      el('ul', { class: 'legend' }, ...this.keys.map(({ node }) => node)),
      // Said by the picture's text; read alone, they are numbers without a meaning.
      el('div', { class: 'frame' }, el('div', { class: 'heights', 'aria-hidden': 'true' }, ...this.heights), this.svg,
        el('div', { class: 'ends', 'aria-hidden': 'true' }, ...this.ends)));
    this.svg.addEventListener('pointermove', (event) => this.choose(event));
    this.svg.addEventListener('pointerleave', () => { this.chosen = null; this.say(); });
  }

  /** Draws `points` between `from` and `to`, which are called `ends`; where points are further apart than `gap`, nothing. */
  show(points, { from, to, ends, gap = Infinity, most, note = '' }) {
    Object.assign(this, { points, from, to, gap });
    if (this.chosen?.at < from) this.chosen = null;
    this.most = most || this.round(Math.max(this.least, ...points.map((point) => this.top(point))));
    this.heights.forEach((node, index) => { node.textContent = this.format(this.most * (2 - index) / 2); });
    this.ends.forEach((node, index) => { node.textContent = ends[index]; });
    this.note.textContent = note;
    this.paths.forEach((path, index) => path.setAttribute('d', this.stacked ? this.area(index) : this.line(index)));
    this.say();
  }

  /** The highest place that a point takes. */
  top({ values }) {
    const all = this.series.map(({ key }) => values[key] ?? 0);
    return this.stacked ? all.reduce((sum, value) => sum + value, 0) : Math.max(...all);
  }

  x(at) { return ((at - this.from) * 100 / (this.to - this.from)).toFixed(2); }

  y(value) { return (FLOOR - value * (FLOOR - 0.5) / this.most).toFixed(2); }

  /** The points that have a value of `key`, in runs: where nobody looked there is no line. */
  runs(key) {
    const runs = [];
    let before = -Infinity;
    for (const point of this.points.filter(({ values }) => isNumber(values[key]))) {
      if (point.at - before > this.gap || runs.length === 0) runs.push([]);
      runs.at(-1).push(point);
      before = point.at;
    }
    return runs;
  }

  line(index) {
    const { key } = this.series[index];
    return this.runs(key).map((run) => (
      `M${run.map((point) => `${this.x(point.at)} ${this.y(point.values[key])}`).join('L')}`)).join('');
  }

  /** The area of a part, on those before it. */
  area(index) {
    const upTo = (point, end) => this.series.slice(0, end)
      .reduce((sum, { key }) => sum + (point.values[key] ?? 0), 0);
    const place = (end) => (point) => `${this.x(point.at)} ${this.y(upTo(point, end))}`;
    return this.runs(this.series[index].key).map((run) => (
      `M${[...run.map(place(index + 1)), ...run.map(place(index)).reverse()].join('L')}Z`)).join('');
  }

  /** Says in the legend what was where the pointer is. */
  choose({ clientX }) {
    const box = this.svg.getBoundingClientRect();
    const at = this.from + (clientX - box.left) * (this.to - this.from) / box.width;
    const away = (point) => Math.abs(point.at - at);
    this.chosen = this.points.reduce((best, point) => (best && away(best) <= away(point) ? best : point), null);
    this.say();
  }

  say() {
    this.rule.setAttribute('d', this.chosen ? `M${this.x(this.chosen.at)} 0V100` : '');
    this.keys.forEach(({ node, value }, index) => {
      const { key } = this.series[index];
      const point = this.chosen ?? this.points.findLast(({ values }) => isNumber(values[key]));
      value.textContent = this.format(point?.values[key]);
      // Of many kinds those that there are none of would only take room.
      node.hidden = this.stacked && !this.points.some(({ values }) => values[key] > 0);
    });
    this.svg.setAttribute('aria-label', `${this.title}. ${this.rows().map((row) => (
      `${row.label}: now ${row.now}, lowest ${row.lowest}, highest ${row.highest}`)).join('; ')}`);
  }

  /** What is shown, in figures: of each series that there is anything of. */
  rows() {
    return this.series.flatMap(({ key, label }) => {
      const all = this.points.map(({ values }) => values[key]).filter(isNumber);
      if (all.length === 0 || (this.stacked && !all.some((value) => value > 0))) return [];
      const mean = all.reduce((sum, value) => sum + value, 0) / all.length;
      const [now, lowest, highest] = [all.at(-1), Math.min(...all), Math.max(...all)].map(this.format);
      return [{ label, now, lowest, mean: this.format(mean), highest }];
    });
  }
}
