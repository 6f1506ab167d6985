// One answer of one model: asks, shows what comes, and says how it ended.

import { $, duration, el, isNumber, named, number, plural, setText, short } from './dom.js';
import { Failure, request } from './api.js';
import { copy } from './clipboard.js';
import { CHAT, showCurl } from './curl.js';
import { Markdown, Plain } from './markdown.js';
import { loadModels } from './models.js';
import { notice } from './notices.js';
import { anySeed } from './settings.js';
import { pollStatus } from './status.js';
import { chunks } from './stream.js';

/** What is said on an answer, and heard above it, when it begins and when it ends. */
export const TURN = 'turn';

export class Answer {
  constructor(model, options, earlier) {
    Object.assign(this, { model, options, earlier, text: '', state: 'idle' });
    this.node = el('article', { class: 'answer' });
  }

  /** What a later request repeats of this answer; a failed one never happened. */
  get said() { return this.state === 'ended' || this.state === 'stopped' ? this.text : ''; }

  async run() {
    Object.assign(this, { text: '', thought: '', drafted: '', state: 'running', finish: null, usage: null });
    Object.assign(this, { generation: null, firstAt: 0, unsaid: '', spoke: false, willPaint: false });
    this.aborter = new AbortController();
    this.body = el('div', { class: 'text' });
    this.guess = el('span', { class: 'soft' });
    this.thinking = el('summary', {}, 'Thinking …');
    this.thoughts = el('div');
    this.thoughts.shown = new Plain(this.thoughts);
    this.aside = el('details', { class: 'thoughts', hidden: true }, this.thinking, this.thoughts);
    this.node.replaceChildren(el('h3', {}, named(this.model)), this.aside, this.body);
    this.node.setAttribute('aria-busy', 'true');
    this.renew();
    this.tell();
    this.startedAt = performance.now();
    try {
      await this.read();
      this.state = 'ended';
    } catch (error) {
      this.state = error.name === 'AbortError' ? 'stopped' : 'failed';
      this.failure = error;
    }
    this.node.removeAttribute('aria-busy');
    this.show();
    this.tell();
  }

  tell() { this.node.dispatchEvent(new Event(TURN, { bubbles: true })); }

  async read() {
    const { system, question, sampling, seed } = this.options;
    const messages = [
      ...(system ? [{ role: 'system', content: system }] : []),
      ...this.earlier().flatMap(([asked, said]) => (
        [{ role: 'user', content: asked }, { role: 'assistant', content: said }])),
      { role: 'user', content: question },
    ];
    this.asked = { model: this.model, messages, ...sampling, seed, stream: true,
      stream_options: { include_usage: true, provisional: true } };
    const response = await request(CHAT, { body: this.asked, signal: this.aborter.signal });
    for await (const chunk of chunks(response)) this.take(chunk);
    if (!this.finish) throw new Failure('the stream ended without a finish reason', { code: 'broken_stream' });
  }

  take(chunk) {
    this.generation = chunk.adapter_generation ?? this.generation;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    this.finish = choice?.finish_reason ?? this.finish;
    const { content: text, reasoning_content: thought } = choice?.delta ?? {};
    this.foresee(choice, text);
    const has = (said) => typeof said === 'string' && said !== '';
    if (has(text) || has(thought)) {
      this.lastAt = performance.now();
      this.firstAt ||= this.lastAt;
    }
    if (has(thought)) this.thought += thought;
    if (has(text)) {
      if (this.text === '' && this.thought !== '') this.thoughtFor();
      this.text += text;
      this.speak(text);
    }
    this.paintSoon();
  }

  /** Says how long it took to think. */
  thoughtFor() { setText(this.thinking, `Thought for ${duration(performance.now() - this.firstAt)}`); }

  /** What is drafted stands dimmed behind the text, until it is taken back or text takes its place. */
  foresee(choice, text) {
    const { retract, provisional } = choice ?? {};
    if (!retract && !provisional && !text) return;
    const left = text ? [] : [...this.drafted].slice(0, retract ? -retract.characters : undefined);
    this.drafted = left.join('') + (provisional?.text ?? '');
  }

  /** Tokens may come faster than pictures. */
  paintSoon() {
    if (this.willPaint) return;
    this.willPaint = true;
    requestAnimationFrame(() => { if (this.willPaint) this.paint(); });
  }

