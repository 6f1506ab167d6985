// Markdown, made into elements. What a model writes is never parsed as HTML: every piece of it enters as a text node,
// and the only attribute that is made of it is the address of a link, which leads to http or https or is no link.
//
// The common part of CommonMark, with GitHub's tables and strikethrough; a line's end is one. Pictures become links:
// nothing is fetched because an answer says so.

import { el } from './dom.js';
import { copy } from './clipboard.js';

/** How deep quotes and lists may be in one another; deeper ones stay text. */
const MAX_DEPTH = 6;

// --- Within a line --------------------------------------------------------------------------------------------------

// Spans are bounded, so that what never ends costs little.
const INLINE = new RegExp([
  /(?<!`)(?<fence>`{1,8})(?<code>[^`\n](?:[^\n]{0,600}?[^`\n])?)\k<fence>(?!`)/,
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /\*\*\*(?![\s*])(?<both>[^*\n]{1,400}?)(?<!\s)\*\*\*(?!\*)/,
  /\*\*(?!\s)(?<strong>(?:[^*\n]|\*(?!\*)){1,800}?)(?<!\s)\*\*(?!\*)/,
  /(?<![\p{L}\p{N}_])__(?!\s)(?<strong2>[^\n]{1,800}?)(?<!\s)__(?![\p{L}\p{N}_])/,
  /\*(?![\s*])(?<em>(?:[^*\n]|\*\*){1,400}?)(?<!\s)\*(?!\*)/,
  /(?<![\p{L}\p{N}_])_(?![\s_])(?<em2>[^_\n]{1,400}?)(?<!\s)_(?![\p{L}\p{N}_])/,
  /~~(?!\s)(?<gone>[^~\n]{1,400}?)~~/,
  /!?\[(?<label>[^[\]\n]{0,400})\]\(<?(?<target>[^\s()<>]{1,600}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200})?)>?(?: "[^"\n]{0,200}")?\)/,
  /<?(?<bare>https?:\/\/[^\s<>"'`|()\]]{1,600}[^\s<>"'`|()\].,;:!?*_~])>?/,
].map(({ source }) => source).join('|'), 'gu');

