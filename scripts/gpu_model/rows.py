"""The rows of docs/performance/gpu.md: what each should be by bytes, launches, copies and arithmetic.

A time is a sum of terms that can be counted, with a few constants of the device and of our launches. Constants are either
measured in the run itself, or taken from a data sheet, or fitted to the rows that `FITTED` names; those rows prove nothing
about the constant, all others do.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gpu_model.work import LLAMA_2_7B, NUMBER_BYTES, RANK_BLOCK, Shape


class Constants(NamedTuple):
    """Constants of an H100 and of our launches on it."""

    copy_gbps: float = 3021  # measured: read and written by a copy on the device
    matrix_tflops: float = 767  # measured: a large product of the library
    multiprocessors: int = 132
    # A product's first bytes, last warps, and the gap before it; a short launch as a whole, in a graph.
    product_us: float = 1.6
    short_us: float = 2.66
    # A kernel's additional time if nothing runs beside it, under Nsight Compute.
    alone_us: float = 2.0
    # The host's time for a launch that stays visible without graphs, as kernels begin early.
    enqueue_us: float = 0.28
    # The second-level cache, which gives x to each block of the products for 32 rows.
    l2_gbps: float = 4700
    # A pair of adapter launches in a step, and alone; a unit of the expand, and each round of 16 ranks in it.
    pair_us: float = 10.0
    pair_alone_us: float = 14.5
    unit_us: float = 3.1
    round_us: float = 1.53
    # Share of the large product's rate that products of a prompt reach; launches of a pass, which no graph records.
    prompt_share: float = 0.77
    pass_launch_us: float = 1.0
    # A copy over the link, and the host's time for each of many copies with an event behind each.
    link_gbps: float = 51.5
    link_us: float = 8.7
    piece_us: float = 10.0
    # One thread that copies workers' sums twice, and the arithmetic of eight workers.
    sums_gbps: float = 3.15
    workers_gflops: float = 480


MEASURED = ("copy_gbps", "matrix_tflops")
# Constant -> the rows that it was fitted to, or where else it comes from.
FITTED: dict[str, tuple[str, ...] | str] = {
    "product_us": ("kernel q, k, v", "kernel o", "kernel gate, up", "kernel down"),
    "short_us": ("kernel short launches",),
    "alone_us": "gpu.md: a kernel alone takes some 2 us more",
    "enqueue_us": ("decode 1 launches", "decode 8 adapters launches"),
    "l2_gbps": ("step 32 base",),
    "pair_us": ("step 32 rank 16",),
    "pair_alone_us": ("deltas rank 16",),
    "unit_us": ("deltas rank 16", "deltas rank 32", "deltas rank 64"),
    "round_us": ("deltas rank 16", "deltas rank 32", "deltas rank 64"),
    "prompt_share": ("prefill 2048", "prefill 2048 tokens"),
    "pass_launch_us": "a usual gap between launches that no graph records",
    "link_gbps": ("link 128 MiB",),
    "link_us": ("link 64 KiB",),
    "piece_us": ("link rank 16", "link rank 64"),
    "sums_gbps": ("fused 512", "fused 1024", "fused 2048"),
    "workers_gflops": "eight cores at the 60 GFLOP/s that xAB reaches on one",
}

# Launches of a layer: four groups of products; two norms, rotation, append, attention and its joining, gate.
SHORT_LAUNCHES, PRODUCTS = 7, 4
CONTEXT, WARM_UP, DECODED = 128, 4, 64
# Places of blocks of the shrink and of the expand in a multiprocessor (kernels/cuda/machine-code.txt).
SHRINK_PLACES, EXPAND_PLACES = 3, 2
UNIT_BYTES = 32 << 10
# Bytes that a prompt moves in a layer beside its products, for each token: norms, rotation, gating, the residual.
ELEMENTWISE_BYTES = 0.2e9 / 2048
ATTENTION_RANK_TARGETS, ALL_TARGETS = ("q", "k", "v"), ("q", "k", "v", "o")


@dataclass(frozen=True)
class Row:
    """A row: what it is, its unit, and its value by the model; `now` if the program has changed since it was measured."""

    id: str
    what: str
    unit: str
    value: float | None
    terms: str
    now: float | None = None
    now_terms: str = ""
    bench: str = ""  # of holobiont-bench, and a pattern of the case
    case: str = ""
    peer: str = ""  # for what holobiont-bench compares with: a pattern of its name


class Model:
    """Times in microseconds of what the benchmarks do, for a shape on a device."""

    def __init__(self, shape: Shape = LLAMA_2_7B, constants: Constants = Constants(), devices: int = 1):
        self.shape, self.constants, self.devices = shape, constants, devices

    def read_us(self, size):
        return size / self.constants.copy_gbps / 1e3

    def launches_us(self):
        """Short launches, and what products take beside their bytes, in a step."""
        of_layer = SHORT_LAUNCHES * self.constants.short_us + PRODUCTS * self.constants.product_us
        return self.shape.layers * of_layer + self.constants.product_us

    def step_us(self, streams, context=CONTEXT + WARM_UP + DECODED / 2):
        """A decode step without adapters."""
        weights = self.shape.weight_bytes / self.devices
        kv = self.shape.kv_bytes(streams, context) / self.devices
        of_weights = self.read_us(weights)
        if streams > 16:
            # 32 outputs a block read a byte of x for a byte of weights, both through the second-level cache.
            of_weights = max(of_weights, 2 * weights / self.constants.l2_gbps / 1e3)
        return of_weights + self.read_us(kv) + self.launches_us()

    def pair_us(self, count, rank, targets, fixed_us):
        """Shrink and expand of `count` adapters on one group of targets."""
        a, b = (count * size for size in self.shape.factor_bytes(rank, targets))
        places = EXPAND_PLACES * self.constants.multiprocessors
        rounds = math.ceil(rank / RANK_BLOCK)
        # A unit has 32 KiB of whole rank blocks; half a block is computed as a whole one.
        units = count * len(targets) * self.shape.hidden * rounds * RANK_BLOCK * 2 / UNIT_BYTES
        waves = max(units / places, 1)
        return fixed_us + self.read_us(a) + waves * (self.constants.unit_us + rounds * self.constants.round_us)

    def adapters_us(self, count, rank):
        """What adapters on q, k, v and o add to a step."""
        fixed = self.constants.pair_us
        of_layer = self.pair_us(count, rank, ("q", "k", "v"), fixed) + self.pair_us(count, rank, ("o",), fixed)
        return self.shape.layers * of_layer

    def deltas_gbps(self, count, rank):
        """Bytes of factors on q, k and v by the time of a pair alone."""
        targets = ATTENTION_RANK_TARGETS
        size = count * sum(self.shape.factor_bytes(rank, targets))
        return size / self.pair_us(count, rank, targets, self.constants.pair_alone_us) / 1e3

    def enqueued_us(self, pairs):
        return (self.shape.layers * (SHORT_LAUNCHES + PRODUCTS + 2 * pairs) + 1) * self.constants.enqueue_us

    def prompt_us(self, tokens, chunk=None):
        """A prompt: its products at the library's rate or at the memory's, its attention at half of it, the rest by bytes."""
        chunk = min(chunk or tokens, tokens)
        passes = math.ceil(tokens / chunk)
        rate = self.constants.matrix_tflops * 1e6 * self.devices
        linear = self.shape.linear_flops(tokens) / rate / self.constants.prompt_share
        linear = max(linear, passes * self.read_us(self.shape.weight_bytes / self.devices))
        attention = 2 * self.shape.attention_flops(tokens) / rate
        rest = self.read_us(self.shape.layers * tokens * ELEMENTWISE_BYTES)
        launches = self.shape.layers * (SHORT_LAUNCHES + PRODUCTS) * self.constants.pass_launch_us
        return linear + attention + rest + passes * launches

    def sums_us(self, tokens):
        """Workers' sums of a prompt on q, k and v: 32 bits for each output, token and layer."""
        width = self.shape.heads * self.shape.head_dim + 2 * self.shape.kv_width
        return self.shape.layers * tokens * width * 4 / self.constants.sums_gbps / 1e3

    def workers_us(self, tokens, rank):
        """Workers' products of a prompt on q, k and v."""
        numbers = sum(self.shape.factor_bytes(rank, ATTENTION_RANK_TARGETS)) / NUMBER_BYTES
        return 2 * tokens * self.shape.layers * numbers / self.constants.workers_gflops / 1e3

    def pieces(self, rank):
        """Blocks of 16 ranks of A and B on q, k and v in all layers, and their bytes."""
        count = self.shape.layers * len(ATTENTION_RANK_TARGETS) * 2 * rank // RANK_BLOCK
        return count, self.shape.layers * sum(self.shape.factor_bytes(rank, ATTENTION_RANK_TARGETS))

    def upload_us(self, rank, targets=ATTENTION_RANK_TARGETS):
        """An adapter that travels block by block: by the link, or by the host that starts the copies."""
        count, size = self.pieces(rank)
        share = len(targets) / len(ATTENTION_RANK_TARGETS)
        return share * max(count * self.constants.piece_us, size / self.constants.link_gbps / 1e3)

    def copy_us(self, size):
        return self.constants.link_us + size / self.constants.link_gbps / 1e3


