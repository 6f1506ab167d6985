"""Forecasts for a base that several GPUs hold together: products cut by their outputs, which are gathered.

Cut by outputs, a sum is computed by one device in one order, so that the bits are those of one device. The usual way cuts
o and down by their inputs and reduces partial sums, whose order, and so whose bits, depend on the number of devices.
"""

import textwrap
from typing import NamedTuple

from gpu_model.rows import Constants, Model
from gpu_model.work import LLAMA_3_70B, NUMBER_BYTES

WIDTH = 138
MEMORY_GB = 80
# Of NVIDIA's data sheet: NVLink of an H100, each way.
NVLINK_GBPS = 450
# Assumed: one exchange among all devices, from the last sum to the first use; published kernels need 3 to 8.
EXCHANGE_US = 5
GATHERS, REDUCTIONS = 4, 2
CONTEXT = 2048


class Exchange(NamedTuple):
    """How devices exchange what the next product needs: exchanges of a layer, and bytes that reach each device."""

    name: str
    count: int
    bytes: float


def exchanges(devices):
    """Both ways for one token of a layer."""
    share = (devices - 1) / devices
    gather = Exchange("gathers of outputs", GATHERS, share * LLAMA_3_70B.gathered_bytes())
    # Each sum travels twice: to the device that adds, and back.
    reduce = Exchange("all-reduce", REDUCTIONS, 2 * share * LLAMA_3_70B.reduced_bytes())
    return gather, reduce


def exchange_us(way, tokens):
    return LLAMA_3_70B.layers * (way.count * EXCHANGE_US + tokens * way.bytes / NVLINK_GBPS / 1e3)


def table(constants=Constants()):
    """Markdown: a row for each number of devices and each way."""
    lines = [
        "| H100 | Exchange | Bytes a token and layer, to each device | One stream | 8 streams | A prompt of 2,048 | Of it exchange |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for devices in (2, 8):
        model = Model(LLAMA_3_70B, constants, devices)
        for way in exchanges(devices):
            steps = [model.step_us(streams, CONTEXT) + exchange_us(way, streams) for streams in (1, 8)]
            exchanged = exchange_us(way, 2048)
            prompt = model.prompt_us(2048) + exchanged
            lines.append(
                f"| {devices} | {way.name}, {way.count} a layer | {way.bytes:,.0f} | {1e6 / steps[0]:,.0f} tokens/s"
                f" | {8e6 / steps[1]:,.0f} tokens/s | {prompt / 1e3:,.0f} ms | {exchanged / 1e3:,.0f} ms |"
            )
    return "\n".join([*lines, "", textwrap.fill(arithmetic(), WIDTH, break_on_hyphens=False)])


def arithmetic():
    shape = LLAMA_3_70B
    weights = shape.weight_bytes
    return (
        f"All rows are forecasts. Llama-3-70B has {weights / 1e9:.1f} GB of weights that a step reads (bf16), so two H100 of"
        f" {MEMORY_GB} GB hold it and one does not. A layer gathers the outputs of attention ({shape.heads * shape.head_dim:,} numbers),"
        f" of o ({shape.hidden:,}), of the gate ({shape.inner:,}) and of down ({shape.hidden:,}): {shape.gathered_bytes():,} bytes a token,"
        f" {NUMBER_BYTES} a number, of which each device lacks the others' part. All-reduce adds {shape.hidden:,} numbers twice,"
        f" {shape.reduced_bytes():,} bytes, which travel to the device that adds and back. So exact bits cost"
        f" {shape.gathered_bytes() / (2 * shape.reduced_bytes()):.2f} times the bytes, and twice the exchanges. An exchange is assumed to"
        f" take {EXCHANGE_US} us and {NVLINK_GBPS} GB/s (data sheet); keys and values are those of {CONTEXT:,} tokens; nothing overlaps."
    )