/** The nodes of a text without blocks in it. */
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > end) nodes.push(text.slice(end, found.index));
    nodes.push(spanOf(found.groups, found[0], depth + 1));
    end = found.index + found[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function spanOf({ code, escaped, both, strong, strong2, em, em2, gone, label, target, bare }, whole, depth) {
  if (code !== undefined) return el('code', {}, code);
  if (escaped !== undefined) return escaped;
  if (both !== undefined) return el('strong', {}, el('em', {}, ...inline(both, depth)));
  if (strong ?? strong2) return el('strong', {}, ...inline(strong ?? strong2, depth));
  if (em ?? em2) return el('em', {}, ...inline(em ?? em2, depth));
  if (gone !== undefined) return el('del', {}, ...inline(gone, depth));
  if (bare !== undefined) return link(bare, [bare]) ?? whole;
  return link(target, label.trim() === '' ? [target] : inline(label, depth)) ?? whole;
}

/** A link that leads where it says, or null if that is no place on the web. */
function link(target, children) {
  const url = /^https?:\/\//i.test(target) && URL.canParse(target) ? new URL(target) : null;
  if (url === null || !['http:', 'https:'].includes(url.protocol)) return null;
  return el('a', { href: url.href, title: url.href, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...children);
}

// --- Blocks ---------------------------------------------------------------------------------------------------------

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const DIVIDER = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;

/** The blocks of `text`, each as `{ kind, lines }`: the text's own lines, none of which is lost but empty ones. */
function blocks(text) {
  const lines = text.split('\n');
  const found = [];
  for (let at = 0; at < lines.length;) {
    const kind = kindOf(lines, at);
    const end = kind === 'empty' ? at + 1 : endOf(kind, lines, at);
    if (kind !== 'empty') found.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return found;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (line.trim() === '') return 'empty';
  if (FENCE.test(line)) return 'code';
  if (HEADING.test(line)) return 'heading';
  if (RULE.test(line)) return 'rule';
  if (QUOTE.test(line)) return 'quote';
  if (ITEM.test(line)) return 'list';
  if (line.includes('|') && DIVIDER.test((lines[at + 1] ?? '').trim())) return 'table';
  return 'paragraph';
}

/** The line behind the block that begins at `at`. */
function endOf(kind, lines, at) {
  const until = (isEnd, from = at + 1) => {
    let end = from;
    while (end < lines.length && !isEnd(lines[end], end)) end += 1;
    return end;
  };
  if (kind === 'code') {
    const [, fence] = FENCE.exec(lines[at]);
    const closing = until((line) => line.trim().startsWith(fence) && /^ {0,3}(`+|~+)\s*$/.test(line));
    return Math.min(lines.length, closing + 1);
  }
  if (kind === 'heading' || kind === 'rule') return at + 1;
  if (kind === 'quote') return until((line) => !QUOTE.test(line));
  if (kind === 'table') return until((line) => !line.includes('|'), at + 2);
  if (kind === 'list') return endOfList(lines, at);
  return until((line, index) => kindOf(lines, index) !== 'paragraph');
}

/** A list goes on as long as lines are its items or indented; an empty line ends it unless one of these follows. */
function endOfList(lines, at) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const belongs = (index) => {
    const item = ITEM.exec(lines[index]);
    if (item && item[1].length <= indent.length) return /\d/.test(item[2]) === ordered && !RULE.test(lines[index]);
    return item !== null || lines[index].startsWith(`${indent}  `);
  };
  let end = at + 1;
  for (let index = at + 1; index < lines.length; index += 1) {
    const isEmpty = lines[index].trim() === '';
    const goesOn = lines[index - 1].trim() !== '' && kindOf(lines, index) === 'paragraph';
    if (isEmpty) continue;
    if (!belongs(index) && !goesOn) break;
    end = index + 1;
  }
  return end;
}

const MAKERS = {
  code: ([first, ...rest]) => {
    const [, fence, language] = FENCE.exec(first);
    const closed = rest.length > 0 && rest.at(-1).trim().startsWith(fence) && /^\s*(`+|~+)\s*$/.test(rest.at(-1));
    const code = el('code', {}, (closed ? rest.slice(0, -1) : rest).join('\n'));
    const button = el('button', { class: 'quiet small', type: 'button',
      onclick: () => copy(code.textContent, code, button) }, 'copy');
    return el('div', { class: 'code' }, el('div', { class: 'over' }, el('span', { class: 'soft small' }, language.trim()),
      button), el('pre', { tabindex: '0' }, code));
  },
  heading: ([line]) => {
    const [, marks, text] = HEADING.exec(line);
    // Below the names of the models, which are headings of the third level.
    return el(`h${Math.min(6, marks.length + 3)}`, {}, ...inline(text.trim().replace(/(?:^|\s)#+$/, '')));
  },
  rule: () => el('hr'),
  quote: (lines, depth) => el('blockquote', {}, ...nodesOf(lines.map((line) => line.replace(QUOTE, '')).join('\n'), depth)),
  list,
  table: ([head, divider, ...rest]) => {
    const sides = cells(divider).map((cell) => (/^:?-+:$/.test(cell) ? 'number' : null));
    const row = (line, tag) => {
      const found = cells(line);
      return el('tr', {}, ...sides.map((side, index) => el(tag, { class: side }, ...inline(found[index] ?? ''))));
    };
    return el('div', { class: 'scroll', tabindex: '0' }, el('table', {}, el('thead', {}, row(head, 'th')),
      el('tbody', {}, ...rest.map((line) => row(line, 'td')))));
  },
  paragraph: (lines) => el('p', {}, ...inline(lines.map((line) => line.trimEnd()).join('\n'))),
};

const cells = (line) => line.trim().replace(/^\|/, '').replace(/(?<!\\)\|$/, '').split(/(?<!\\)\|/).map((cell) => cell.trim());

function list(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) items.push([item[4]]);
    // What is behind the marker belongs to the item, less what indents it.
    else items.at(-1).push(line.replace(new RegExp(`^ {0,${indent.length + marker.length + 1}}`), ''));
  }
  const start = /\d/.test(marker) ? { start: String(Number.parseInt(marker, 10)) } : {};
  return el(/\d/.test(marker) ? 'ol' : 'ul', start, ...items.map((item) => el('li', {}, ...contents(item.join('\n'), depth))));
}

/** What stands in an item: a lone paragraph without being one. */
function contents(text, depth) {
  const nodes = nodesOf(text, depth);
  return nodes[0]?.tagName === 'P' ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function nodesOf(text, depth) {
  return depth >= MAX_DEPTH ? [text] : blocks(text).map(({ kind, lines }) => MAKERS[kind](lines, depth + 1));
}

/** A text that grows, shown in `node`: of its blocks, only those are made anew that have changed. */
export class Markdown {
  constructor(node) {
    Object.assign(this, { node, sources: [] });
  }

  show(text) {
    const found = blocks(text);
    const sources = found.map(({ kind, lines }) => `${kind}\n${lines.join('\n')}`);
    const same = sources.findIndex((source, index) => source !== this.sources[index]);
    const from = same < 0 ? sources.length : same;
    while (this.node.childNodes.length > from) this.node.lastChild.remove();
    this.node.append(...found.slice(from).map(({ kind, lines }) => MAKERS[kind](lines, 0)));
    this.sources = sources;
  }

  /** Where what comes next would stand. */
  get end() {
    let end = this.node;
    while (end.lastElementChild && !['CODE', 'A', 'HR', 'STRONG', 'EM', 'DEL', 'TABLE'].includes(end.lastElementChild.tagName)) {
      end = end.lastElementChild;
    }
    return end;
  }
}

/** The same shown as it was written. */
export class Plain {
  constructor(node) {
    this.text = document.createTextNode('');
    node.append(this.text);
    this.end = node;
  }

  show(text) {
    // What is there already stays: somebody may have marked it.
    if (text.startsWith(this.text.data)) this.text.appendData(text.slice(this.text.length));
    else this.text.data = text;
  }
}