def rate(us, count):
    return count / us * 1e6


def rows(constants: Constants = Constants()):
    """All rows that a run of the benchmarks measures, in the order of the page."""
    model = Model(LLAMA_2_7B, constants)
    parts = (decode_rows, prompt_rows, adapter_rows, fit_rows, worker_rows, link_rows, kernel_rows)
    return [row for part in parts for row in part(model)]


def decode_rows(model):
    behind = r", 64 tokens behind 128$"
    for id_, streams, adapters, what in (
        ("decode 1", 1, 0, "decode, 1 stream"),
        ("decode 8 base", 8, 0, "8 base streams"),
        ("decode 8 adapters", 8, 8, "8 streams on 8 adapters of rank 16"),
    ):
        us = model.step_us(streams) + (model.adapters_us(adapters, 16) if adapters else 0)
        case = what.removeprefix("decode, ")
        terms = "weights, keys and values by the copy's rate; 352 launches" + ("; 64 pairs" if adapters else "")
        yield Row(id_, what, "tokens/s", rate(us, streams), terms, bench="cuda-decode", case=f"^{case}{behind}")
        if id_ != "decode 8 base":
            slower = us + model.enqueued_us(2 if adapters else 0)
            yield Row(f"{id_} launches", f"{what}, launch by launch", "tokens/s", rate(slower, streams),
                      "the same, and the host's part of each launch", bench="cuda-decode", peer="launch by launch",
                      case=f"^{case}, steps recorded as graphs{behind}")  # fmt: skip


