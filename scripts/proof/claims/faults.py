"""Faults of the papers, each shown by an experiment beside what is mended."""

from proof.claim import Claim, Group
from proof.commands import tests
from proof.claims.elora import COMPARED
from proof.readings import passed, variant
from proof.rules import above, exactly


def shown(id, text, source, *names):
    return Claim(id, text, source, tests(*names, model="none"), passed, "% of tests", exactly(100), quick=True)


def eq5(scenario):
    return Claim(
        id=f"fault-eq5-{scenario}",
        text=f"With Eq. 5 as printed, first tokens take longer than with the cost of one block, scenario {scenario}.",
        source="Holobiont, against ELORA, section VI.B",
        command=COMPARED[scenario],
        read=variant("eq5-printed", "ttft_ms"),
        unit="times ELORA",
        rule=above(1),
        quick=True,
    )


GROUP = Group(
    title="Faults in the papers",
    about="A claim here is ours: the experiment shows the fault, and that the mended form does not have it.",
    claims=(
        shown(
            "fault-algorithm-1",
            "Algorithm 1 multiplies by the number of requests, so an idle executor costs nothing, even one that misses the SLO target.",
            "Holobiont, against CaraServe, section 5.2",
            "an_idle_executor_is_free_as_printed_and_not_when_mended",
            "scores_and_choices_are_those_of_an_independent_implementation",
        ),
        shown(
            "fault-eq4",
            "Eq. 4 has the wrong sign: while too few adapters are on the device, an adapter leaves before a KV block.",
            "Holobiont, against ELORA, section VI.B",
            "below_what_is_required_a_block_leaves_before_an_adapter_and_as_printed_after_it",
        ),
        shown(
            "fault-eq5",
            "Eq. 5 keeps large nodes longer, although their eviction frees more.",
            "Holobiont, against ELORA, section VI.B",
            "what_is_large_stays_longer_only_as_printed",
        ),
        *(eq5(scenario) for scenario in COMPARED),
        Claim(
            id="fault-eq4-idle",
            text="Eq. 4 changes nothing where running sequences pin their adapters: as printed, or left out, it gives the same times.",
            source="Holobiont, against ELORA, section VI.A",
            command=COMPARED["chat"],
            read=variant("eq4-printed", "ttft_ms"),
            unit="times ELORA",
            rule=exactly(1),
            quick=True,
        ),
        shown(
            "fault-threshold",
            "Eq. 3 as printed verifies each token alone after one wrong first token.",
            "Holobiont, against EdgeLLM, section III.C",
            "as_printed_one_wrong_first_token_undoes_all_that_was_learned",
        ),
    ),
)
