"""A model with remote layers beside the same model without: logits, gradients, tokens."""

from __future__ import annotations

import torch
from models import LAYERS, TARGETS, VOCABULARY
from peft import LoraConfig, get_peft_model

TOKENS = torch.tensor([[1, 5, 9, 33, 70, 2, 8, 41], [1, 77, 6, 12, 90, 54, 3, 60]]) % VOCABULARY


def with_lora(model, targets, **options):
    """The model in PEFT, with LoRA factors that are the same every time and not zero."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    wrapped = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in sorted(wrapped.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return wrapped


def step(model, tokens=TOKENS):
    """Logits, loss, and the gradients of all that is trained, by name."""
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), out.loss.item(), gradients


def same_step(model, reference, tolerance=1e-3, tokens=TOKENS):
    """Asserts equal logits, loss and gradients; returns the largest differences of logits and gradients."""
    logits, loss, gradients = step(model, tokens)
    logits_r, loss_r, gradients_r = step(reference, tokens)
    assert gradients.keys() == gradients_r.keys() and len(gradients) >= 2 * LAYERS
    assert all(float(g.abs().max()) > 0 for g in gradients_r.values())
    apart = float((logits - logits_r).abs().max())
    gap = max(float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in gradients_r.items())
    assert apart <= tolerance, f"logits differ by {apart}"
    assert abs(loss - loss_r) <= tolerance
    assert gap <= tolerance, f"gradients differ by {gap} of the largest"
    return apart, gap


@torch.no_grad()
def tokens_of(model, count=12):
    """What it says next, greedily."""
    return model.generate(input_ids=TOKENS[:1], max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)


def targets_of(architecture):
    return TARGETS[architecture]
