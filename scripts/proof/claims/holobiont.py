"""What Holobiont claims of itself."""

from proof.claim import Claim, Group
from proof.commands import MODEL, PEER, SMOLLM2, NotHere, Program, bench, simulator, tests
from proof.readings import ours, passed, row, share, single
from proof.rules import at_least, at_most, exactly, within

US = "Holobiont"
PRIVATE = bench("split-masking", "--runs", "3")
FAIRNESS = bench("fairness", "--runs", "1")
RECEIPTS = bench("receipts", "--runs", "3")
TRAINING = bench("tune", "--runs", "1", needs_peft=True)
WITH_ADAPTERS = ("bench", "--model", MODEL, "--streams", "8", "--adapters", "8", "--rank", "16", "--prompt", "16", "--generate", "64")


def shown(id, text, *names, quick=True, **fields):
    """A claim that tests show or do not."""
    return Claim(id, text, US, tests(*names, **fields), passed, "% of tests", exactly(100), quick=quick)


def private(mode, paper_pattern, what, least):
    """The speed of a private path as a share of that without privacy."""
    return Claim(
        id=f"private-{mode}-{what.split()[-1]}",
        text=f"With masking {mode}, {what} has at least {least:g} of the speed without masking.",
        source=US,
        command=PRIVATE,
        read=row(paper_pattern, "masking off, fast path"),
        unit="of the speed",
        rule=at_least(least),
    )


