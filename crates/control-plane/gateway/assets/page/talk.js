// Conversations: what is asked and answered, in one column or two.

import { $, el } from './dom.js';
import { Answer, TURN } from './answer.js';
import { Picker, loadModels, models } from './models.js';
import { notice } from './notices.js';
import { settings, settingsHold } from './settings.js';
import { onView, view } from './view.js';

const EXAMPLES = ['What is the capital of France?', 'What is the sea?', 'How do I make tea?'];

/** Turns with one answer for each column: one column is a chat, two are a comparison. */
class Conversation {
  constructor(root, labels, choices) {
    this.root = root;
    this.columns = labels.map((label, index) => new Picker(label, choices[index]));
    this.inner = el('div', { class: 'inner' });
    this.log = el('div', { class: 'log', role: 'log', 'aria-live': 'off', 'aria-label': 'Conversation', tabindex: '0' },
      this.inner);
    root.append(el('div', { class: 'inner pickers' }, ...this.columns.map((picker) => picker.root)), this.log);
    this.clear();
  }

  clear() {
    this.stop();
    this.turns = [];
    const examples = EXAMPLES.map((text) => (
      el('button', { class: 'button', type: 'button', onclick: () => { $('prompt').value = text; send(); } }, text)));
    const title = this.columns.length > 1 ? 'One question, two answers' : 'Ask the base model, or any adapter';
    const below = this.columns.length > 1 ? 'Both get the same words, settings and seed.'
      : 'Pick one above. You can change it between two messages.';
    this.inner.replaceChildren(el('div', { class: 'welcome' }, el('h2', {}, title), el('p', { class: 'soft' }, below),
      el('div', {}, ...examples)));
  }

  get answers() { return this.turns.flat(); }

  get isRunning() { return this.answers.some((answer) => answer.state === 'running'); }

  stop() {
    this.turns?.flat().forEach((answer) => answer.aborter?.abort());
  }

  send(options) {
    if (this.turns.length === 0) this.inner.replaceChildren();
    const at = this.turns.length;
    const turn = this.columns.map((picker, column) => {
      const answer = new Answer(picker.value, options, () => this.earlier(at, column));
      answer.picker = picker;
      return answer;
    });
    this.turns.push(turn);
    const section = el('section', {}, el('p', { class: 'question' }, options.question),
      el('div', { class: 'answers' }, ...turn.map((answer) => answer.node)));
    this.inner.append(section);
    turn.forEach((answer) => answer.run());
    section.scrollIntoView({ block: this.columns.length > 1 ? 'start' : 'end' });
  }

  /** What was asked and said in a column before turn `at`. */
  earlier(at, column) {
    const answers = this.turns.slice(0, at).map((turn) => turn[column]);
    return answers.filter((answer) => answer.said).map((answer) => [answer.options.question, answer.said]);
  }
}

const firstAdapter = (all) => all.find((model) => !model.base) ?? all[0];
const conversations = {
  chat: new Conversation($('chat'), ['Model'], [(all) => all[0]]),
  compare: new Conversation($('compare'), ['Model A', 'Model B'], [(all) => all[0], firstAdapter]),
};

const talk = () => conversations[view()];

/** Shows Stop instead of Send for as long as something is said. */
function showComposer() {
  const running = Boolean(talk()?.isRunning);
  const focused = document.activeElement === $('stop') || document.activeElement === $('send');
  $('send').hidden = running;
  $('stop').hidden = !running;
  // A button that vanishes takes the focus with it.
  if (focused) (running ? $('stop') : $('prompt')).focus();
}

function send() {
  const conversation = talk();
  const question = $('prompt').value.trim();
  if (!conversation || question === '' || conversation.isRunning || !settingsHold()) return;
  if (conversation.columns.some((picker) => picker.value === null)) {
    const again = () => { conversation.clear(); send(); };
    loadModels().then(() => { if (models.length > 0) send(); },
      (failure) => conversation.inner.replaceChildren(notice(failure, again)));
    return;
  }
  $('prompt').value = '';
  conversation.send({ question, ...settings() });
}

const stop = () => talk()?.stop();

$('composer').addEventListener('submit', (event) => { event.preventDefault(); send(); });
$('stop').addEventListener('click', stop);
$('fresh').addEventListener('click', () => { talk()?.clear(); showComposer(); $('prompt').focus(); });
$('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener('keydown', (event) => {
  // In a dialog it closes that.
  if (event.key === 'Escape' && !document.querySelector('dialog[open]')) stop();
});
$('markdown').addEventListener('change', () => {
  Object.values(conversations).flatMap(({ answers }) => answers).forEach((answer) => answer.renew());
});
document.addEventListener(TURN, showComposer);
Object.keys(conversations).forEach((name) => onView(name, showComposer));
