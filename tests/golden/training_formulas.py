"""The part of `make_training.py` that needs no model: the optimizer, the schedules and the losses by themselves."""

import torch
from make_golden import short
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

# --- Optimizer and schedules -------------------------------------------------------------------------------------

SCHEDULERS = {
    "constant": lambda optimizer, warmup, _: get_constant_schedule_with_warmup(optimizer, warmup),
    "linear": get_linear_schedule_with_warmup,
    "cosine": get_cosine_schedule_with_warmup,
}
OPTIMIZERS = [
    {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 0.0001, "betas": [0.9, 0.95], "eps": 1e-12, "weight_decay": 0.0},
]
OPTIMIZER_STEPS = 100
SHOWN_STEPS = (1, 2, 10, 100)


def random_gradients(generator):
    """Gradients of three tensors: ordinary ones, some of which are 0; large ones; and ones from above to below eps."""

    def normal(count):
        return torch.randn(count, generator=generator)

    def gradients():
        ordinary = normal(4) * (torch.rand(4, generator=generator) < 0.8)
        return [ordinary, normal(3) * torch.tensor([1e2, 1e4, 1e6]), normal(3) * torch.tensor([1e-6, 1e-8, 1e-10])]

    return [gradients() for _ in range(OPTIMIZER_STEPS)]


def values_after(start, gradients, hyperparameters):
    """The tensors after some of the steps of AdamW, in f32."""
    tensors = [torch.nn.Parameter(t.clone()) for t in start]
    optimizer = torch.optim.AdamW(tensors, **hyperparameters)
    after = {}
    for step, gradient in enumerate(gradients, 1):
        for tensor, its_gradient in zip(tensors, gradient):
            tensor.grad = its_gradient
        optimizer.step()
        if step in SHOWN_STEPS:
            after[str(step)] = [short(t.detach()) for t in tensors]
    return after


def optimizer_golden():
    """AdamW on the same gradients with different hyperparameters."""
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(n, generator=generator) for n in (4, 3, 3)]
    gradients = random_gradients(generator)
    return {
        "start": [short(t) for t in start],
        "cases": [{"hyperparameters": h, "after": values_after(start, gradients, h)} for h in OPTIMIZERS],
        "gradients": [[short(t) for t in step] for step in gradients],
    }


def multipliers(name, warmup_steps, total_steps):
    """What each step's learning rate is multiplied by."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = SCHEDULERS[name](optimizer, warmup_steps, total_steps)
    values = []
    for _ in range(total_steps):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


def schedules_golden():
    """Every schedule over 20 steps, with warm-up and without."""
    cases = [{"schedule": s, "warmup_steps": w, "total_steps": 20} for s in SCHEDULERS for w in (0, 5)]
    return [{**c, "multipliers": multipliers(*c.values())} for c in cases]


# --- Losses over log-probabilities -------------------------------------------------------------------------------
#
# p is the policy that learns, q the one that sampled, A the advantage; all per token, all losses summed over tokens.


def cross_entropy(p, weights):
    """-w log p"""
    return -(weights * p).sum()


def importance_sampling(p, q, advantages):
    """-p/q A"""
    return -((p - q).exp() * advantages).sum()


def ppo(p, q, advantages, clip_low_threshold, clip_high_threshold):
    """-min(p/q A, clip(p/q) A)"""
    ratio = (p - q).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def cispo(p, q, advantages, clip_low_threshold, clip_high_threshold):
    """-clip(p/q) A log p, where the clipped ratio counts as a constant"""
    ratio = (p - q).exp().clamp(clip_low_threshold, clip_high_threshold)
    return -(ratio.detach() * advantages * p).sum()


def dro(p, q, advantages, beta):
    """-(A log p - beta / 2 (log p/q)^2)"""
    return -(advantages * p - beta / 2 * (p - q).square()).sum()


def dpo(chosen, rejected, beta):
    """-log sigmoid(beta (log p/q of the chosen answer - log p/q of the rejected)), where q is the reference."""
    log_ratios = [(s["weights"] * (s["logprobs"] - s["reference_logprobs"])).sum() for s in (chosen, rejected)]
    return -torch.nn.functional.logsigmoid(beta * (log_ratios[0] - log_ratios[1]))


POLICY_LOSSES = [
    (importance_sampling, {}),
    (ppo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    (ppo, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    (cispo, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    (cispo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    (dro, {"beta": 0.05}),
    (dro, {"beta": 1.0}),
]
# How far log p may be from log q: the sampler itself, one some steps old, a strange one, and one that is wrong.
LOG_RATIOS = (0.0, 0.1, 1.5, 20.0)


class Random:
    """Numbers that are exact in f32, as f64."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, count):
        return torch.randn(count, generator=self.generator).double()

    def logprobs(self, count):
        return -2 * self.normal(count).abs()

    def near(self, logprobs, distance):
        """Log-probabilities at most about so far away, in any direction."""
        return (logprobs + distance * self.normal(len(logprobs)).clamp(-1, 1)).clamp(max=0).float().double()


