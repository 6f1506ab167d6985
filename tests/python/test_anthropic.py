"""The `anthropic` package, unmodified, against a running Holobiont.

HOLOBIONT_URL and HOLOBIONT_PROGRAMS as in test_structured.py; the adapters pirate and json must be served.
"""

import asyncio
import os

import anthropic
import jsonschema
import pytest

from test_structured import WEATHER, Pet, caller, client  # noqa: F401 (fixtures)

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
FUNCTION = WEATHER["function"]
TOOL = {"name": FUNCTION["name"], "description": "The weather.", "input_schema": FUNCTION["parameters"]}


def options(url, key):
    return {"base_url": str(url).rstrip("/").removesuffix("/v1"), "api_key": key, "max_retries": 0, "timeout": 600}


@pytest.fixture(scope="session")
def served():
    return options(os.environ["HOLOBIONT_URL"], os.environ.get("HOLOBIONT_API_KEY", "none"))


@pytest.fixture(scope="session")
def claude(served):
    return anthropic.Anthropic(**served)


@pytest.fixture(scope="session")
def tools(caller):
    """A model of random weights that is shown tools."""
    return anthropic.Anthropic(**options(caller.base_url, caller.api_key))


def ask(claude, model=MODEL, sampling=GREEDY, **more):
    return claude.messages.create(**{"model": model, "max_tokens": 16, "messages": QUESTION, "extra_body": sampling, **more})


def total(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


@pytest.mark.parametrize("model", [MODEL, "pirate", "pirate:0.7+json:0.3"])
@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1, "seed": 7}])
def test_a_message_says_what_a_chat_says(claude, client, model, sampling):
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, **sampling)
    message = ask(claude, model, sampling)
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert [block.text for block in message.content] == [chat.choices[0].message.content]
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[chat.choices[0].finish_reason]
    assert (total(message.usage), message.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert message.id.startswith("msg_") and message._request_id


def test_a_stream_says_what_a_message_says(claude):
    whole = ask(claude)
    request = {"model": MODEL, "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY}
    with claude.messages.stream(**request) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert (total(final.usage), final.usage.output_tokens) == (total(whole.usage), whole.usage.output_tokens)
    assert stream.request_id
    types = [event.type for event in claude.messages.create(stream=True, **request)]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[2:-3]) == {"content_block_delta"}


def test_the_async_client_gets_the_same(served, claude):
    async def both():
        async with anthropic.AsyncAnthropic(**served) as client:
            request = {"model": MODEL, "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY}
            whole = await client.messages.create(**request)
            async with client.messages.stream(**request) as stream:
                return whole, await stream.get_final_message()

    expected = ask(claude).content[0].text
    for message in asyncio.run(both()):
        assert message.content[0].text == expected


def test_a_message_that_is_begun_is_continued(claude):
    whole = ask(claude, max_tokens=14).content[0].text
    begun = ask(claude, max_tokens=6).content[0].text
    rest = ask(claude, max_tokens=8, messages=[*QUESTION, {"role": "assistant", "content": begun}])
    assert begun + rest.content[0].text == whole


def test_an_answer_says_why_it_ended(claude):
    assert ask(claude, max_tokens=2).stop_reason == "max_tokens"
    text = ask(claude).content[0].text
    word = text.split()[2]
    cut = ask(claude, stop_sequences=["never said", word])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert cut.content[0].text == text[: text.index(word)]


def test_no_tokens_only_fill_the_prefix_cache(claude):
    system = "You know every capital of the world, and you answer in one short sentence. " * 8
    filled = ask(claude, system=system, max_tokens=0)
    assert (filled.content, filled.stop_reason, filled.usage.output_tokens) == ([], "max_tokens", 0)
    assert ask(claude, system=system).usage.cache_read_input_tokens > 64


def test_counted_tokens_are_those_of_the_message(claude, client, tools):
    asked = {"messages": QUESTION, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
    assert claude.messages.count_tokens(model=MODEL, **asked).input_tokens == total(ask(claude, **asked).usage)
    message = ask(tools, "random", {}, tools=[TOOL], max_tokens=1)
    assert tools.messages.count_tokens(model="random", messages=QUESTION, tools=[TOOL]).input_tokens == total(message.usage)
    response = client.responses.create(model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=1)
    counted = client.responses.input_tokens.count(model=MODEL, input="Hello", instructions="Be brief.")
    assert counted.input_tokens == response.usage.input_tokens


def test_a_form_is_filled_in(claude):
    request = {"model": "json", "max_tokens": 120, "extra_body": GREEDY, "output_format": Pet}
    request["messages"] = [{"role": "user", "content": "Describe a cat, Tom, three years old."}]
    whole = claude.messages.parse(**request)
    assert isinstance(whole.parsed_output, Pet)
    with claude.messages.stream(**request) as stream:
        assert stream.get_final_message().parsed_output == whole.parsed_output


def test_calls_that_are_required_keep_to_their_schemas(tools):
    for more in ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, {"tool_choice": {"type": "tool", "name": "weather"}}):
        message = ask(tools, "random", {"temperature": 1, "seed": 1}, tools=[TOOL], max_tokens=600, **more)
        assert message.stop_reason == "tool_use"
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls and len({call.id for call in calls}) == len(calls)
        for call in calls:
            jsonschema.validate(call.input, TOOL["input_schema"])
    request = {"model": "random", "max_tokens": 600, "messages": QUESTION, "tools": [TOOL], "tool_choice": more["tool_choice"]}
    with tools.messages.stream(extra_body={"temperature": 1, "seed": 1}, **request) as stream:
        final = stream.get_final_message()
    inputs = [block.input for block in message.content if block.type == "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == inputs


def test_the_tool_runner_runs_functions_and_sends_their_results(tools):
    asked = []

    @anthropic.beta_tool
    def temperature(city: str) -> str:
        """Tells the temperature of a city."""
        asked.append(city)
        return "15 degrees"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    temperature.input_schema.clear()
    temperature.input_schema.update(schema | {"additionalProperties": False})
    runner = tools.beta.messages.tool_runner(
        model="random", max_tokens=600, messages=QUESTION, tools=[temperature], tool_choice=choice, max_iterations=2,
        extra_body={"temperature": 1, "seed": 3},
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert set(asked) <= {"Rome", "Oslo"} and asked
    assert total(messages[1].usage) > total(messages[0].usage), "the second request has the first call and its result"


def test_models_are_listed(claude):
    models = list(claude.models.list(limit=2))
    assert {MODEL, "pirate", "json"} <= {model.id for model in models}
    assert models[0].id == MODEL and models[0].created_at.year > 2000 and models[0].max_input_tokens > 0
    assert claude.models.retrieve("pirate").display_name == "pirate"


def test_failures_are_of_the_classes_that_anthropics_servers_cause(claude):
    for refused, more, word in (
        (anthropic.NotFoundError, {"model": "claude-sonnet"}, MODEL),
        (anthropic.BadRequestError, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (anthropic.BadRequestError, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "a " * 9000}]}, "context"),
        (anthropic.BadRequestError, {"inference_geo": "us"}, "inference_geo"),
    ):
        with pytest.raises(refused) as error:
            ask(claude, **more)
        assert word in error.value.api_message and error.value.request_id, error.value
        assert error.value.body["error"]["type"] == error.value.type
    assert ask(claude, thinking={"type": "adaptive"}).content, "the model decides how much it thinks"