def prompt_rows(model):
    us = model.prompt_us(2048)
    flops = model.shape.linear_flops(2048) + model.shape.attention_flops(2048)
    terms = "products at 0.77 of the large product, attention at half of it, 0.2 GB a layer beside"
    yield Row("prefill 2048", "a prompt of 2,048 in one pass", "TFLOP/s", flops / us / 1e6, terms,
              bench="cuda-prefill", case="2048 tokens in one pass")  # fmt: skip
    yield Row("prefill 2048 tokens", "a prompt of 2,048 in one pass", "tokens/s", rate(us, 2048), terms, bench="cuda-prefill",
              case="2048 tokens in one pass")  # fmt: skip
    yield Row("prefill chunks tokens", "a prompt of 2,048 in chunks of 512", "tokens/s", rate(model.prompt_us(2048, 512), 2048),
              "the same, four times the launches", bench="cuda-prefill", case="2048 tokens in chunks of 512")  # fmt: skip
    for tokens in (512, 1024, 2048):
        yield Row(f"prompt {tokens}", f"first token of {tokens:,} on the base", "ms", model.prompt_us(tokens) / 1e3, terms,
                  bench="cuda-fused", case=f"^first token of {tokens}, ", peer="base model")  # fmt: skip


def adapter_rows(model):
    base = model.step_us(32)
    step = r"^a step of 32 streams on 32 adapters of rank "
    yield Row("step 32 base", "a step of 32 base streams", "ms", base / 1e3, "x through the second-level cache; 352 launches",
              bench="cuda-lora", case=step + "16$", peer="32 base streams")  # fmt: skip
    for rank in (8, 16, 32, 64, 128):
        yield Row(f"step 32 rank {rank}", f"a step of 32 streams on 32 adapters of rank {rank}", "ms",
                  (base + model.adapters_us(32, rank)) / 1e3, "the same, and 64 pairs: A by bytes, B by units and rounds",
                  bench="cuda-lora", case=f"{step}{rank}$")  # fmt: skip
    for rank in (8, 16, 32, 64, 128):
        yield Row(f"deltas rank {rank}", f"deltas of 32 adapters alone, rank {rank}", "GB/s of factors", model.deltas_gbps(32, rank),
                  "a pair alone: A by bytes, B by units and rounds", bench="cuda-lora",
                  case=f"^deltas of 32 adapters of rank {rank},")  # fmt: skip


