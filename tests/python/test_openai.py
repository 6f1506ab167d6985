"""The `openai` package, unmodified, against a running Holobiont.

HOLOBIONT_URL (for example http://127.0.0.1:8000) must serve SmolLM2-135M-Instruct with the adapters pirate, json and
haiku of `examples/adapters`; HOLOBIONT_API_KEY is sent if the server wants one.
"""

import json
import math
import os

import openai
import pytest

ADAPTERS = {"pirate", "json", "haiku"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The quick brown fox jumps over the lazy"
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="session")
def client():
    url = os.environ["HOLOBIONT_URL"].rstrip("/").removesuffix("/v1") + "/v1"
    key = os.environ.get("HOLOBIONT_API_KEY", "none")
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)


@pytest.fixture(scope="session")
def base(client):
    """The id of the one model that has no parent."""
    roots = [card.id for card in client.models.list() if not getattr(card, "parent", None)]
    assert len(roots) == 1, roots
    return roots[0]


def chat(client, model, **options):
    return client.chat.completions.create(model=model, messages=QUESTION, **{**GREEDY, **options})


def complete(client, model, **options):
    return client.completions.create(model=model, **{"prompt": PROMPT, **GREEDY, **options})


# --- Models -----------------------------------------------------------------------------------------------------


def test_adapters_are_models_whose_parent_is_the_base(client, base):
    cards = {card.id: card for card in client.models.list()}
    assert ADAPTERS <= set(cards)
    assert {cards[name].parent for name in ADAPTERS} == {base}
    assert all(card.object == "model" for card in cards.values())


def test_a_model_can_be_retrieved_by_its_name(client):
    card = client.models.retrieve("pirate")
    assert card.id == "pirate"


# --- Chat -------------------------------------------------------------------------------------------------------


def test_chat_answers_with_text_a_finish_reason_and_usage(client, base):
    answer = chat(client, base)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == base
    assert choice.message.role == "assistant"
    assert choice.message.content.strip()
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage.prompt_tokens > 20
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_token_limit_ends_an_answer_with_length(client, base):
    for limit in ({"max_tokens": 3}, {"max_tokens": openai.NOT_GIVEN, "max_completion_tokens": 3}):
        answer = chat(client, base, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


def test_a_stream_says_what_the_whole_answer_says_and_ends_with_usage(client, base):
    whole = chat(client, base)
    chunks = list(chat(client, base, stream=True, stream_options={"include_usage": True}))
    *spoken, last = chunks
    deltas = [chunk.choices[0] for chunk in spoken]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert deltas[0].delta.role == "assistant"
    assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
    assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.choices[0].finish_reason]
    assert deltas[-1].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage or last.usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in spoken)


def test_what_is_told_of_drafts_changes_no_stream_and_is_said_or_taken_back(client, base):
    prompt = "one two three four five six seven eight nine ten. " * 6
    options = {"prompt": prompt, "max_tokens": 60}
    plain = list(complete(client, base, stream=True, stream_options={"include_usage": True}, **options))
    asked = {"stream_options": {"include_usage": True, "provisional": True}}
    told = list(complete(client, base, stream=True, extra_body=asked, **options))

    def text(chunks):
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    assert text(told) == text(plain)
    assert told[-1].usage.completion_tokens == plain[-1].usage.completion_tokens == 60
    assert [c.finish_reason for chunk in told for c in chunk.choices if c.finish_reason] == ["length"]
    standing = ""
    for choice in (choice for chunk in told for choice in chunk.choices):
        extra = choice.model_extra
        if extra.get("retract"):
            assert 0 < extra["retract"]["characters"] <= len(standing)
            standing = standing[: -extra["retract"]["characters"]]
        if choice.text:
            assert choice.text.startswith(standing)
            standing = ""
        standing += (extra.get("provisional") or {"text": ""})["text"]
    assert standing == ""


def test_a_stream_without_the_option_has_no_usage_chunk(client, base):
    assert all(chunk.choices and chunk.usage is None for chunk in chat(client, base, stream=True))


def test_the_server_goes_on_after_a_reader_leaves_its_stream(client, base):
    before = chat(client, base).choices[0].message.content
    stream = chat(client, base, stream=True, max_tokens=200)
    next(iter(stream))
    stream.close()
    assert chat(client, base).choices[0].message.content == before


# --- Adapters ---------------------------------------------------------------------------------------------------


def test_an_adapter_changes_the_answer_and_says_its_name(client, base):
    plain = chat(client, base).choices[0].message.content
    answer = chat(client, "pirate")
    told = answer.choices[0].message.content
    assert answer.model == "pirate"
    assert told != plain
    assert any(word in told for word in ("Arr", "Ahoy", "Avast", "Yo ho", "Shiver", "Aye", " be "))


def test_the_json_adapter_answers_with_one_object(client):
    said = json.loads(chat(client, "json", max_tokens=40).choices[0].message.content)
    assert list(said) == ["answer"]


