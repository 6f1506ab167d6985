// Copying text out of the page.

import { setText } from './dom.js';

const TOLD_MS = 2000;

/** Copies the text `node` stands for, and says on `button` for a moment what came of it. */
export async function copy(text, node, button, before = button.textContent) {
  const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  // Without HTTPS and away from loopback there is no clipboard: what is selected can be copied by hand.
  if (!copied) getSelection().selectAllChildren(node);
  setText(button, copied ? 'copied' : 'selected: copy it');
  setTimeout(() => setText(button, before), TOLD_MS);
}
