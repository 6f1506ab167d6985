// Which of the views is shown: the one that the address names.

import { $ } from './dom.js';

const VIEWS = { chat: 'Chat', compare: 'Compare', residency: 'Residency', training: 'Training' };

let shown = '';
const listeners = [];

/** The id of the view that is shown. */
export const view = () => shown;
/** Whether something can be said in it. */
export const isTalk = () => shown === 'chat' || shown === 'compare';
/** Whether `name` is what is looked at, and nothing has to be entered first. */
export const canLook = (name) => shown === name && $('key').hidden;

/** Calls `look` whenever there is a reason to look at the view `name` anew: it is shown, or there is another key. */
export function onView(name, look) {
  listeners.push({ name, look });
}

/** Lets those look again whose view is shown. */
export function lookAgain() {
  listeners.filter(({ name }) => name === shown).forEach(({ look }) => look());
}

/** Shows what the address names. */
export function showView() {
  // Not an element's id: the browser would scroll to it and take the focus there.
  const wanted = location.hash.slice(2);
  shown = Object.hasOwn(VIEWS, wanted) ? wanted : 'chat';
  document.title = `${VIEWS[shown]} · Holobiont`;
  document.querySelectorAll('.view').forEach((section) => { section.hidden = section.id !== shown; });
  document.querySelectorAll('nav a').forEach((link) => {
    if (link.hash === `#/${shown}`) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  });
  $('composer').hidden = !isTalk();
  lookAgain();
}
