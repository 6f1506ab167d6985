"""Symbiosis: clients that rent the base's layers."""

from proof.claim import Chart, Claim, Figure, Group
from proof.commands import NotHere, bench, tests
from proof.readings import ours, passed, row, share
from proof.rules import at_least, at_most, exactly

JOBS = bench("tune", "--runs", "1")
BATCHING = bench("split-batching", "--runs", "3")
MASKING = bench("split-masking", "--runs", "3")
CLIENTS = "8 clients of 2 to 256 rows"


def jobs_in_two_bases(line):
    """Jobs that fit where two jobs with a base each fit, from the memory of four jobs and of one."""
    fit = lambda four, one: 1 + one / ((four - one) / 3)  # noqa: E731
    (low, high), (least, most) = line["ours_range"], line["peer_range"]
    return Figure(fit(line["ours"], line["peer"]), fit(high, least), fit(low, most), line["runs"])


def batching(id, words, figure, peer, rule, paper):
    """Opportunistic batching beside another policy."""
    return Claim(
        id=id,
        text=f"Opportunistic batching {words}.",
        source="Symbiosis, section 4.5, Table 5",
        command=BATCHING,
        read=row(f"^{CLIENTS}, {figure}", f"^{peer}$"),
        unit="times as good",
        rule=rule,
        paper=paper,
        label=f"{figure}, beside {peer}",
    )


GROUP = Group(
    title="Symbiosis",
    about=(
        "Clients and executor are processes of this machine that share its two cores. The paper's figures are of GPUs;"
        " its Table 5 has eight clients of 2 to 256 rows, as here."
    ),
    charts=(Chart("S-19", "Opportunistic batching beside other policies"),),
    claims=(
        Claim(
            id="S-14-clients",
            text="Five fine-tuning jobs share the memory that two jobs with a base each would take.",
            source="Symbiosis, section 4.1.2",
            command=JOBS,
            read=row("^memory of all processes of 4 jobs at once$", read=jobs_in_two_bases),
            unit="jobs",
            rule=at_least(5),
            paper=5,
        ),
        Claim(
            id="S-14-executor",
            text="The base executor's memory hardly grows with the number of jobs.",
            source="Symbiosis, section 4.1.2",
            command=JOBS,
            read=row("^memory of the executor under 4 jobs at once$", read=share),
            unit="times that with one job",
            rule=at_most(1.05),
            paper=1,
        ),
        Claim(
            id="S-14-context",
            text="A split client's context takes no memory of the executor.",
            source="Symbiosis, section 3.2",
            command=tests("a_client_with_a_long_context_leaves_the_executors_memory_flat"),
            read=passed,
            unit="% of tests",
            rule=exactly(100),
            quick=True,
        ),
        Claim(
            id="S-14-gpu",
            text="The same on one GPU of 80 GB with Llama-2-13B.",
            source="Symbiosis, section 4.1",
            command=NotHere("needs a GPU"),
        ),
        batching("S-19-rate-none", "computes 1.10 times as much as no batching", "throughput", "none", at_least(1.05), 1.10),
        batching("S-19-rate-lockstep", "computes 1.17 times as much as lockstep", "throughput", "lockstep", at_least(1.1), 1.17),
        batching("S-19-pass-none", "passes 1.32 times as fast as without batching", "a pass", "none", at_least(1.18), 1.32),
        batching("S-19-pass-lockstep", "passes 2.08 times as fast as lockstep", "a pass", "lockstep", at_least(1.67), 2.08),
        Claim(
            id="S-19-batch",
            text="A batch has 3.7 calls on average; without batching 1, in lockstep 8.",
            source="Symbiosis, section 4.5, Table 5",
            command=BATCHING,
            read=row("^8 clients, calls computed together$", "^none$", ours),
            unit="calls a batch",
            rule=at_least(1.85),
            paper=3.7,
            label="calls a batch",
        ),
        Claim(
            id="S-20-cost",
            text="Masking costs a client little: at most 15 % of a token's time over the network (the checklist's bound).",
            source="Symbiosis, section 4.6, Fig. 23",
            command=MASKING,
            read=row("masking paper", "linear path", share),
            unit="times unmasked",
            rule=at_most(1.15),
        ),
        Claim(
            id="S-20-likeliest",
            text="Masked rows lead to the same likeliest tokens as bare ones.",
            source="Symbiosis, section 3.8",
            command=tests("obfuscated_rows_lead_to_the_same_likeliest_tokens"),
            read=passed,
            unit="% of tests",
            rule=exactly(100),
            quick=True,
        ),
    ),
)
