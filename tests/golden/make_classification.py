#!/usr/bin/env python3
"""Makes the golden values of classification with transformers and PEFT (see README.md).

    make_classification.py

The tiny models of make_golden.py get classification heads as PEFT saves them (`task_type` SEQ_CLS), with the logits of
their labels. The same models without a head give the probability of a token against another after a prompt, as
Qwen3-Reranker computes scores.
"""

import shutil

import torch
from make_golden import HERE, PROMPT_LENGTHS, lora, read_model, short, sort_sets, write_json
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

# Name -> (model, number of labels, LoRA, dtype it is stored in).
CLASSIFIERS = {
    "three-labels": ("llama-tied", 3, lora(4, ["q_proj", "v_proj", "down_proj"], task_type="SEQ_CLS"), torch.float32),
    "two-labels": ("qwen2-bias", 2, lora(4, ["q_proj", "up_proj"], task_type="SEQ_CLS"), torch.bfloat16),
    "one-label": ("qwen2-bias", 1, lora(4, ["k_proj", "down_proj"], task_type="SEQ_CLS"), torch.float16),
}

# Models, adapters and the ids of the tokens "no" and "yes".
TOKENS = [("llama-tied", None, [17, 42]), ("qwen2-bias", None, [5, 300]), ("llama-tied", "rank4-attention", [200, 3])]


def prompts(vocab):
    """One prompt of each length."""
    generators = [(length, torch.Generator().manual_seed(length)) for length in PROMPT_LENGTHS]
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length, generator in generators]


def classifier(model, labels):
    """A tiny model under a head of transformers' own class, not yet trained."""
    torch.manual_seed(0)
    folder = HERE / "models" / model
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels, dtype=torch.float32).eval()


def write_classifier(name, seed):
    """A PEFT folder with random numbers: the LoRA's change is about 0.4 of a layer's output, and logits are about 1."""
    model, labels, config, dtype = CLASSIFIERS[name]
    folder = HERE / "adapters" / "classification" / model / name
    shutil.rmtree(folder, ignore_errors=True)
    base = classifier(model, labels)
    peft = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in peft.named_parameters():
        if ".lora_A." in parameter_name:
            std = parameter.shape[1] ** -0.5
        elif ".lora_B." in parameter_name:
            std = 0.4 / (2 * parameter.shape[1] ** 0.5)
        elif ".score.modules_to_save." in parameter_name:
            std = parameter.shape[1] ** -0.5
        else:
            continue
        parameter.data = torch.randn(parameter.shape, generator=generator) * std
    peft.peft_config["default"].base_model_name_or_path = f"holobiont/{model}"
    peft.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_model.safetensors"
    save_file({n: t.to(dtype).contiguous() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    sort_sets(folder / "adapter_config.json")
    return folder


@torch.inference_mode()
def classified(name, folder):
    """What the saved adapter makes of prompts, read back by PEFT."""
    model, labels, _, _ = CLASSIFIERS[name]
    peft = PeftModel.from_pretrained(classifier(model, labels), folder).eval()
    assert all(p.dtype == torch.float32 for p in peft.parameters())
    for prompt in prompts(peft.config.vocab_size):
        logits = peft(torch.tensor([prompt])).logits[0]
        yield {"model": model, "adapter": name, "prompt": prompt, "logits": short(logits)}


@torch.inference_mode()
def compared(name, adapter, tokens):
    """Logits of two tokens after prompts, and the probability of the second."""
    model = read_model(HERE / "models" / name)
    vocab = model.config.vocab_size
    if adapter:
        model = PeftModel.from_pretrained(model, HERE / "adapters" / name / adapter).eval()
    for prompt in prompts(vocab):
        logits = model(torch.tensor([prompt])).logits[0, -1, tokens]
        score = torch.softmax(logits, dim=0)[1]
        yield {
            "model": name,
            "adapter": adapter,
            "tokens": tokens,
            "prompt": prompt,
            "logits": short(logits),
            "score": float(f"{float(score):.9g}"),
        }


def main():
    """Writes adapters and expected values."""
    heads = [case for seed, name in enumerate(CLASSIFIERS) for case in classified(name, write_classifier(name, seed))]
    tokens = [case for model, adapter, ids in TOKENS for case in compared(model, adapter, ids)]
    for case in heads + tokens:
        print(f"{case['model']:12} {case['adapter'] or 'base':16} {len(case['prompt']):2} {case['logits']}")
    write_json(HERE / "expected" / "classification.json", {"heads": heads, "tokens": tokens})


if __name__ == "__main__":
    main()