def with_gradients(loss, logprobs, *others, **config):
    """A loss's value and its gradient by the log-probabilities."""
    logprobs = logprobs.clone().requires_grad_()
    value = loss(logprobs, *others, **config)
    return {"value": value.item(), "gradients": short(torch.autograd.grad(value, logprobs)[0])}


def cross_entropy_cases(random):
    """Weights of 0 and 1, fractions, and both signs (the linear form that a loss of the client's own is sent as)."""
    for weights in (random.normal(7) > -0.5, random.normal(7).abs(), 100 * random.normal(7)):
        logprobs, weights = random.logprobs(7), weights.double()
        inputs = {"logprobs": short(logprobs), "weights": short(weights)}
        yield {"loss": "cross_entropy", "config": {}, **inputs, **with_gradients(cross_entropy, logprobs, weights)}


def policy_cases(random):
    """Every loss of a policy, near its sampler and far from it; the first two tokens are a prompt: no advantage."""
    for loss, config in POLICY_LOSSES:
        for distance in LOG_RATIOS:
            logprobs, advantages = random.logprobs(9), random.normal(9)
            sampling = random.near(logprobs, distance)
            sampling[:2], advantages[:2] = 0.0, 0.0
            inputs = {"logprobs": logprobs, "sampling_logprobs": sampling, "advantages": advantages}
            inputs = {name: short(values) for name, values in inputs.items()}
            result = with_gradients(loss, logprobs, sampling, advantages, **config)
            yield {"loss": loss.__name__, "config": config, **inputs, **result}


def dpo_case(random, beta, pairs, distance):
    """The mean loss of some pairs, whose first token is a prompt."""

    def answer(length):
        reference = random.logprobs(length)
        logprobs = random.near(reference, distance).requires_grad_()
        return {"logprobs": logprobs, "reference_logprobs": reference, "weights": (torch.arange(length) > 0).double()}

    pairs = [{"chosen": answer(4 + n), "rejected": answer(6 - n)} for n in range(pairs)]
    value = sum(dpo(**pair, beta=beta) for pair in pairs) / len(pairs)
    value.backward()
    for pair in pairs:
        for side, a in pair.items():
            numbers = {name: short(v.detach()) for name, v in a.items()}
            pair[side] = {**numbers, "gradients": short(a["logprobs"].grad)}
    return {"loss": "dpo", "config": {"beta": beta, "label_smoothing": 0.0}, "value": value.item(), "pairs": pairs}


def losses_golden():
    """Every loss, on random numbers."""
    random = Random(2)
    dpo_cases = [dpo_case(random, *c) for c in ((0.1, 1, 0.0), (0.1, 3, 0.5), (0.5, 2, 3.0), (1.0, 3, 80.0))]
    return [*cross_entropy_cases(random), *policy_cases(random), *dpo_cases]
