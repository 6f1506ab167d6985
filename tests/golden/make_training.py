#!/usr/bin/env python3
"""Makes the golden values of training (see README.md) with transformers, PEFT and torch.

    make_training.py tiny              adapters of the tiny models: gradients, and eight steps of AdamW
    make_training.py formulas          the optimizer, the schedules and the losses by themselves
    make_training.py real --gguf FILE  gradients of an example adapter on the real model

Models, gradients and optimizer compute in f64, what is stored is rounded to f32. Everything is done again in f32, and
the distance between the two stored beside the values: what a good f32 implementation may be off.
"""

import argparse
import hashlib
import re
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from make_golden import ALL_LINEAR, FUSED_LINEAR, HERE, ia3, lora, prefix, read_model, short, write_adapter, write_json
from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from training_formulas import SCHEDULERS, losses_golden, optimizer_golden, schedules_golden
from transformers import AutoModelForCausalLM, AutoTokenizer

TRAINING = HERE / "training"
STEPS = 8

# --- A model's loss and its gradients ----------------------------------------------------------------------------


@contextmanager
def in_double():
    """transformers computes norms and softmax in `torch.float32` by name, whatever the model's type is: for a while,
    that name means f64."""
    single, torch.float32 = torch.float32, torch.float64
    try:
        yield
    finally:
        torch.float32 = single


def logprobs_of(model, tokens):
    """The log-probability of each token but the first, given those before it."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def loss_of(model, batch):
    """The weighted mean of the negative log-probabilities of a batch, and the log-probabilities of each sequence.

    Sequences run one by one: no padding, and no mask that hides it, plays a part.
    """
    precision = in_double() if model.dtype == torch.float64 else nullcontext()
    with precision:
        logprobs = [logprobs_of(model, sequence["tokens"]) for sequence in batch]
    weights = [torch.tensor(sequence["weights"], dtype=torch.float64) for sequence in batch]
    loss = sum(w @ -p for w, p in zip(weights, logprobs)) / sum(w.sum() for w in weights)
    return loss, [p.detach() for p in logprobs]


def trainable(model, folder, dtype):
    """`model` with the adapter of `folder`, both of type `dtype`, ready to learn.

    Not by `PeftModel.from_pretrained`, which refuses to go on training a prefix.
    """
    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = False
    model = get_peft_model(model, config)
    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    return model.to(dtype)


def adapter_tensors(model):
    """The adapter's tensors under the names PEFT saves them by."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def adapter_gradients(model):
    """The gradients of those tensors, under the same names: PEFT is shown them as if they were the values."""
    learning = [p for p in model.parameters() if p.requires_grad]
    values = [p.data for p in learning]
    for p in learning:
        p.data = p.grad
    gradients = adapter_tensors(model)
    for p, value in zip(learning, values):
        p.data = value
    return gradients