def worker_rows(model):
    for tokens in (512, 1024, 2048):
        prompt, sums, workers = model.prompt_us(tokens), model.sums_us(tokens), model.workers_us(tokens, 16)
        yield Row(f"fused {tokens}", f"fused, first token of {tokens:,}", "ms", (prompt + max(sums, workers)) / 1e3,
                  "the prompt, and its sums copied twice by one thread",
                  now=(prompt + max(sums / 2 / 4, workers)) / 1e3,
                  now_terms="the sums copied once, by four threads",
                  bench="cuda-fused", case=f"^first token of {tokens}, ")  # fmt: skip
    prompt, upload, sums = model.prompt_us(128), model.upload_us(64), max(model.sums_us(128), model.workers_us(128, 64))
    deltas = model.shape.layers * model.pair_us(1, 64, ATTENTION_RANK_TARGETS, model.constants.pair_us)
    cached = prompt + deltas
    _, size = model.pieces(64)
    waits = cached + size / model.constants.link_gbps / 1e3
    lone = r"^first token of a lone prompt of 128, rank 64, "
    yield Row("lone cached", "a lone prompt of 128 on an adapter of rank 64, `cached`", "ms", cached / 1e3,
              "weights by the copy's rate, launches, 32 pairs", bench="cuda-cold", case=lone + "cpu-assist", peer="cached")  # fmt: skip
    yield Row("lone on-demand", "a lone prompt of 128 on a cold adapter of rank 64, `on-demand`", "ms", (cached + upload) / 1e3, "`cached`, and 768 copies of 128 KiB",
              now=waits / 1e3, now_terms="copies at the link's rate", bench="cuda-cold", case=lone + "on-demand")  # fmt: skip
    yield Row("lone cpu-assist", "a lone prompt of 128 on a cold adapter of rank 64, `cpu-assist`", "ms", (cached + sums) / 1e3, "`cached`, and all sums copied twice",
              now=waits / 1e3, now_terms="as `on-demand`, which the forecast chooses", bench="cuda-cold",
              case=lone + "cpu-assist")  # fmt: skip
    loaded = r"^mean first token, .* rank 64, "
    for mode in ("cached", "on-demand", "cpu-assist"):
        peer, case = ("cached", "cpu-assist") if mode == "cached" else ("", mode)
        yield Row(f"loaded {mode}", f"distinct adapters at half of the capacity, `{mode}`", "ms", None, "queues are not modelled",
                  bench="cuda-cold", case=loaded + case, peer=peer)  # fmt: skip


def link_rows(model):
    for what, kib in (("16 KiB", 16), ("64 KiB", 64), ("128 KiB", 128), ("1 MiB", 1024), ("16 MiB", 16384), ("128 MiB", 131072)):
        yield Row(f"link {what}", f"link, one copy of {what}, pinned", "GB/s", (kib << 10) / model.copy_us(kib << 10) / 1e3,
                  "the start of a copy, and its bytes", bench="cuda-link", case=f"^{kib} KiB from pinned memory")  # fmt: skip
    for rank, targets in ((16, ALL_TARGETS), (64, ALL_TARGETS)):
        size = model.shape.layers * sum(model.shape.factor_bytes(rank, targets))
        yield Row(f"link rank {rank}", f"an adapter of rank {rank}, block by block, registered", "GB/s",
                  size / model.upload_us(rank, targets) / 1e3, "10 us of the host for each copy of 128 KiB",
                  now=model.constants.link_gbps, now_terms="64 copies under way: the link's rate",
                  bench="cuda-link", case=f"^an adapter of rank {rank}, .*registered")  # fmt: skip


def fit_rows(_):
    for id_, form, line in (("fit true ranks", "true ranks", "the sum of ranks"), ("fit padded ranks", "padded", "count times the largest")):
        yield Row(id_, f"R² by {line}, {form}", "", None, "not a time", bench="cuda-lora", case=f"^{form}.*batches told by")


def kernel_rows(model):
    for name, (outputs, inputs) in model.shape.products.items():
        us = model.read_us(outputs * inputs * 2) + model.constants.product_us + model.constants.alone_us
        yield Row(f"kernel {name}", f"kernel alone: {name}", "us", us, "weights by the copy's rate")
    yield Row("kernel short launches", "kernels alone: the seven short launches of a layer", "us",
              SHORT_LAUNCHES * (model.constants.short_us + model.constants.alone_us), "seven launches")  # fmt: skip
