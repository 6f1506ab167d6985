// Failures in words.

import { el, named } from './dom.js';

/** What happened and what to do, by error code; the server's own message, between them, says why. */
const WORDS = {
  unreachable: ['The server does not answer', 'Check that it runs ("holobiont up"), then try again.'],
  not_holobiont: ['Something else answered', 'Check what stands between this page and Holobiont: a proxy, perhaps.'],
  broken_stream: ['The answer broke off', 'What is above may be incomplete. The same seed gives the same text again.'],
  model_not_found: ['This model is gone', "It was unloaded, or is another tenant's. Pick another above."],
  adapter_unavailable: ['This adapter cannot be used', 'Its operator has to load it again; Residency says more.'],
  invalid_api_key: ['The key was not accepted', 'Enter a valid key above, then try again.'],
  insufficient_permissions: ['This key may not do that', 'Ask the operator for a key of another role.'],
  rate_limit_exceeded: ['Too many requests', 'Wait until the limit allows more.'],
  queue_full: ['The server is full', 'Others are being answered. Try again in a moment.'],
  context_length_exceeded: ['The conversation is too long', 'Start a new one, or ask for fewer tokens.'],
  executor_unavailable: ['The model is not there', 'It is restarted by itself; try again when it is ready.'],
  deadline_exceeded: ['It took too long', 'Try again, or ask for fewer tokens.'],
  registry_unavailable: ['The registry cannot be read', 'The operator finds the cause in the log of the gateway.'],
  adapter_already_loaded: ['This name is taken', 'Choose another name, or replace what has it.'],
  adapter_path_forbidden: ['This path leads elsewhere', 'Copy the adapter below the adapter root of the server.'],
  invalid_adapter: ['There is no adapter that can be used', 'It is the two files that PEFT wrote, or a .gguf file.'],
  adapter_limit_exceeded: ['There are as many adapters as may be', 'Remove one, then try again.'],
  adapter_budget_exceeded: ['There is no room for it', 'Unpin or remove another, or give adapters more memory.'],
  generation_mismatch: ['It has been replaced meanwhile', 'Look at what is there now, then decide again.'],
  lora_load_busy: ['Others are being loaded', 'Try again in a moment.'],
  internal_error: ['The server made a mistake', 'Try again; if it stays, report the request number.'],
};

function words(failure) {
  if (WORDS[failure.code]) return WORDS[failure.code];
  if (failure.status === 404) return WORDS.model_not_found;
  if (failure.status === 429) return WORDS.queue_full;
  if (failure.status >= 500) return WORDS.internal_error;
  return ['The server refused this', 'Change what it names, then try again.'];
}

/** A notice: what happened, why, what to do; with `retry`, a button that waits as long as the server asked for. */
export function notice(failure, retry) {
  const [title, next] = words(failure);
  const { status, code, requestId } = failure;
  const facts = [status && `HTTP ${status}`, code, requestId && `request ${requestId}`];
  return el('div', { class: 'notice', role: 'alert' },
    el('p', {}, el('strong', {}, `${title}. `), named(sentence(failure.message))),
    el('p', {}, next),
    el('p', { class: 'soft small mono' }, facts.filter(Boolean).join(' · ')),
    retry && retryButton(failure.retryAfterS, retry));
}

function sentence(text) {
  const trimmed = text.trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? '' : '.');
}

function retryButton(seconds, retry) {
  const button = el('button', { class: 'button', type: 'button', onclick: retry }, 'Try again');
  const tick = () => {
    button.disabled = seconds > 0;
    button.textContent = seconds > 0 ? `Try again in ${seconds} s` : 'Try again';
    seconds -= 1;
    if (seconds >= 0) setTimeout(tick, 1000);
  };
  tick();
  return button;
}