def write_tensors(path, tensors):
    """Tensors as f32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: t.float().contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def logprobs_distance(these, those):
    """The largest difference of two lists of log-probabilities."""
    return max(float((a - b).abs().max()) for a, b in zip(these, those))


def tensors_distance(these, those):
    """The largest difference of two maps of tensors, in parts of the largest value of the tensor it is in."""
    return max(float((these[n] - those[n]).abs().max() / those[n].abs().max()) for n in those)


# --- Tiny models -------------------------------------------------------------------------------------------------

MODELS = ["llama-tied", "llama-rope3", "mistral-window", "qwen2-bias", "qwen3-qknorm", "gemma3"]
MODELS += ["granite", "olmo2", "phi3", "gemma2", "mixtral", "qwen3moe", "qwen3moe-steps", "gptoss"]
ADAMW = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
# How far an f32 run may end from the f64 run, in parts of a tensor's largest value: the first steps of AdamW go by the
# sign of a gradient, and where that is lost in rounding, no implementation can be right.
MAX_END_DISTANCE = 1e-4


def schedule(name, warmup_steps, total_steps=STEPS):
    """A schedule, as `hyperparameters` says it."""
    return {"schedule": name, "warmup_steps": warmup_steps, "total_steps": total_steps}


def methods(model):
    """Name -> (configuration, what differs from `ADAMW`)."""
    if model == "phi3":
        return fused_methods()
    if model in ("mixtral", "qwen3moe", "qwen3moe-steps", "gptoss"):
        return mixture_methods(model)
    patterns = {
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"k_proj": 9, "layers.0.self_attn.v_proj": 4},
    }
    return {
        "lora": (lora(4, ["q_proj", "v_proj"]), {**schedule("cosine", 2), "max_grad_norm": 8.0}),
        "lora-all": (lora(3, ALL_LINEAR, **patterns), schedule("linear", 2, total_steps=12)),
        "rslora": (lora(8, ALL_LINEAR, use_rslora=True, layers_to_transform=[1]), schedule("cosine", 2)),
        "ia3": (
            ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]),
            {**schedule("constant", 0), "max_grad_norm": 2.0},
        ),
        "prefix": (prefix(5), schedule("constant", 2)),
        "lm-head": (lora(4, ["q_proj", "lm_head"]), {**schedule("linear", 0), "weight_decay": 0.0}),
    }


def fused_methods():
    """The same for a model whose files have q, k and v in one layer, and gate and up in another."""
    patterns = {"rank_pattern": {"qkv_proj": 5}, "alpha_pattern": {"layers.0.mlp.gate_up_proj": 4}}
    return {
        "lora": (lora(4, ["qkv_proj"]), {**schedule("cosine", 2), "max_grad_norm": 8.0}),
        "lora-all": (lora(3, FUSED_LINEAR, **patterns), schedule("linear", 2, total_steps=12)),
        "rslora": (lora(8, FUSED_LINEAR, use_rslora=True, layers_to_transform=[1]), schedule("cosine", 2)),
        "ia3": (
            ia3(["qkv_proj", "down_proj"], ["down_proj"]),
            {**schedule("constant", 0), "max_grad_norm": 2.0},
        ),
        "prefix": (prefix(5), schedule("constant", 2)),
        "lm-head": (lora(4, ["o_proj", "lm_head"]), {**schedule("linear", 0), "weight_decay": 0.0}),
    }


def mixture_methods(model):
    """The same for a mixture, of whose experts nothing learns; IA3 has the feed-forward of blocks that have none."""
    names = ("lora", "prefix", "lm-head") if model in ("mixtral", "gptoss") else ("lora", "ia3", "prefix", "lm-head")
    return {name: method for name, method in methods("llama-tied").items() if name in names}


def random_batches(vocab, seed):
    """Batches of two or three sequences of 6 to 60 tokens; most weights are 0 (a prompt, and some others) or 1.

    One batch has fractions, one a sequence that does not count.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    def sequence(length, weights):
        weights = weights(length - 1).float() * (torch.arange(length - 1) >= length // 3)
        return {"tokens": random(3, vocab, length).tolist(), "weights": weights.tolist()}

    def mostly_one(count):
        return random(0, 8, count) > 0

    def fractions(count):
        return random(0, 9, count) / 8

    batches = [[sequence(n, mostly_one) for n in (60, 6, 23)]]
    for step in range(1, STEPS):
        lengths = random(6, 25, 2).tolist()
        batches.append([sequence(n, fractions if step == 3 else mostly_one) for n in lengths])
    batches[5][0]["weights"] = [0.0] * len(batches[5][0]["weights"])
    return batches


@dataclass
class Run:
    """What training gave."""

    logprobs: list
    gradients: dict
    end: dict
    steps: list


def train(model, batches, hyperparameters):
    """A step of AdamW for each batch; log-probabilities and gradients are those of the first, before clipping."""
    h = hyperparameters
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=h["lr"], betas=h["betas"], eps=h["eps"], weight_decay=h["weight_decay"])
    scheduler = SCHEDULERS[h["schedule"]](optimizer, h["warmup_steps"], h["total_steps"])
    run = Run([], {}, {}, [])
    for batch in batches:
        optimizer.zero_grad()
        loss, logprobs = loss_of(model, batch)
        loss.backward()
        if not run.steps:
            run.logprobs, run.gradients = logprobs, adapter_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(learning, h["max_grad_norm"])
        run.steps.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": scheduler.get_last_lr()[0]})
        optimizer.step()
        scheduler.step()
    run.end = adapter_tensors(model)
    return run


