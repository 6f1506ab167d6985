#!/usr/bin/env python3
"""KTO's losses and gradients by TRL's own trainer, on random log-probabilities: `training/kto.json`.

    make_kto.py

Needs the packages of scripts/torch-requirements.txt. TRL computes the loss inside `KTOTrainer`, from a model's outputs.
Here the outputs are numbers of this script: a stand-in for the model returns them, and the trainer's method does the
rest (labels, reference, divergence, weights, mean).
"""

from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
import trl
from make_golden import short, write_json
from trl import KTOTrainer

OUTPUT = Path(__file__).parent / "training" / "kto.json"
assert trl.__version__ == "1.16.0", "the conventions of another version may differ"

# beta, weight of desirable and of undesirable answers, ratings, and how far the log-probabilities of answers and of
# mismatched answers are from the reference. The mean of the last case's mismatched answers is below 0, and counts as 0.
CASES = [
    (0.1, 1.0, 1.0, [1, 0], 0.0, 0.0),
    (0.1, 1.0, 1.0, [1, 0, 0, 1], 0.5, 0.5),
    (0.5, 1.33, 1.0, [0, 0, 1], 3.0, 1.0),
    (0.1, 1.0, 2.0, [1, 1, 1], 2.0, 1.0),
    (1.0, 1.0, 1.0, [0, 0], 2.0, 1.0),
    (1.0, 1.0, 1.0, [1, 0], 80.0, 0.1),
    (0.2, 1.0, 1.0, [1, 0, 1], 1.0, -2.0),
]


class Model:
    """Returns the log-probabilities of an answer's tokens, and keeps which answers were asked for."""

    training = True

    def __init__(self, logprobs):
        self.logprobs = logprobs

    def __call__(self, input_ids, labels, **_):
        # The first number of a row is its answer; tokens without a label count nothing.
        rows = torch.stack([self.logprobs[int(row[0])] for row in input_ids])
        counted = torch.where(labels[:, 1:] == -100, 0.0, rows)
        return SimpleNamespace(log_probs=counted, entropy=torch.zeros_like(rows), mean_logits=torch.zeros_like(rows))


def trainer(model, beta, desirable, undesirable):
    """What `KTOTrainer._compute_loss` needs of its trainer, on one process."""
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value)
    stand_in = SimpleNamespace(
        model=model,
        accelerator=accelerator,
        beta=beta,
        desirable_weight=desirable,
        undesirable_weight=undesirable,
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    stand_in._compute_kl_logps = MethodType(KTOTrainer._compute_kl_logps, stand_in)
    return stand_in


def answer(generator, length, distance):
    """Log-probabilities of a prompt's token and of an answer's, exact in f32, on any side of the reference."""
    reference = -2 * torch.randn(length, generator=generator).abs()
    logprobs = reference + distance * torch.randn(length, generator=generator)
    return as_answer(logprobs, reference)


def mismatched_answer(generator, length, distance):
    """An answer that is more likely than by the reference, or less likely if `distance` is below 0."""
    reference = -2 * torch.randn(length, generator=generator).abs()
    return as_answer(reference + distance * torch.rand(length, generator=generator), reference)


def as_answer(logprobs, reference):
    weights = (torch.arange(len(reference)) > 0).double()
    return {"logprobs": logprobs.double(), "reference_logprobs": reference.double(), "weights": weights}


def summed_reference(answers):
    return torch.stack([(a["weights"] * a["reference_logprobs"]).sum() for a in answers])


def numbers(a):
    return {name: short(values) for name, values in a.items()}


def case(generator, beta, desirable, undesirable, ratings, distance, of_mismatched):
    length = 5
    answers = [answer(generator, length, distance) for _ in ratings]
    mismatched = [mismatched_answer(generator, length, of_mismatched) for _ in ratings]
    learned = [a["logprobs"].clone().requires_grad_() for a in answers]
    model = Model([*learned, *(m["logprobs"] for m in mismatched)])
    mask = torch.stack([torch.cat([torch.zeros(1), a["weights"]]) for a in answers]).long()

    def ids(first):
        return torch.tensor([[first + number] * (length + 1) for number in range(len(ratings))])

    batch = {
        "input_ids": ids(0),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "KL_input_ids": ids(len(ratings)),
        "KL_attention_mask": torch.ones_like(mask),
        "KL_completion_mask": mask,
        "label": torch.tensor(ratings, dtype=torch.bool),
        "ref_logps": summed_reference(answers),
        "ref_KL_logps": summed_reference(mismatched),
    }
    stand_in = trainer(model, beta, desirable, undesirable)
    loss = KTOTrainer._compute_loss(stand_in, model, batch, False)
    gradients = torch.autograd.grad(loss, learned)
    rated = zip(ratings, answers, gradients)
    return {
        "config": {"beta": beta, "desirable_weight": desirable, "undesirable_weight": undesirable},
        "value": loss.item(),
        "kl": stand_in._metrics["train"]["kl"][0],
        "answers": [{"label": bool(label), **numbers(a), "gradients": short(g)} for label, a, g in rated],
        "mismatched": [numbers(m) for m in mismatched],
    }


def main():
    generator = torch.Generator().manual_seed(3)
    cases = [case(generator, *arguments) for arguments in CASES]
    assert cases[-1]["kl"] == 0 and cases[1]["kl"] != 0
    write_json(OUTPUT, cases)


if __name__ == "__main__":
    main()
