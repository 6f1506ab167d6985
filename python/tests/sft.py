"""TRL's `SFTTrainer` over two models, as its users write it."""

from __future__ import annotations

import math

import numpy as np
import torch
from models import VOCABULARY
from peft import LoraConfig

SENTENCES = [" ".join(f"w{(7 * i + j) % 90 + 4}" for j in range(12)) for i in range(8)]
"""For a tiny model, whose tokenizer is `words`."""


def words():
    """A tokenizer that knows the words `w0` to `w95`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
    known.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="w0", bos_token="w1", eos_token="w2")


def fine_tune(model, tokenizer, sentences, folder, callbacks=()):
    """As in TRL's quick start; losses and lengths of the gradient at each step, and what was trained."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(3)
    settings = SFTConfig(
        output_dir=str(folder),
        max_steps=6,
        learning_rate=2e-2,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=3,
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([{"text": sentence} for sentence in sentences]),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps], trained


def same_fine_tuning(model, local, tokenizer, sentences, folder, callbacks=()):
    """Asserts losses that are numbers and fall, and the same losses, gradients and adapter as of the local model."""
    losses, lengths, trained = fine_tune(model, tokenizer, sentences, folder / "remote", callbacks)
    losses_l, lengths_l, trained_l = fine_tune(local, tokenizer, sentences, folder / "local")
    assert all(math.isfinite(loss) and loss > 0 for loss in losses) and losses[-1] < losses[0] - 0.1, losses
    np.testing.assert_allclose(losses, losses_l, rtol=1e-3)
    np.testing.assert_allclose(lengths, lengths_l, rtol=2e-3)
    assert trained.keys() == trained_l.keys() and trained
    for name, parameter in trained.items():
        gap = float((parameter - trained_l[name]).norm() / trained_l[name].norm())
        assert gap < 1e-2, f"{name} differs by {gap:.1%}"