GROUP = Group(
    title="Holobiont",
    about=(
        "Tests show claims of correctness, on tiny models with golden values of transformers and PEFT, or on SmolLM2-135M where a"
        " claim's file says so. Figures of speed are this machine's."
    ),
    claims=(
        shown(
            "bits-company",
            "A request has the same bits alone and among others, in any chunks, on one thread and two, cached and computed anew.",
            "a_request_among_fifteen_others_on_other_adapters_has_the_bits_it_has_alone",
            "a_prompt_in_chunks_has_the_bits_it_has_in_one_piece",
            "a_cached_prefix_is_not_computed_again_and_changes_nothing",
            "a_request_alone_and_among_fifteen_others_has_the_same_bits",
            "one_thread_in_small_chunks_and_two_threads_in_large_ones_have_the_same_bits",
            "a_prompt_from_the_prefix_cache_and_one_computed_anew_have_the_same_bits",
        ),
        shown(
            "bits-routes",
            "An answer has the same bits resident and split, over shared memory, sockets and TLS, and from a far executor.",
            "resident_and_split_answers_over_every_route_have_the_same_bits",
            "a_split_model_has_the_resident_bits_for_every_architecture_and_golden_adapter",
            "a_far_executor_answers_with_the_bits_of_a_near_one",
        ),
        shown(
            "bits-speculation",
            "Draft tokens change no bit of an answer.",
            "whatever_is_drafted_answers_have_the_bits_that_they_have_without",
            quick=False,
        ),
        shown(
            "bits-cold",
            "A cold adapter's answer has the same bits cached, on demand and computed by CPU workers.",
            "cached_on_demand_and_assisted_answers_have_the_same_bits",
        ),
        shown(
            "failover-executor",
            "An executor may be killed under streams: each goes on, on another executor, to the same bits.",
            "an_executor_may_die_under_streams_and_the_other_goes_on_to_the_same_bits",
            variables=("HOLOBIONT_EXECUTOR_KILLS=40",),
        ),
        shown(
            "failover-kills",
            "Of 100 kills of any process at any failpoint, none loses a token, an adapter or a request.",
            "processes_may_die_anywhere_and_no_token_adapter_or_request_is_lost",
            variables=("HOLOBIONT_KILLS=100",),
            quick=False,
        ),
        shown(
            "failover-jobs",
            "A training job whose processes are killed gives the adapter version of one that ran through.",
            "a_job_whose_trainer_and_executor_are_killed_gives_the_generation_of_one_that_ran_through",
            quick=False,
        ),
        shown(
            "isolation-tenants",
            "Tenants share no cached prefix, and files and jobs of a tenant are nobody else's.",
            "tenants_and_adapters_share_no_prefix",
            "what_belongs_to_a_tenant_is_nobody_elses",
        ),
        shown(
            "isolation-hostile",
            "Hostile requests and adapters are refused and change nobody else's tokens.",
            "hostile_requests_get_their_refusals_and_change_nobody_elses_tokens",
            "hostile_adapters_get_their_refusals_and_change_nobody_elses_tokens",
        ),
        Claim(
            id="isolation-goodput",
            text="Four tenants keep 95 % of their tokens beside one that asks ten times as much.",
            source=US,
            command=FAIRNESS,
            read=row("asks ten times as much: goodput", read=share),
            unit="of that alone",
            rule=at_least(0.95),
        ),
        Claim(
            id="isolation-first-token",
            text="The p99 of those four tenants' first tokens is at most 1.2 times as long.",
            source=US,
            command=FAIRNESS,
            read=row("asks ten times as much: p99 first token", read=share),
            unit="times that alone",
            rule=at_most(1.2),
        ),
        Claim(
            id="isolation-weights",
            text="Tenants of weights 1 and 3 whose requests always wait are served 1 to 3.",
            source=US,
            command=FAIRNESS,
            read=row("two tenants of weights", read=ours),
            unit="times the tokens",
            rule=within(3, 0.05),
        ),
        shown(
            "overload-burst",
            "A burst of 500 requests is served whole; in a lasting overload the excess is refused and the others wait little.",
            "a_burst_of_five_hundred_requests_is_served",
            "under_a_sustained_overload_most_are_refused_and_the_others_wait_for_few",
        ),
        Claim(
            id="overload-worlds",
            text="In 20,000 small fleets in which executors die and messages are lost, no request ends twice, waits in vain or is passed by.",
            source=US,
            command=simulator("worlds", seeds=20_000, quick_seeds=2_000),
            read=single("broken"),
            unit="broken invariants",
            rule=exactly(0),
            quick=True,
        ),
        shown(
            "cold-start-answers",
            "A cold adapter answers before it has arrived.",
            "a_cold_adapter_answers_before_it_has_arrived",
            quick=False,
        ),
        Claim(
            id="adapters-cost",
            text="Eight requests on eight LoRAs of q, k, v and o are decoded at 0.7 of the speed without adapters, over HTTP.",
            source=US,
            command=bench("adapters", "--peer", PEER, "--runs", "3"),
            read=row("^8 adapters beside 8 base streams, decode$"),
            unit="of the base's speed",
            rule=at_least(0.7),
        ),
        Claim(
            id="adapters-cost-all-layers",
            text="Eight streams on eight LoRAs of rank 16 on all linear layers run at 0.7 of the speed without adapters.",
            source=US,
            command=Program("base-executor", WITH_ADAPTERS, SMOLLM2, "fixed"),
            read=single("ratio"),
            unit="of the base's speed",
            rule=at_least(0.7),
        ),
        shown(
            "training-peft",
            "Losses and gradients are torch's and PEFT's, and a hundred steps of AdamW end where torch's end.",
            "loss_log_probabilities_and_gradients_are_those_of_torch",
            "losses_and_their_gradients_are_those_of_the_formulas",
            "a_hundred_steps_of_adamw_end_where_torchs_end",
            "schedules_are_those_of_transformers",
        ),
        shown(
            "training-peft-real",
            "Gradients of SmolLM2-135M are those of torch on its dequantized weights.",
            "gradients_of_the_real_model_are_those_of_torch_on_its_dequantized_weights",
            model=SMOLLM2,
            needs_model=True,
            quick=False,
        ),
        shown(
            "training-same",
            "A training job gives one adapter version by every route, on any number of threads and in any company.",
            "an_adapter_has_one_generation_by_every_route_and_door_on_any_threads_and_in_any_company",
            quick=False,
        ),
        Claim(
            id="training-speed",
            text="One fine-tuning job runs twice as fast as PEFT.",
            source=US,
            command=TRAINING,
            read=row("^one job, rank 8", "PEFT"),
            unit="times PEFT",
            rule=at_least(2.1),
        ),
        private("shares", "a token over loopback TLS, masking shares", "a token", 0.5),
        private("pads", "a token over loopback TLS, masking pads", "a token", 0.7),
        private("shares", "a prompt of .*, masking shares", "a prompt", 0.35),
        private("pads", "a prompt of .*, masking pads", "a prompt", 0.35),
        Claim(
            id="private-checked",
            text="Checking every answer of an executor leaves at least 0.95 of the speed without checks.",
            source=US,
            command=PRIVATE,
            read=row("path ring, checked", "path ring"),
            unit="of the speed",
            rule=at_least(0.95),
        ),
        shown(
            "receipts-forged",
            "A changed token, seed, adapter, weight or sampler field of a receipt is found, although the receipt is signed.",
            "one_changed_token_seed_adapter_weight_or_sampler_field_is_found_although_it_is_signed",
            "an_adapter_that_was_replaced_under_its_name_does_not_confirm_the_old_answer",
        ),
        shown(
            "receipts-many",
            "Of 200 answers no receipt fails, and none that is forged holds.",
            "of_many_answers_no_receipt_fails_and_no_forged_one_holds",
            variables=("HOLOBIONT_RECEIPTS=200",),
            quick=False,
        ),
        Claim(
            id="receipts-speed",
            text="A receipt of 256 greedy tokens is verified 8 times as fast as the answer was decoded.",
            source=US,
            command=RECEIPTS,
            read=row("^greedy: verification"),
            unit="times as fast",
            rule=at_least(8),
        ),
        Claim(
            id="receipts-speed-sampled",
            text="A receipt of 256 sampled tokens is verified 8 times as fast as the answer was decoded.",
            source=US,
            command=RECEIPTS,
            read=row("^sampled: verification"),
            unit="times as fast",
            rule=at_least(8),
        ),
        shown(
            "models-transformers",
            "Logits and greedy tokens of every family and adapter type are those of transformers and PEFT.",
            "every_model_and_adapter_gives_the_logits_and_tokens_of_transformers",
        ),
        Claim(
            id="adapters-cost-gpu",
            text="On a GPU, eight streams on eight adapters run at 89 % of the speed without adapters.",
            source=US,
            command=NotHere("needs a GPU; docs/performance/gpu.md has an H100's figures"),
        ),
    ),
)
