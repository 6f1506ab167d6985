#!/usr/bin/env python3
"""Measures PyTorch, transformers and PEFT on a GPU: what scripts/gpu-check sets our figures beside.

    gpu-peer.py [--device cuda:0] [--shape 7b|13b|tiny] [--runs N] [--budget-s S] [FIGURE...]

Prints one JSON object a line: figure, unit, value (the median), runs (each measurement). The model has random weights
of its own, in bf16, made on the device: nothing is downloaded. Needs torch; the figures of a model need transformers,
without which they are named and left out. Without peft its adapters are computed here the way it does, and named so.

The peer is used as its users use it: eager, attention by torch's own kernels (sdpa), a growing KV cache, greedy. Its
loop is written out instead of calling generate(), which would only cost it time.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time

import torch

SHAPES = {
    "7b": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
    "13b": dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40),
    # For trying this script on a CPU.
    "tiny": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4),
}
VOCABULARY = 32000
CONTEXT = 4096

PROMPT_TOKENS = 128
DECODED_TOKENS = 64
WARM_UP_TOKENS = 4
PREFILL_TOKENS = 2048

ADAPTERS = 8
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]

MATRIX = 8192
COPIED_BYTES = 4 << 30
# What is timed together, so that starting it does not count.
MATMULS, COPIES = 10, 10


class AdaptedLinear(torch.nn.Module):
    """A linear layer with an adapter for each row of a batch, computed as PEFT does: one after the other."""

    def __init__(self, base, adapters):
        super().__init__()
        self.base = base
        linear = lambda inputs, outputs: torch.nn.Linear(inputs, outputs, bias=False)  # noqa: E731
        self.down = torch.nn.ModuleList(linear(base.in_features, RANK) for _ in range(adapters))
        self.up = torch.nn.ModuleList(linear(RANK, base.out_features) for _ in range(adapters))

    def forward(self, x):
        out = self.base(x)
        for row, (down, up) in enumerate(zip(self.down, self.up)):
            rows = [row]
            out[rows] += up(down(x[rows])) * 1.0
        return out


def adapt_by_hand(model):
    """Puts adapters beside the layers that PEFT would adapt."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in TARGETS:
                setattr(module, name, AdaptedLinear(layer, ADAPTERS))
    return model


