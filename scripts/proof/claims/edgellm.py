"""EdgeLLM: token trees, adaptive verification, and drafting while weights are read."""

from proof.claim import Chart, Claim, Group
from proof.commands import NotHere, bench, tests
from proof.readings import passed, row
from proof.rules import at_least, exactly

STREAMED = bench("stream", "--runs", "1")
# Shares of draft tokens that are right: those of Table I.
CORRECT = {"iwslt": 0.816, "cnn-dm": 0.907, "squad": 0.899, "truthfulqa": 0.871}


def faster(id, name, pattern, paper, least, source="EdgeLLM, section IV.C", correct=CORRECT["squad"]):
    return Claim(
        id=id,
        text=f"A token comes {paper:g} times as fast as {name}; half of the weights fit in memory, {correct:g} of draft tokens are right.",
        source=source,
        command=STREAMED,
        read=row(f"^50 % of memory, draft right {correct}: a token$", pattern),
        unit="times as fast",
        rule=at_least(least),
        paper=paper,
        label=name,
    )


GROUP = Group(
    title="EdgeLLM",
    about=(
        "Half of the weights are in memory, and an emulated disk reads 400 MiB/s, so that reading takes at least 95 % of a sweep."
        " The drafter is planted: a known share of its tokens is right, as in the paper's Table I."
        " Where the paper gives a range, its lower end is the paper's figure here."
    ),
    charts=(
        Chart("L-20", "Speed over baselines, drafts right at 0.899 of positions"),
        Chart("L-24", "Speed over EdgeLLM without a part"),
    ),
    claims=(
        Claim(
            id="L-20-lossless",
            text="Answers with draft tokens are the target's own, token for token (Table IV: Rouge-L of 100).",
            source="EdgeLLM, section IV.B",
            command=tests(
                "whatever_is_drafted_a_request_gets_what_it_would_get_alone",
                "drafted_answers_are_those_of_plain_decoding_token_for_token",
            ),
            read=passed,
            unit="% of tests",
            rule=exactly(100),
            paper=100,
            quick=True,
        ),
        faster("L-20-std", "load, then compute (Std)", r"\(Std\)", 2.9, 2.9),
        faster("L-20-spl", "the layer pipeline (SPL)", r"\(SPL\)", 2.9, 2.5),
        faster("L-20-sp", "chains of 5 (SP)", r"^chains of 5 ", 1.34, 1.3),
        faster("L-20-si", "2 branches of 6 (SI)", r"\(SI\)", 1.42, 1.15),
        faster("L-20-bld", "Big Little (BLD)", r"BLD", 1.1, 1.1),
        Claim(
            id="L-20-devices",
            text="On four phones and IoT boards a token takes 0.86 s at best, and needs 3.2 to 8.0 times less energy.",
            source="EdgeLLM, sections IV.C and IV.E",
            command=NotHere("needs the paper's devices"),
        ),
        faster("L-24-tree", "without the tree", "without the tree", 1.4, 1.05, "EdgeLLM, section IV.H"),
        faster("L-24-ahead", "without drafting ahead", "without drafting ahead", 1.51, 1.05, "EdgeLLM, section IV.H"),
        faster("L-24-threshold", "without a threshold", "without a threshold", 1.08, 1.05, "EdgeLLM, section IV.H"),
        Claim(
            id="L-24-budget",
            text="The gain over chains grows as memory shrinks: from 1.76 to 1.91 times on a TX2 with 6 and 4 GB.",
            source="EdgeLLM, section IV.D",
            command=STREAMED,
            read=row(f"draft right {CORRECT['squad']}: gain over chains of 5"),
            unit="times the gain at a half",
            rule=at_least(1.0),
            paper=1.09,
            label="a quarter instead of a half",
        ),
    ),
)
