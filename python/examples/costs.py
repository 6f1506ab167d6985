#!/usr/bin/env python3
"""What fine-tuning takes on this machine: memory, and over rented layers the bytes of a token.

    costs.py ENDPOINT [--dtype float32|bfloat16]     # layers rented
    costs.py MODEL --gguf-file FILE                  # the same with the whole model here, to compare

Needs ``pip install 'holobiont[peft,gguf]'``.
"""

import argparse
import pathlib
import re

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import holobiont
from holobiont.layers import VirtLayer

STEPS, EXAMPLES, TOKENS, SAID = 4, 4, 128, 32


def megabytes(field):
    """``VmRSS``: what is in memory now; ``VmHWM``: the most that was."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", status)[1]) * 1024 / 1e6


def counters(model):
    """The session's counters; none if all layers are here."""
    remote = next((module for module in model.modules() if isinstance(module, VirtLayer)), None)
    return remote.holobiont.shared.evaluator.session.counters if remote is not None else holobiont.Counters()


def show(what, used, tokens):
    each = f"{used.bytes_out / tokens / 1e3:.1f} kB out and {used.bytes_in / tokens / 1e3:.1f} kB in a token"
    print(f"{what}: {each}, {used.calls} calls for {tokens} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint_or_model")
    parser.add_argument("--gguf-file")
    parser.add_argument("--api-key")
    parser.add_argument("--ca")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    given = parser.parse_args()
    dtype, before = getattr(torch, given.dtype), megabytes("VmRSS")
    if given.gguf_file:
        model = AutoModelForCausalLM.from_pretrained(given.endpoint_or_model, gguf_file=given.gguf_file, dtype=dtype)
    else:
        model = holobiont.model(given.endpoint_or_model, api_key=given.api_key, ca=given.ca, dtype=dtype)
    print(f"memory: {before:.0f} MB before, {megabytes('VmRSS'):.0f} MB with the model, {megabytes('VmHWM'):.0f} MB at most")

    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    start = counters(model)
    for _ in range(STEPS):
        ids = torch.randint(model.config.vocab_size, (EXAMPLES, TOKENS))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    show("training", counters(model) - start, STEPS * EXAMPLES * TOKENS)
    print(f"memory: {megabytes('VmRSS'):.0f} MB after training, {megabytes('VmHWM'):.0f} MB at most")

    start = counters(model)
    prompt = torch.ones(1, 1, dtype=torch.long)
    model.eval().generate(input_ids=prompt, min_new_tokens=SAID, max_new_tokens=SAID, do_sample=False)
    show("generation", counters(model) - start, SAID)


if __name__ == "__main__":
    main()
