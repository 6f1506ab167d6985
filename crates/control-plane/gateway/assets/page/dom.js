// What all the others are made of: elements, numbers in words, and looking again.

export const $ = (id) => document.getElementById(id);

/** Builds an element. Strings become text nodes: nothing on this page is ever parsed as HTML. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function svg(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A name in its own writing direction, so that no name can rearrange what stands beside it. */
export const named = (text) => el('bdi', {}, String(text));
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? '' : 's'}`;
/** As many digits of a content hash as `holobiont ps` shows. */
export const short = (generation) => String(generation).slice(0, 12);
export const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

export function number(value) {
  if (!isNumber(value)) return '–';
  const digits = Math.abs(value) < 10 && !Number.isInteger(value) ? 1 : 0;
  return value.toLocaleString('en', { maximumFractionDigits: digits });
}

export function bytes(value) {
  if (!isNumber(value)) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  // What would be rounded to 1,024 is one of the next.
  for (; value >= 1023.5 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value.toLocaleString('en', { maximumFractionDigits: value < 10 && unit > 0 ? 1 : 0 })} ${units[unit]}`;
}

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

export function uptime(seconds) {
  if (!isNumber(seconds)) return '–';
  const [days, hours, minutes] = [86400, 3600, 60].map((unit) => Math.floor(seconds / unit));
  if (days > 0) return `${days} d ${hours % 24} h`;
  if (hours > 0) return `${hours} h ${minutes % 60} min`;
  return minutes > 0 ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

/** Calls `work` now, and again `period()` ms after each end, but only while the page is seen. */
export function poll(work, period) {
  let timer = 0, running = false;
  const turn = async () => {
    clearTimeout(timer);
    if (running || document.hidden) return;
    running = true;
    await work();
    running = false;
    const wait = period();
    if (wait !== null) timer = setTimeout(turn, wait);
  };
  document.addEventListener('visibilitychange', turn);
  return turn;
}


/** Written only when it changes: a live region is read out at every write. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes `nodes` the children of `parent`, moving as few as may be: what is moved loses the focus. */
export function arrange(parent, nodes) {
  const wanted = new Set(nodes);
  [...parent.children].filter((node) => !wanted.has(node)).forEach((node) => node.remove());
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}
