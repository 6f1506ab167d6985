"""The `tinker` package, unmodified, against a running Holobiont that trains.

HOLOBIONT_URL must serve SmolLM2-135M-Instruct and have trainers. Tokens are the tests' own: no tokenizer is fetched.
"""

import os
import urllib.request

os.environ["TINKER_TELEMETRY"] = "0"

import numpy  # noqa: E402
import openai  # noqa: E402
import pytest  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

KEY = "tml-" + os.environ.get("HOLOBIONT_API_KEY", "none")
URL = os.environ["HOLOBIONT_URL"].rstrip("/").removesuffix("/v1")
TEXTS = [[1, 504, 3575, 282, 4649, 314, 7042, 30, 216, 33], [57, 4093, 28, 905, 314, 260, 3575, 282, 4649, 47, 2]]
ADAM = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)


@pytest.fixture(scope="module", autouse=True)
def clean():
    """Takes away what was trained here: other tests look at all there is."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    before = {card.id for card in client.models.list()}
    yield
    for card in client.models.list():
        if card.id not in before:
            client.models.delete(card.id)


@pytest.fixture
def service():
    """A session of each test: its end frees the trainers."""
    with tinker.ServiceClient(base_url=URL, api_key=KEY) as client:
        yield client


@pytest.fixture(scope="session")
def base():
    models = tinker.RestClient(base_url=URL, api_key=KEY).get_server_capabilities().result().supported_models
    assert [model.trainable for model in models] == [True]
    return models[0].model_name


@pytest.fixture
def train(service, base):
    """Begins a model."""

    def begin(**options):
        return service.create_lora_training_client(base_model=base, **{"rank": 8, "seed": 7, **options}).result()

    return begin


def datum(tokens, **inputs):
    inputs = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


MASK = types.TensorData(data=[1.0] * 9, dtype="float32", shape=[9])
DATA = [datum(tokens) for tokens in TEXTS]


def logprobs(result):
    return [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]


def step(client, data=DATA, loss="cross_entropy", config=None, adam=ADAM):
    """Both are under way before either is waited for."""
    evaluated, stepped = client.forward_backward(data, loss, config), client.optim_step(adam)
    stepped_metrics = stepped.result().metrics
    assert stepped_metrics["grad_norm:mean"] > 0
    return evaluated.result()


def same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right):
        numpy.testing.assert_array_equal(one, other)


def test_supervised_steps_lower_the_loss_and_the_adapter_is_served(train, base):
    client = train()
    assert client.get_info().lora_rank == 8
    losses = [step(client).metrics["loss:sum"] for _ in range(8)]
    assert losses[-1] < losses[0] / 2, losses
    path = client.save_weights_for_sampler("pirate").result().path
    run = path.split("/")[2]
    ours = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    answer = ours.completions.create(
        model=f"tinker-{run}-pirate", prompt=[TEXTS[0]], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    served = answer.choices[0].logprobs.token_logprobs[1 : len(TEXTS[0])]
    trained = logprobs(client.forward(DATA[:1], "cross_entropy").result())[0]
    same([numpy.float32(served)], [trained])


def test_what_is_sampled_scored_and_trained_on_has_the_same_bits(train):
    client = train()
    step(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = TEXTS[0][:4]
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[])
    sampled = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=params).result()
    for sequence in sampled.sequences:
        whole = [*prompt, *sequence.tokens]
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
        trained = logprobs(client.forward([datum(whole)], "cross_entropy").result())[0]
        assert scored[0] is None and len(sequence.tokens) == 12
        same([numpy.float32(scored[1:])], [trained])
        same([numpy.float32(sequence.logprobs)], [trained[len(prompt) - 1 :]])


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("dro", {"beta": 0.01}),
    ],
)
def test_a_reward_rises(train, loss, config):
    """The reward is to say one token: the policy is sampled from, and learns from what it said."""
    client, prompt, wanted = train(rank=4), TEXTS[0][:5], TEXTS[0][5]

    def reward():
        return float(logprobs(client.forward([datum([*prompt, wanted])], "cross_entropy").result())[0][-1])

    before = reward()
    for round_ in range(3):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=round_, stop=[])
        said = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=8, sampling_params=params).result()
        actions = [(sequence.tokens[0], sequence.logprobs[0]) for sequence in said.sequences]
        # What the policy would rarely say is said for it, with the probability that it has.
        actions.append((wanted, reward()))
        quiet = [0.0] * (len(prompt) - 1)
        data = [
            datum([*prompt, token], logprobs=[*quiet, logprob], advantages=[*quiet, 1.0 if token == wanted else -0.1])
            for token, logprob in actions
        ]
        metrics = step(client, data, loss, config).metrics
        assert all(name.endswith(":sum") for name in metrics)
        # Whoever samples and whoever learns agree to the last bit.
        assert metrics["sampling_minus_learned:sum"] == 0
    assert reward() > before


def test_training_that_goes_on_from_a_saved_state_ends_where_it_would_have_ended(train, service):
    client = train()
    step(client)
    path = client.save_state("first").result().path
    step(client)
    through = logprobs(client.forward(DATA, "cross_entropy").result())
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().lora_rank == 8
    step(resumed)
    same(logprobs(resumed.forward(DATA, "cross_entropy").result()), through)
    # Without the optimizer's numbers it goes elsewhere.
    anew = service.create_training_client_from_state(path).result()
    step(anew)
    assert any((one != other).any() for one, other in zip(logprobs(anew.forward(DATA, "cross_entropy").result()), through))


def test_what_is_kept_is_listed_and_taken_away(train):
    client, rest = train(), tinker.RestClient(base_url=URL, api_key=KEY)
    state = client.save_state("first").result().path
    sampler = client.save_weights_for_sampler("pirate").result().path
    run = state.split("/")[2]
    by_name = [rest.get_training_run(run), rest.get_training_run(client.model_id)]
    for found in [*by_name, rest.get_training_run_by_tinker_path(state)]:
        found = found.result()
        assert (found.training_run_id, found.lora_rank, found.is_lora) == (run, 8, True)
        assert (found.last_checkpoint.tinker_path, found.last_sampler_checkpoint.tinker_path) == (state, sampler)
        assert found.last_request_time.year > 2024
    assert run in [found.training_run_id for found in rest.list_training_runs(limit=1000).result().training_runs]
    kept = rest.list_checkpoints(run).result().checkpoints
    assert {(one.tinker_path, one.checkpoint_type) for one in kept} == {(state, "training"), (sampler, "sampler")}
    assert all(one.size_bytes > 0 and one.time.year > 2024 for one in kept)
    mine = rest.list_user_checkpoints(limit=1, offset=0).result()
    assert len(mine.checkpoints) == 1 and mine.cursor.total_count >= 2
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed) == (8, True, True, True)
    rest.delete_checkpoint(run, "weights/first").result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    assert rest.list_checkpoints(run).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(state).result()


def test_data_in_chunks_give_the_gradients_of_one_request(train, service):
    data = [datum(TEXTS[number % 2][: 4 + number % 5]) for number in range(9)]
    whole, cut = train(), train()
    holder = cut.holder
    one = step(whole, data)
    config = holder._client_config
    holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": 4})
    try:
        three = step(cut, data)
    finally:
        holder._client_config = config
    same(logprobs(one), logprobs(three))
    same(logprobs(whole.forward(data, "cross_entropy").result()), logprobs(cut.forward(data, "cross_entropy").result()))


def test_what_cannot_be_done_is_refused_by_name_and_the_model_goes_on(train, base):
    client = train()
    refusals = [
        (lambda: client.forward_backward(DATA, "gspo"), "gspo"),
        (lambda: client.forward_backward([datum(TEXTS[0], weights=[1.0] * 9, mask=MASK)], "cross_entropy"), "mask"),
        (lambda: client.forward_backward(DATA, "ppo", {"clip": 1.0}), "clip"),
        (lambda: client.forward_backward([datum([1, 10**6])], "cross_entropy"), "vocabulary"),
        (lambda: client.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate"),
        (lambda: client.save_state("../elsewhere"), "name"),
        (lambda: client.forward_backward([datum(TEXTS[0], weights=[float("nan")] * 9)], "cross_entropy"), "number"),
    ]
    before = logprobs(client.forward(DATA, "cross_entropy").result())
    for ask, word in refusals:
        with pytest.raises(tinker.RequestFailedError, match=word) as failed:
            ask().result()
        assert failed.value.category == types.RequestErrorCategory.User
    same(logprobs(client.forward(DATA, "cross_entropy").result()), before)
    # What was gathered in vain has left nothing behind.
    step(client)


def test_states_and_samplers_that_are_not_there_are_not_found(service):
    with pytest.raises(tinker.RequestFailedError, match="no state"):
        service.create_training_client_from_state("tinker://nobody-0/weights/none").result()
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path="tinker://nobody-0/sampler_weights/none").result()


def test_clients_that_send_json_are_told_to_upgrade():
    request = urllib.request.Request(
        f"{URL}/api/v1/forward_backward", b"{}", {"Content-Type": "application/json", "X-API-Key": KEY}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 415 and b"upgrade tinker" in refused.value.read()