def tiny_case(name, method, seed):
    """One method on one model."""
    config, changes = methods(name)[method]
    hyperparameters = {**ADAMW, **changes}
    folder = TRAINING / name / method
    shutil.rmtree(folder, ignore_errors=True)
    base = read_model(HERE / "models" / name)
    write_adapter(folder / "start", base, config, torch.float32, seed)
    batches = random_batches(base.config.vocab_size, seed)
    single, double = (
        train(trainable(read_model(HERE / "models" / name), folder / "start", dtype), batches, hyperparameters)
        for dtype in (torch.float32, torch.float64)
    )
    f32_distance = {
        "logprobs": logprobs_distance(single.logprobs, double.logprobs),
        "gradients": tensors_distance(single.gradients, double.gradients),
        "end": tensors_distance(single.end, double.end),
    }
    assert f32_distance["end"] < MAX_END_DISTANCE, "another seed is needed"
    assert all(bool((g != 0).any()) for g in double.gradients.values())
    write_tensors(folder / "gradients.safetensors", double.gradients)
    write_tensors(folder / "end.safetensors", double.end)
    expected = {
        "model": name,
        "method": method,
        "hyperparameters": hyperparameters,
        "loss": double.steps[0]["loss"],
        "logprobs": [short(p) for p in double.logprobs],
        "steps": double.steps,
        "f32_distance": f32_distance,
        "batches": batches,
    }
    write_json(folder / "expected.json", expected)
    norms = [step["grad_norm"] for step in double.steps]
    about = f"loss {expected['loss']:.3f} norm {min(norms):.2f}..{max(norms):.2f}"
    print(f"{name:15} {method:9} {about} f32 off by", " ".join(f"{k} {v:.0e}" for k, v in f32_distance.items()))


def tiny(only):
    """Every method on every model whose name begins so."""
    for nth, name in enumerate(MODELS):
        if not name.startswith(only):
            continue
        for mth, method in enumerate(methods(name)):
            tiny_case(name, method, 1 + 10 * nth + mth)


# --- The other commands ------------------------------------------------------------------------------------------


def formulas():
    """What needs no model."""
    write_json(TRAINING / "optimizer.json", optimizer_golden())
    write_json(TRAINING / "schedules.json", schedules_golden())
    write_json(TRAINING / "losses.json", losses_golden())


ADAPTER = "pirate"
QUESTION = {"role": "user", "content": "Why do rivers freeze from above?"}
ANSWER = {
    "role": "assistant",
    "content": "Arr! Ice be lighter than water, so she floats, and the fish stay warm below.",
}
PROSE = (
    "The ferry left before dawn, with eleven passengers, a crate of oranges and a dog that belonged to nobody. "
    "By noon the fog had lifted, the oranges were gone, and everyone had given the dog a different name."
)
KEPT_GRADIENTS = re.compile(r"\.layers\.(0|14|29)\.self_attn\.(q|v)_proj\.")


def real_batch(tokenizer):
    """A chat of which the answer counts, and prose of which everything does."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    question = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    chat = tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False)
    assert chat.startswith(question)
    asked = len(ids(question))
    weights = [[float(i + 1 >= asked) for i in range(len(ids(chat)) - 1)], [1.0] * (len(ids(PROSE)) - 1)]
    return [{"text": t, "tokens": ids(t), "weights": w} for t, w in zip((chat, PROSE), weights)]


def real_run(gguf, batch, dtype):
    """Loss, log-probabilities and gradients of the example adapter."""
    base = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = trainable(base, HERE.parent.parent / "examples/adapters" / ADAPTER, dtype)
    loss, logprobs = loss_of(model, batch)
    loss.backward()
    return loss.item(), logprobs, adapter_gradients(model)


def real(gguf):
    """The real model with a trained adapter: the gradients of some of its tensors."""
    batch = real_batch(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    _, f32_logprobs, f32_gradients = real_run(gguf, batch, torch.float32)
    loss, logprobs, gradients = real_run(gguf, batch, torch.float64)
    folder = TRAINING / "smollm2"
    kept = {name: g for name, g in gradients.items() if KEPT_GRADIENTS.search(name)}
    write_tensors(folder / "gradients.safetensors", kept)
    expected = {
        "model": gguf.name,
        "sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "adapter": ADAPTER,
        "loss": loss,
        "logprobs": [short(p) for p in logprobs],
        "grad_norm": torch.nn.utils.get_total_norm(gradients.values()).item(),
        "f32_distance": {
            "logprobs": logprobs_distance(f32_logprobs, logprobs),
            "gradients": tensors_distance(f32_gradients, gradients),
        },
        "batches": [batch],
    }
    write_json(folder / "expected.json", expected)
    print(f"{gguf.name} {ADAPTER} loss {loss:.3f} norm {expected['grad_norm']:.3f} f32: {expected['f32_distance']}")


def main():
    """Parses the command line and runs one command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tiny").add_argument("--only", default="", metavar="BEGINNING")
    commands.add_parser("formulas")
    commands.add_parser("real").add_argument("--gguf", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "tiny":
        tiny(arguments.only)
    elif arguments.command == "formulas":
        formulas()
    else:
        real(arguments.gguf)


if __name__ == "__main__":
    main()
