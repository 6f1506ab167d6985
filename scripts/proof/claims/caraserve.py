"""CaraServe: cold starts on CPU workers, and rank-aware routing."""

from proof.claim import Chart, Claim, Group
from proof.commands import NotHere, bench, simulator
from proof.readings import gain, policy, row, share
from proof.rules import at_least, at_most, within

STARTS = bench("cold-start", "--link", "busy", "--runs", "2")
STEPS = bench("decode-modes", "--runs", "5")
ROUTES = {kernel: simulator("fleet", "--kernels", kernel) for kernel in ("true-rank", "padded")}
OVERLOADED = simulator("fleet", "--executors", "8", "--rate", "60", "--max-requests", "1200", "--duration", "60", "--warmup", "0",
                       "--kernels", "padded")  # fmt: skip


def first_token(id, mode, cell, paper, rule):
    """How long first tokens take in a mode, relative to those of adapters that are all on the device."""
    words = "CPU assistance" if mode == "cpu-assist" else "waiting for adapters"
    text = f"Under {cell} load and with {words}, the first token takes {paper:g} times as long as with every adapter on the device."
    read = row(f"^{cell},.*first token, mean, {mode}$", "cached", share)
    return Claim(id, text, "CaraServe, section 7.2", STARTS, read, "times cached", rule, paper, f"{mode}, {cell}")


def faster(id, other, kernel, paper):
    return Claim(
        id=id,
        text=f"Rank-aware routing shortens the time per token by {paper:g} % of {other}'s, on 60 executors, kernel {kernel}.",
        source="CaraServe, section 7.5, Fig. 19",
        command=ROUTES[kernel],
        read=gain(other, kernel),
        unit="% shorter",
        rule=at_least(paper / 2),
        paper=paper,
        label=f"{other}, {kernel}",
        quick=kernel == "true-rank",
    )


GROUP = Group(
    title="CaraServe",
    about=(
        "Cold starts run on this machine: a core for the base, a core for the worker, and an emulated link between host and device."
        " Routing runs in the simulator, with the paper's 60 servers and Llama-2-7B's times."
    ),
    charts=(
        Chart("C-20-first", "Time to first token of cold adapters, times that of cached ones"),
        Chart("C-23-gain", "Time per token that rank-aware routing saves, %"),
    ),
    claims=(
        first_token("C-20-first-light", "cpu-assist", "light", 1.01, at_most(1.22)),
        first_token("C-20-first-saturated", "cpu-assist", "saturated", 1.22, at_most(1.22)),
        first_token("C-20-first-skewed", "cpu-assist", "skewed", 1.07, at_most(1.22)),
        first_token("C-20-first-light-waiting", "on-demand", "light", 1.42, at_least(1.4)),
        first_token("C-20-first-saturated-waiting", "on-demand", "saturated", 5.12, at_least(4)),
        Claim(
            id="C-20-latency",
            text="Under saturated load, requests take 1.38 times as long on demand as with CPU assistance.",
            source="CaraServe, section 7.2",
            command=STARTS,
            read=row("^saturated,.*request latency, mean, cpu-assist$", "on-demand"),
            unit="times cpu-assist",
            rule=at_least(1.25),
            paper=1.38,
        ),
        Claim(
            id="C-20-step",
            text="A decode step takes as long with CPU assistance as with every adapter on the device (Fig. 11).",
            source="CaraServe, section 7.2, Fig. 11",
            command=STEPS,
            read=row("all arrived, cpu-assist$", "cached", share),
            unit="times cached",
            rule=within(1, 0.05),
            paper=1,
        ),
        Claim(
            id="C-20-gpu",
            text="The same table on the paper's hardware, an NVIDIA A10 with Llama-2-7B.",
            source="CaraServe, section 7.2",
            command=NotHere("needs a GPU; docs/performance/gpu.md has an H100's figures"),
        ),
        Claim(
            id="C-23-attainment",
            text="Rank-aware routing lets 99 % of requests meet their SLO target, on 60 executors, kernel true-rank.",
            source="CaraServe, section 7.5, Fig. 19",
            command=ROUTES["true-rank"],
            read=policy("rank-aware", "attainment"),
            unit="of requests",
            rule=at_least(0.98),
            paper=0.99,
            quick=True,
        ),
        Claim(
            id="C-23-attainment-padded",
            text="Rank-aware routing lets 99 % of requests meet their SLO target, on 60 executors, kernel padded.",
            source="CaraServe, section 7.5, Fig. 19",
            command=ROUTES["padded"],
            read=policy("rank-aware", "attainment", "padded"),
            unit="of requests",
            rule=at_least(0.98),
            paper=0.99,
        ),
        Claim(
            id="C-23-testbed",
            text="On 8 overloaded executors 80 % of requests meet their SLO target, kernel padded.",
            source="CaraServe, section 7.5, Fig. 20",
            command=OVERLOADED,
            read=policy("rank-aware", "attainment", "padded"),
            unit="of requests",
            rule=within(0.8, 0.1),
            paper=0.8,
            quick=True,
        ),
        faster("C-23-gain-most-idle", "most-idle", "true-rank", 16.1),
        faster("C-23-gain-random", "random", "true-rank", 18.8),
        faster("C-23-gain-first-fit", "first-fit", "true-rank", 36.4),
        faster("C-23-gain-first-fit-padded", "first-fit", "padded", 36.0),
    ),
)
