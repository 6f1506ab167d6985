"""ELORA: one pool of KV cache and adapters, and its cost model for eviction."""

from proof.claim import Chart, Claim, Group
from proof.commands import NotHere, simulator
from proof.readings import peak_beside, variant
from proof.rules import at_least, exactly, half_of_the_effect

RATES = {"chat": "1.78", "translation": "9.6", "agents": "5.6"}
COMPARED = {
    scenario: simulator("compare", "--scenario", scenario, "--adapters", "100", "--rate", rate) for scenario, rate in RATES.items()
}
PEAKS = simulator("peak", "--scenario", "chat", "--adapters", "100", "--variants", "elora,static,no-history", seeds=5)

# Each variant by its name in the simulator: what it leaves out or is, and the paper's time to first token over ELORA's.
ABLATIONS = {
    "wom": ("without dependencies (WOM)", 1.51),
    "lru": ("least recently used (WOS)", 1.42),
    "wol": ("without Eq. 4 (WOL)", 1.21),
    "woc": ("without the cost (WOC)", 1.19),
    "wov": ("without visits (WOV)", 1.25),
    "wou": ("without recency (WOU)", 1.21),
    "bfs": ("whole branches (BFS)", 2.29),
    "rrip": ("RRIP", 1.35),
}


def beside(id, name, metric, scenario, paper, what, source="ELORA, section VIII.B", quick=True):
    """The metric of a variant over ELORA's, seed by seed."""
    return Claim(
        id=id,
        text=f"{what} is {paper:g} times that of ELORA, scenario {scenario}.",
        source=source,
        command=COMPARED[scenario],
        read=variant(name, metric),
        unit="times ELORA",
        rule=half_of_the_effect(paper),
        paper=paper,
        # Off the chart: at this rate a cache without history is overloaded, and its times have no bound.
        label="" if (name, scenario) == ("no-history", "agents") else f"{name}, {scenario}",
        quick=quick,
    )


def ablation(name, scenario):
    words, paper = ABLATIONS[name]
    id = f"E-23-{name}" + ("" if scenario == "chat" else f"-{scenario}")
    what = f"The time to first token {words}"
    return beside(id, name, "ttft_ms", scenario, paper, what, "ELORA, sections VIII.E to VIII.H", scenario == "chat")


def peak(id, name, words, paper):
    return Claim(
        id=id,
        text=f"ELORA's highest load with first tokens below 500 ms is {paper:g} times that of {words}, scenario chat.",
        source="ELORA, section VIII.B",
        command=PEAKS,
        read=peak_beside(name),
        unit="times the other's",
        rule=at_least(1 + (paper - 1) / 2),
        paper=paper,
        label=words,
    )


GROUP = Group(
    title="ELORA",
    about=(
        "The simulator runs the code of Holobiont's cache and scheduler on a virtual clock, at 80 % of the highest load."
        " The paper's factors are means over all its scenarios. ELORA means its cost model with the faults below mended."
    ),
    charts=(
        Chart("E-22-first", "Time to first token, times ELORA's"),
        Chart("E-23-", "Time to first token of ELORA without its parts, times ELORA's"),
    ),
    claims=(
        *(
            beside(f"E-22-first-static-{scenario}", "static", "ttft_ms", scenario, 1.84, "The time to first token of vLLM's divided memory")
            for scenario in RATES
        ),
        *(
            beside(f"E-22-first-no-history-{scenario}", "no-history", "ttft_ms", scenario, 1.76, "The time to first token of S-LoRA's cache")
            for scenario in RATES
        ),
        beside("E-22-p99-static", "static", "ttft_p99_ms", "chat", 3.82, "The 99th percentile of vLLM's first tokens"),
        beside("E-22-p99-no-history", "no-history", "ttft_p99_ms", "chat", 2.95, "The 99th percentile of S-LoRA's first tokens"),
        beside("E-22-token-static", "static", "tpot_ms", "chat", 1.61, "The time per token of vLLM's divided memory"),
        beside("E-22-token-no-history", "no-history", "tpot_ms", "chat", 1.46, "The time per token of S-LoRA's cache"),
        Claim(
            id="E-22-invalid",
            text="ELORA keeps no KV block whose adapter or prefix is gone, scenario translation.",
            source="ELORA, section VIII.E",
            command=COMPARED["translation"],
            read=variant("elora", "invalid_share", beside=False),
            unit="of the KV cache",
            rule=exactly(0),
            paper=0,
            quick=True,
        ),
        Claim(
            id="E-22-invalid-static",
            text="Of the KV cache of vLLM's divided memory 42.4 % are unusable, scenario translation.",
            source="ELORA, section VIII.E",
            command=COMPARED["translation"],
            read=variant("static", "invalid_share", beside=False),
            unit="of the KV cache",
            rule=at_least(0.2),
            paper=0.424,
            quick=True,
        ),
        peak("E-22-peak-static", "static", "vLLM's divided memory", 1.789),
        peak("E-22-peak-no-history", "no-history", "S-LoRA's cache", 1.499),
        Claim(
            id="E-22-npu",
            text="On NPUs first tokens come 49.4 to 69.8 % sooner, and the peak is 65.3 to 96.1 % higher.",
            source="ELORA, section VIII.K",
            command=NotHere("needs NPUs"),
        ),
        *(ablation(name, scenario) for scenario in RATES for name in ABLATIONS),
        Claim(
            id="E-23-hawkeye",
            text="The caches Hawkeye and HALP take 1.38 and 1.41 times ELORA's time to first token.",
            source="ELORA, section VIII.H",
            command=NotHere("neither policy is built"),
        ),
        beside("E-28-prefill-static", "static", "prefill_tokens", "chat", 1.38, "The number of prompt tokens that vLLM computes"),
        beside("E-28-prefill-no-history", "no-history", "prefill_tokens", "chat", 1.87, "The number of prompt tokens that S-LoRA computes"),
    ),
)
