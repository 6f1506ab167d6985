// What is trained.

import { $, arrange, el, isNumber, number, poll, uptime } from './dom.js';
import { get, request } from './api.js';
import { notice } from './notices.js';
import { Plot } from './plot.js';
import { canLook, onView, view } from './view.js';

const PERIOD_MS = 2000;
/** Most jobs that are shown, the newest first. */
const MAX_JOBS = 20;
/** Most pages of events that are read at once: a job has about a thousand events at most. */
const MAX_EVENT_PAGES = 12;
const ENDED = ['succeeded', 'failed', 'cancelled'];
const JOB_DOTS = { succeeded: 'ready', failed: 'lost', cancelled: 'lost', paused: 'unknown' };

/** A job with the curves of its losses. */
class Job {
  constructor(id) {
    Object.assign(this, { id, train: new Map(), valid: new Map(), newest: null, complete: false });
    this.name = el('bdi');
    this.state = el('span', { class: 'state small' }, el('span', { class: 'dot' }), el('span'));
    this.plot = new Plot('Loss by step', [{ key: 'train', label: 'learned' }, { key: 'valid', label: 'held out' }],
      { format: (loss) => (isNumber(loss) ? loss.toPrecision(3) : '–'), least: 1e-9 });
    this.text = el('p', { class: 'small' });
    this.buttons = ['pause', 'resume', 'cancel'].map((what) => el('button', { class: 'quiet small', type: 'button',
      onclick: () => this.ask(what) }, what[0].toUpperCase() + what.slice(1)));
    this.failure = el('div');
    this.node = el('article', { class: 'job' }, el('h3', {}, this.name, this.state, ...this.buttons), this.plot.node,
      this.text, this.failure);
  }

  async ask(what) {
    try {
      await request(`v1/fine_tuning/jobs/${encodeURIComponent(this.id)}/${what}`, { body: {} });
      this.failure.replaceChildren();
    } catch (failure) {
      this.failure.replaceChildren(notice(failure));
    }
    pollTraining();
  }

  /** Reads the events that have come since the last time. */
  async read(job) {
    if (this.complete) return;
    let [after, newest] = ['', null];
    for (let page = 0; page < MAX_EVENT_PAGES; page += 1) {
      const found = await get(`v1/fine_tuning/jobs/${encodeURIComponent(this.id)}/events?limit=100`
        + (after && `&after=${encodeURIComponent(after)}`));
      const events = Array.isArray(found.data) ? found.data : [];
      newest ??= events[0]?.id;
      const known = events.findIndex((event) => event.id === this.newest);
      for (const { data } of known < 0 ? events : events.slice(0, known)) {
        if (isNumber(data?.train_loss)) this.train.set(data.step, data.train_loss);
        if (isNumber(data?.valid_loss)) this.valid.set(data.step, data.valid_loss);
      }
      if (known >= 0 || !found.has_more) break;
      after = found.last_id;
    }
    this.newest = newest ?? this.newest;
    this.complete = ENDED.includes(job.status);
  }

  show(job) {
    this.name.textContent = job.fine_tuned_model ?? job.user_provided_suffix ?? job.id;
    this.name.title = job.id;
    this.state.dataset.state = JOB_DOTS[job.status] ?? 'loading';
    this.state.lastChild.textContent = String(job.status).replaceAll('_', ' ');
    const [pause, resume, cancel] = this.buttons;
    pause.hidden = ENDED.includes(job.status) || job.status === 'paused';
    resume.hidden = job.status !== 'paused';
    cancel.hidden = ENDED.includes(job.status);
    this.draw(job.plan?.steps);
    const last = (points) => [...points].reduce((a, b) => (b[0] > (a?.[0] ?? -1) ? b : a), null)?.[1];
    const [loss, held] = [last(this.train), last(this.valid)];
    const left = isNumber(job.estimated_finish) && !ENDED.includes(job.status)
      ? Math.max(0, job.estimated_finish - Date.now() / 1000) : null;
    this.text.textContent = [
      job.plan ? `step ${number(job.step)} of ${number(job.plan.steps)}` : 'not begun yet',
      isNumber(loss) && `loss ${loss.toPrecision(3)}`,
      isNumber(held) && `held out ${held.toPrecision(3)}`,
      left !== null && job.status === 'running' && `about ${uptime(left < 60 ? left : left + 30)} left`,
      job.error?.message,
    ].filter(Boolean).join(' · ');
  }

  draw(steps) {
    const all = [...this.train.keys(), ...this.valid.keys()];
    const last = Math.max(2, steps ?? 0, ...all);
    const points = [...new Set(all)].sort((a, b) => a - b)
      .map((step) => ({ at: step, values: { train: this.train.get(step), valid: this.valid.get(step) } }));
    this.plot.show(points, { from: 1, to: last, ends: ['step 1', `step ${number(last)}`] });
  }
}

const jobs = new Map();
let trainingFailure = null;

const pollTraining = poll(async () => {
  if (!canLook('training')) return;
  let found = null;
  try {
    found = await get(`v1/fine_tuning/jobs?limit=${MAX_JOBS}`);
    const listed = Array.isArray(found.data) ? found.data : [];
    for (const job of listed) {
      if (!jobs.has(job.id)) jobs.set(job.id, new Job(job.id));
      await jobs.get(job.id).read(job);
      jobs.get(job.id).show(job);
    }
    arrange($('jobs'), listed.map((job) => jobs.get(job.id).node));
    $('jobs-rest').textContent = listed.length === 0
      ? 'None yet. Create one with OpenAI\'s client or POST /v1/fine_tuning/jobs.'
      : found.has_more ? 'Older jobs are at /v1/fine_tuning/jobs.' : '';
    $('training-note').replaceChildren();
    trainingFailure = null;
  } catch (failure) {
    if (failure.message !== trainingFailure?.message) $('training-note').replaceChildren(notice(failure));
    trainingFailure = failure;
  }
}, () => (view() === 'training' && ![401, 403].includes(trainingFailure?.status) ? PERIOD_MS : null));

onView('training', pollTraining);