  paint() {
    this.willPaint = false;
    const settle = this.settler();
    this.aside.hidden = this.thought === '';
    this.thoughts.shown.show(this.thought);
    this.shown.show(this.text);
    setText(this.guess, this.drafted);
    if (this.drafted === '') this.guess.remove();
    else {
      // The end may be inside the draft text that is already shown.
      this.guess.remove();
      this.shown.end.append(this.guess);
    }
    settle();
  }

  /** Shows the text anew, as Markdown or as it was written. */
  renew() {
    const isMarkdown = $('markdown').checked;
    this.body.replaceChildren();
    this.body.classList.toggle('plain', !isMarkdown);
    this.shown = isMarkdown ? new Markdown(this.body) : new Plain(this.body);
    this.paint();
  }

  /** A function that scrolls to the end again if the end is what is looked at. Side by side is read from the top. */
  settler() {
    const log = this.node.closest('#chat .log');
    const follows = log && log.scrollHeight - log.scrollTop - log.clientHeight < 48;
    return () => { if (follows) log.scrollTop = log.scrollHeight; };
  }

  /** Whole sentences for those who listen: token by token, a screen reader would stammer. */
  speak(text) {
    this.unsaid += text;
    const end = this.state === 'running' ? /^[\s\S]*[.!?\n]/.exec(this.unsaid)?.[0].length ?? 0 : this.unsaid.length;
    const whole = this.unsaid.slice(0, end).trim();
    this.unsaid = this.unsaid.slice(end);
    if (!whole) return;
    $('spoken').textContent = this.spoke ? whole : `${this.model}: ${whole}`;
    this.spoke = true;
  }

  show() {
    this.drafted = '';
    if (this.text === '') this.thoughtFor();
    this.paint();
    this.speak('');
    const settle = this.settler();
    if (this.state === 'failed') {
      this.node.append(notice(this.failure, () => this.again()));
      if (this.failure.status === 404) loadModels().catch(() => {});
      if (!this.failure.status || this.failure.status === 503) pollStatus();
    } else {
      if (this.text === '') this.node.append(el('p', { class: 'soft' }, '(nothing was said)'));
      this.node.append(el('ul', { class: 'facts' }, ...this.facts()), this.buttons());
    }
    settle();
  }

  facts() {
    const tokens = this.usage?.completion_tokens;
    const spentMs = this.lastAt - this.firstAt;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const stopped = this.state === 'stopped';
    return [
      ['finish', stopped ? 'stopped by you' : this.finish === 'length' ? 'length: the token limit' : this.finish],
      this.generation ? ['generation', `gen ${short(this.generation)}`, this.generation] : null,
      isNumber(tokens) ? ['tokens', plural(tokens, 'token')] : null,
      this.firstAt ? ['first', `first after ${duration(this.firstAt - this.startedAt)}`] : null,
      tokens > 1 && spentMs > 0 ? ['speed', `${number((tokens - 1) * 1000 / spentMs)} tokens/s`] : null,
      isNumber(tokens) ? ['prompt', `prompt ${number(this.usage.prompt_tokens)}`
        + (cached > 0 ? `, ${number(cached)} cached` : '')] : null,
      ['seed', `seed ${this.options.seed}`],
    ].filter(Boolean).map(([fact, what, title]) => (
      el('li', { 'data-fact': fact, title, class: fact === 'generation' ? 'mono' : null }, what)));
  }

  buttons() {
    const button = (name, title, onclick) => el('button', { class: 'quiet', type: 'button', title, onclick }, name);
    const copying = button('copy', 'Copy what was said, as it was written',
      () => copy(this.text, this.body, copying, 'copy'));
    return el('p', { class: 'acts' }, copying,
      button('again', 'Ask again, with another seed', () => this.again(anySeed())),
      button('as curl', 'The same request for a terminal', () => showCurl(this.asked)));
  }

  /** Asks the same once more: with the same seed, unless there is another. */
  async again(seed = this.options.seed) {
    if (this.state === 'running') return;
    this.options = { ...this.options, seed };
    // The adapter may be gone: what is picked now is what is asked.
    this.model = this.picker?.value ?? this.model;
    const run = this.run();
    // The button that asked is gone, and would take the focus with it.
    $('stop').focus();
    await run;
  }
}
