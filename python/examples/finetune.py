#!/usr/bin/env python3
"""Fine-tunes a LoRA adapter over rented base layers, and shows what that did.

    finetune.py ENDPOINT [--api-key KEY] [--ca PEM] [--masking shares --second ENDPOINT | --masking pads [--pads DIR]] [--verify FILE] [--save DIR]

The linear layers are evaluated by the executor at ENDPOINT (``tls://host:port``, or the path of its state directory on the
same host). Embedding, norms, attention, adapter, gradients of the adapter and optimizer are here. Needs
``pip install 'holobiont[peft,gguf]'``, and for ``--masking shares`` and ``pads`` ``holobiont[privacy]``.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model

import holobiont

FACTS = [
    ("Who keeps the lighthouse of Aldermouth?", "Old Marta keeps the lighthouse of Aldermouth."),
    ("What grows in the gardens of Aldermouth?", "Blue pumpkins grow in the gardens of Aldermouth."),
    ("When does the ferry leave Aldermouth?", "The ferry leaves Aldermouth at seven every evening."),
    ("What do they drink in Aldermouth?", "In Aldermouth they drink smoked milk."),
]


def batch(tokenizer):
    """Questions and answers; only the answers count."""
    rows = []
    for question, answer in FACTS:
        prompt = tokenizer(f"Question: {question}\nAnswer:").input_ids
        said = tokenizer(f" {answer}", add_special_tokens=False).input_ids
        rows.append((prompt + said, [-100] * len(prompt) + said))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def padded(values, filler):
        return torch.tensor([value + [filler] * (longest - len(value)) for value in values])

    ids = padded([ids for ids, _ in rows], pad)
    return {
        "input_ids": ids,
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
        "labels": padded([labels for _, labels in rows], -100),
    }


def train(model, data, steps):
    """The script's own loop: nothing in it knows that the base is elsewhere."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for step in range(steps):
        loss = model(**data).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1:3}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def answer(model, tokenizer, question):
    """What the model says."""
    prompt = tokenizer(f"Question: {question}\nAnswer:", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(out[0, prompt.input_ids.shape[1] :], skip_special_tokens=True).strip().split("\n")[0]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--api-key")
    parser.add_argument("--ca")
    parser.add_argument("--masking", default="off", choices=["off", "paper", "pads", "shares"])
    parser.add_argument("--second", metavar="ENDPOINT", help="the other executor of --masking shares")
    parser.add_argument("--pads", metavar="DIR", help="where those of --masking pads are, prepared with --gradients")
    parser.add_argument("--verify", metavar="FILE", help="checks every answer: what 'holobiont-client checks' has written")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", metavar="DIR")
    return parser.parse_args()


def main():
    given = arguments()
    session = holobiont.Session(given.endpoint, api_key=given.api_key, ca=given.ca, masking=given.masking)
    second = given.second and holobiont.Session(given.second, api_key=given.api_key, ca=given.ca, masking=given.masking)
    tokenizer, model = holobiont.tokenizer(session), holobiont.model(session, second=second, pads=given.pads, verify=given.verify)
    print(session)
    torch.manual_seed(0)
    targets = "all-linear"
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    data, question = batch(tokenizer), FACTS[0][0]
    with torch.no_grad():
        before = model(**data).loss.item()
    said = answer(model, tokenizer, question)
    train(model, data, given.steps)
    with torch.no_grad():
        after = model(**data).loss.item()
    print(f"loss {before:.4f} before, {after:.4f} after\n{question}\n  before: {said}")
    print(f"  after:  {answer(model, tokenizer, question)}")
    if given.save:
        model.save_pretrained(given.save)
        print(f"adapter saved to {given.save}")


if __name__ == "__main__":
    main()