def test_an_adapter_streams_what_it_answers(client):
    whole = chat(client, "haiku", max_tokens=40).choices[0].message.content
    chunks = [c for c in chat(client, "haiku", max_tokens=40, stream=True) if c.choices]
    assert {chunk.model for chunk in chunks} == {"haiku"}
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    assert "\n" in whole


# --- Completions ------------------------------------------------------------------------------------------------


def test_a_completion_goes_on_from_its_prompt(client, base):
    answer = complete(client, base)
    assert answer.object == "text_completion"
    assert "dog" in answer.choices[0].text
    assert not answer.choices[0].text.startswith(PROMPT)


def test_prompts_may_be_many_and_may_be_token_ids(client, base):
    prompts = [PROMPT, "One, two, three,"]
    answer = complete(client, base, prompt=prompts)
    alone = [complete(client, base, prompt=p).choices[0].text for p in prompts]
    assert [c.index for c in answer.choices] == [0, 1]
    assert [c.text for c in answer.choices] == alone
    assert complete(client, base, prompt=[504, 2365, 6354, 16438], max_tokens=4).usage.prompt_tokens == 4


def test_a_completion_streams_what_it_answers(client, base):
    whole = complete(client, base).choices[0].text
    chunks = [c for c in complete(client, base, stream=True) if c.choices]
    assert "".join(c.choices[0].text for c in chunks) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] in (["stop"], ["length"])


def test_echo_gives_the_log_probabilities_of_the_prompt(client, base):
    choice = complete(client, base, echo=True, logprobs=2, max_tokens=1).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    starts = [sum(map(len, logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    assert logprobs.text_offset == starts


def test_a_token_is_as_likely_in_a_prompt_as_when_it_was_generated(client, base):
    generated = complete(client, base, logprobs=1, max_tokens=6).choices[0]
    scored = complete(client, base, prompt=PROMPT + generated.text, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert scored.logprobs.tokens[-6:] == generated.logprobs.tokens
    assert scored.logprobs.token_logprobs[-6:] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-4)


def test_echo_without_new_tokens_scores_a_prompt(client, base):
    answer = complete(client, base, echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens


def test_completion_logprobs_name_the_greedy_token_as_the_likeliest(client, base):
    answer = complete(client, base, logprobs=3, max_tokens=6)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == answer.usage.completion_tokens
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == value == max(top.values())


# --- Log-probabilities of chats ---------------------------------------------------------------------------------


def test_chat_logprobs_cover_every_token_and_add_up(client, base):
    answer = chat(client, base, logprobs=True, top_logprobs=5)
    entries = answer.choices[0].logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.removesuffix("<|im_end|>") == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-4


def test_streamed_logprobs_are_those_of_the_whole_answer(client, base):
    options = {"logprobs": True, "top_logprobs": 2}
    whole = chat(client, base, **options).choices[0].logprobs.content
    chunks = chat(client, base, stream=True, **options)
    streamed = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == whole


# --- Sampling ---------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_samples_again(client, base):
    wild = {"temperature": 1.3, "max_tokens": 24}
    once = chat(client, base, seed=7, **wild).choices[0].message.content
    assert chat(client, base, seed=7, **wild).choices[0].message.content == once
    assert any(chat(client, base, seed=s, **wild).choices[0].message.content != once for s in (8, 9, 10))


def test_n_asks_for_that_many_different_choices(client, base):
    answer = complete(client, base, n=3, temperature=1.5, seed=3, prompt="My favourite thing is")
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1


def test_a_stop_string_ends_an_answer_just_before_it(client, base):
    whole = complete(client, base).choices[0].text
    middle = whole[len(whole) // 3 : len(whole) // 3 + 5]
    answer = complete(client, base, stop=[middle, "never said"])
    assert answer.choices[0].text == whole[: whole.index(middle)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = complete(client, base, stop=middle, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == answer.choices[0].text


def test_logit_bias_can_forbid_a_token(client, base):
    answer = chat(client, base, max_tokens=1, logit_bias={"504": -100})
    assert not answer.choices[0].message.content.startswith("The")


# --- Errors -----------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, "no-such-adapter")
    assert caught.value.code == "model_not_found"
    assert "no-such-adapter" in caught.value.message


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        ("prediction", {"type": "content", "content": "a"}),
    ],
)
def test_a_parameter_that_is_not_honoured_is_refused_by_name(client, base, parameter, value):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, base, **{parameter: value})
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == parameter


def test_a_field_nobody_knows_is_refused_by_name(client, base):
    with pytest.raises(openai.BadRequestError, match="max_tokenz"):
        chat(client, base, extra_body={"max_tokenz": 5})


@pytest.mark.parametrize(
    ("parameter", "value"), [("temperature", -1), ("top_p", 1.5), ("n", 0), ("top_logprobs", 1000)]
)
def test_a_value_out_of_range_is_refused_by_name(client, base, parameter, value):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, base, **{"logprobs": True, parameter: value})
    assert caught.value.param == parameter


def test_a_prompt_longer_than_the_context_is_refused(client, base):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, base, prompt="word " * 20_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_refused_stream_is_an_error_before_it_starts(client):
    with pytest.raises(openai.NotFoundError):
        chat(client, "no-such-adapter", stream=True)
