// The page at `/`: what is shown first, and what every view has.

import { $ } from './dom.js';
import './key.js';
import './residency.js';
import './talk.js';
import './training.js';
import { pollStatus } from './status.js';
import { isTalk, showView } from './view.js';

const toContent = () => (isTalk() ? $('prompt') : $('main')).focus();

addEventListener('hashchange', showView);
$('skip').addEventListener('click', toContent);
showView();
pollStatus();
// On a phone, the focus would bring up the keyboard.
if (!matchMedia('(pointer: coarse)').matches && isTalk()) $('prompt').focus({ preventScroll: true });