class Peer:
    """The device, and the models on it as far as they were needed."""

    def __init__(self, given):
        self.device = torch.device(given.device)
        self.shape = given.shape
        self.runs = given.runs
        self.deadline = time.monotonic() + given.budget_s
        self.base = None
        self.adapted = None

    @property
    def is_small(self):
        return self.shape == "tiny"

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work):
        """How long `work` takes, the device's part included."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def measure(self, figure, unit, rate, peer):
        """Calls `rate` once unmeasured, then `runs` times or as long as the budget lasts, and prints the line."""
        rate()
        values = []
        while len(values) < self.runs and (not values or time.monotonic() < self.deadline):
            values.append(rate())
        line = {"figure": figure, "unit": unit, "value": round(statistics.median(values), 3),
                "runs": [round(value, 3) for value in values], "peer": peer, "shape": self.shape}  # fmt: skip
        print(json.dumps(line), flush=True)

    def base_model(self):
        """A Llama of the shape, random weights, bf16."""
        if self.base is None:
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, attn_implementation="sdpa",
                                 **SHAPES[self.shape])  # fmt: skip
            with self.device, default_dtype(torch.bfloat16):
                self.base = LlamaForCausalLM(config).eval()
        return self.base

    def adapted_model(self):
        """The same model with adapters a0, a1, ... whose both matrices are random; what it is told of a batch with one
        row for each, and what it is called."""
        if self.adapted is None:
            try:
                import peft
            except Exception as error:  # One that does not suit the other packages fails in many ways.
                print(f"gpu-peer: without peft: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                with self.device:
                    model = adapt_by_hand(self.base_model())
                self.adapted = model, {}, "transformers, LoRA as PEFT computes it"
            else:
                names = [f"a{number}" for number in range(ADAPTERS)]
                self.adapted = self.under(peft, names), {"adapter_names": names}, "transformers + PEFT"
            self.adapted[0].to(self.device, torch.bfloat16).eval()
        return self.adapted

    def under(self, peft, names):
        """The model under PEFT, with an adapter of each name."""
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False)
        with self.device:
            model = peft.get_peft_model(self.base_model(), config, adapter_name=names[0])
            for name in names[1:]:
                model.add_adapter(name, config)
        return model

    def decode_rate(self, model, streams, **options):
        """Tokens a second of all streams together, after a prompt."""
        prompt = torch.randint(VOCABULARY, (streams, PROMPT_TOKENS), device=self.device)
        out = model(input_ids=prompt, use_cache=True, **options)
        state = [out.logits[:, -1:].argmax(-1), out.past_key_values]

        def step(count):
            for _ in range(count):
                out = model(input_ids=state[0], past_key_values=state[1], use_cache=True, **options)
                state[:] = out.logits[:, -1:].argmax(-1), out.past_key_values

        step(WARM_UP_TOKENS)
        return streams * DECODED_TOKENS / self.seconds(lambda: step(DECODED_TOKENS))

    def prefill_rate(self):
        """Tokens a second of one prompt, logits of the last token only."""
        prompt = torch.randint(VOCABULARY, (1, PREFILL_TOKENS), device=self.device)
        model = self.base_model()
        return PREFILL_TOKENS / self.seconds(lambda: model(input_ids=prompt, use_cache=True, logits_to_keep=1))

    # The figures.

    def copy_bandwidth(self):
        """Bytes read and written a second by copies inside the device's memory."""
        count = (COPIED_BYTES >> 10 if self.is_small else COPIED_BYTES) // 4
        source = torch.ones(count, dtype=torch.int32, device=self.device)
        target = torch.empty_like(source)

        def copies():
            for _ in range(COPIES):
                target.copy_(source)

        moved = 2 * 4 * count * COPIES
        self.measure("copy-bandwidth", "GB/s", lambda: moved / self.seconds(copies) / 1e9, "torch copy_")

    def matmul(self):
        """What the matrix unit reaches on random numbers; zeros would flatter it."""
        size = 256 if self.is_small else MATRIX
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)

        def products():
            for _ in range(MATMULS):
                torch.mm(left, right, out=product)

        work = 2 * size**3 * MATMULS
        self.measure("matmul", "TFLOP/s", lambda: work / self.seconds(products) / 1e12, "torch mm, bf16")

    def decode_1(self):
        model = self.base_model()
        self.measure("decode-1", "tokens/s", lambda: self.decode_rate(model, 1), "transformers")

    def decode_8(self):
        model = self.base_model()
        self.measure("decode-8", "tokens/s", lambda: self.decode_rate(model, ADAPTERS), "transformers")

    def prefill_2048(self):
        self.measure("prefill-2048", "tokens/s", self.prefill_rate, "transformers")

    def decode_8_adapters(self):
        model, options, peer = self.adapted_model()
        rate = lambda: self.decode_rate(model, ADAPTERS, **options)  # noqa: E731
        self.measure("decode-8-adapters", "tokens/s", rate, peer)


# In this order: adapters change the model they are put on, so that is measured first.
FIGURES = {
    "copy-bandwidth": Peer.copy_bandwidth,
    "matmul": Peer.matmul,
    "decode-1": Peer.decode_1,
    "decode-8": Peer.decode_8,
    "prefill-2048": Peer.prefill_2048,
    "decode-8-adapters": Peer.decode_8_adapters,
}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def versions():
    """What is measured, for the record."""
    line = {"figure": "versions", "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("transformers", "peft"):
        with contextlib.suppress(Exception):
            line[name] = __import__(name).__version__
    if torch.cuda.is_available():
        line["device"] = torch.cuda.get_device_name()
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--runs", type=int, default=5, help="measurements of each figure (default: 5)")
    parser.add_argument("--budget-s", type=float, default=120, help="after this, one measurement of each is enough")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; none: all")
    given = parser.parse_args()
    if unknown := set(given.figures) - set(FIGURES):
        parser.error(f"no figure is called {', '.join(sorted(unknown))}")
    torch.manual_seed(1)
    print(json.dumps(versions()), flush=True)
    peer = Peer(given)
    failed = False
    for name, figure in FIGURES.items():
        if given.figures and name not in given.figures:
            continue
        try:
            with torch.inference_mode():
                figure(peer)
        except Exception as error:  # Of other people's code, in whatever version: it costs one figure, not all.
            failed = True
            print(f"gpu-peer: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
