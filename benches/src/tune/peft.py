"""PEFT's LoRA training: a line in, the tokens a second of some steps out.

The base has the file's shape and random weights: how fast a step is does not depend on them, and transformers would keep a
GGUF file's own weights packed, which is slower than bf16.
"""

import pathlib
import statistics
import sys
import time

import torch
import transformers
from peft import LoraConfig, get_peft_model

MODEL = pathlib.Path(sys.argv[1])
BATCH, TOKENS, RANK, WARM_UP_STEPS, STEPS, THREADS = (int(number) for number in sys.argv[2:8])


def main():
    torch.set_num_threads(THREADS)
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    tokens = torch.randint(0, base.config.vocab_size, (BATCH, TOKENS))

    def step():
        started = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH * TOKENS / (time.perf_counter() - started)

    for _ in sys.stdin:
        rates = [step() for _ in range(WARM_UP_STEPS + STEPS)]
        print(statistics.median(rates[WARM_UP_STEPS:]), flush=True)


main()
