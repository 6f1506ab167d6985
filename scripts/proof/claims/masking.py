"""What an executor learns of a split client: attacks that must succeed on the paper's masking, and fail on ours."""

from proof.claim import Claim, Group
from proof.commands import SMOLLM2, tests
from proof.readings import passed, printed
from proof.rules import at_least, at_most, exactly

PAPER = "Holobiont, against Symbiosis, section 3.8"
SOUND = "Holobiont"


def attack(id, text, name, pattern, unit, rule, source=PAPER):
    """An attack by the test of this name, which prints the figure."""
    command = tests(name, model=SMOLLM2, seed="noises are drawn anew", needs_model=True)
    return Claim(id, text, source, command, printed(pattern), unit, rule)


def sound(id, text, *names):
    command = tests(*names, model=SMOLLM2, seed="pads are drawn anew", needs_model=True)
    return Claim(id, text, SOUND, command, passed, "% of tests", exactly(100))


GROUP = Group(
    title="Masking",
    about=(
        "An executor that answers correctly and keeps what it saw attacks a client of SmolLM2-135M with a LoRA of rank 8."
        " The paper's masking adds noises whose effects the executor computed. Our modes are secret sharing and one-time pads."
    ),
    claims=(
        attack(
            "masking-T0",
            "Without masking the executor reads the prompt.",
            "an_executor_reads_the_prompt_of_a_client_without_masking_t0",
            r"T0, off, \w+: ([\d.]+) %",
            "% of tokens",
            exactly(100),
        ),
        attack(
            "masking-T1",
            "The executor recognises the noise of each row among 2, and among 64, that it has seen.",
            "an_executor_recognises_every_noise_it_has_seen_t1",
            r"T1, \d+ noises: ([\d.]+) %",
            "% of rows",
            at_least(99),
        ),
        attack(
            "masking-T1-prompt",
            "The executor takes the recognised noises away and reads the prompt.",
            "an_executor_that_recognised_the_noises_takes_them_away_and_reads_the_prompt_t1",
            r"T0 after T1: ([\d.]+) % of",
            "% of tokens",
            exactly(100),
        ),
        attack(
            "masking-T2",
            "Rows that share a noise give it away to an executor that never saw the noise.",
            "rows_that_share_a_noise_give_it_away_to_somebody_who_never_saw_it_t2",
            r"T2, \d+ rows: ([\d.]+) % of the tokens",
            "% of tokens",
            exactly(100),
        ),
        attack(
            "masking-T3",
            "A secret combination of fewer noises than dimensions leaves enough of each row to read all tokens.",
            "a_secret_combination_of_fewer_noises_than_dimensions_leaves_the_rest_bare_t3",
            r"T3, \d+ noises: to [\d.e-]+, ([\d.]+) % of the tokens",
            "% of tokens",
            exactly(100),
        ),
        attack(
            "masking-T3-weights",
            "As many noises as dimensions tell the client the weights, so it needs no executor.",
            "as_many_noises_as_dimensions_are_the_weights_themselves_t3",
            r"T3, \d+ noises: the weights to ([\d.e-]+)",
            "relative error",
            at_most(1e-3),
        ),
        attack(
            "masking-T4",
            "First tokens give the adapter's change of the value projection away, with the paper's masking and without.",
            "first_tokens_give_the_adapters_value_projection_away_t4",
            r"T4, [\w, ]+, layer \d+: rank 8, error ([\d.e-]+)",
            "relative error",
            at_most(1e-3),
        ),
        attack(
            "masking-T0-gradients",
            "Gradients at the head tell what a client trains, once the noises are recognised.",
            "an_executor_reads_what_a_client_learns_to_say_from_gradients_at_the_head_t0_and_t1",
            r"T0 after T1, gradients: ([\d.]+) %",
            "% of tokens",
            exactly(100),
        ),
        sound(
            "masking-sound-shares",
            "With secret sharing, neither of two executors learns anything by these attacks.",
            "one_of_two_executors_learns_nothing_by_any_attack",
        ),
        sound(
            "masking-sound-pads",
            "With one-time pads, an executor learns nothing by these attacks.",
            "an_executor_learns_nothing_of_rows_under_pads_by_any_attack",
            "equal_rows_are_told_from_others_only_where_nothing_covers_them_t1",
            "gradients_at_the_head_do_not_tell_what_is_learned",
        ),
        sound(
            "masking-collusion",
            "Two executors that put together what they saw read everything: secret sharing needs two operators.",
            "two_executors_that_put_together_what_they_saw_read_everything",
        ),
    ),
)
