"""What people build upon `openai`, unmodified: instructor, litellm, langchain-openai, pydantic-ai. A scenario of each: it chats and
streams, has a form filled in, and calls a function. And `cohere`, which reranks.

HOLOBIONT_URL and HOLOBIONT_PROGRAMS as in ../python/test_structured.py; packages are those of scripts/clients-requirements.txt.
"""

import json
from typing import Literal

import cohere
import instructor
import jsonschema
import litellm
import openai
import pydantic
import pydantic_ai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from test_structured import WEATHER, Pet

QUESTION = "What is the capital of Japan?"
MESSAGES = [{"role": "user", "content": QUESTION}]
DESCRIBE = "Describe a cat, Tom, three years old."
SHORT = {"temperature": 0, "max_tokens": 12}
FORM = {"temperature": 0, "max_tokens": 120}
# One call, drawn by a model of random weights: its end is its schema's alone.
DRAWN = {"temperature": 1, "max_tokens": 600, "seed": 3}


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=7)


@pytest.fixture(scope="module")
def said(client):
    """What `openai` itself hears from an adapter."""
    return client.chat.completions.create(model="pirate", messages=MESSAGES, **SHORT).choices[0].message.content


def test_instructor_fills_in_forms_whole_and_in_parts_and_by_calls(served, tools):
    options = {"model": "json", "messages": [{"role": "user", "content": DESCRIBE}], "response_model": Pet, "max_retries": 1}
    by_schema = instructor.from_openai(openai.OpenAI(**served), mode=instructor.Mode.JSON_SCHEMA)
    pet = by_schema.chat.completions.create(**options, **FORM)
    assert isinstance(pet, Pet)
    *_, last = by_schema.chat.completions.create_partial(**options, **FORM)
    assert last.model_dump() == pet.model_dump()
    by_call = instructor.from_openai(openai.OpenAI(**tools), mode=instructor.Mode.TOOLS)
    options |= {"model": "random", "response_model": Weather, "parallel_tool_calls": False}
    assert isinstance(by_call.chat.completions.create(**options, **DRAWN), Weather)


def test_litellm_chats_streams_fills_in_forms_and_calls(served, tools, said):
    place = {"api_base": served["base_url"], "api_key": served["api_key"]}
    pirate = {"model": "openai/pirate", **place}
    whole = litellm.completion(messages=MESSAGES, **pirate, **SHORT)
    assert whole.choices[0].message.content == said
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **pirate, **SHORT))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    form = litellm.completion(messages=[{"role": "user", "content": DESCRIBE}], response_format=Pet, **pirate, **FORM)
    Pet.model_validate_json(form.choices[0].message.content)
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    place = {"api_base": tools["base_url"], "api_key": tools["api_key"]}
    called = litellm.completion(model="openai/random", messages=MESSAGES, **place, **options, **DRAWN)
    (call,) = called.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **(pirate | {"model": "openai/nobody"}))


def test_litellm_speaks_to_the_ollama_door_without_a_content_type(served, said):
    place = {"api_base": served["base_url"].removesuffix("/v1/").removesuffix("/v1"), "api_key": served["api_key"]}
    chat = litellm.completion(model="ollama_chat/pirate", messages=MESSAGES, **place, **SHORT)
    assert chat.choices[0].message.content == said
    generated = litellm.completion(model="ollama/pirate", messages=MESSAGES, **place, **SHORT)
    assert generated.choices[0].message.content


def test_litellm_speaks_anthropics_api(served, tools, said):
    place = {"api_base": served["base_url"].removesuffix("/v1/").removesuffix("/v1"), "api_key": served["api_key"]}
    pirate = {"model": "anthropic/pirate", "messages": MESSAGES, **place, **SHORT}
    whole = litellm.completion(**pirate)
    assert whole.choices[0].message.content == said
    chunks = litellm.completion(stream=True, **pirate)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    place = {"api_base": tools["base_url"].removesuffix("/v1/").removesuffix("/v1"), "api_key": tools["api_key"]}
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "max_tokens": 600}
    called = litellm.completion(model="anthropic/random", messages=MESSAGES, **place, **options)
    (call,) = called.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**(pirate | {"model": "anthropic/nobody"}))


def test_langchain_chats_streams_fills_in_forms_and_calls(served, tools, said):
    pirate = ChatOpenAI(model="pirate", **served, **SHORT)
    whole = pirate.invoke(QUESTION)
    assert whole.content == said and whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in pirate.stream(QUESTION)) == said
    # JSON without a schema ends only where its model ends it.
    describer = ChatOpenAI(model="json", **served, **FORM)
    for method in ("json_schema", "json_mode"):
        form = describer.with_structured_output(Pet if method == "json_schema" else None, method=method).invoke(DESCRIBE)
        assert isinstance(form, Pet if method == "json_schema" else dict)
    random = ChatOpenAI(model="random", **tools, **DRAWN)
    caller = random.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    answer = caller.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "Weather" and Weather(**call["args"])
    history = [HumanMessage(QUESTION), answer, ToolMessage("sunny", tool_call_id=call["id"])]
    again = random.bind_tools([Weather]).invoke(history, max_tokens=4)
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def test_pydantic_ai_chats_streams_fills_in_forms_and_runs_functions(served, tools, said):
    pirate = OpenAIChatModel("pirate", provider=OpenAIProvider(**served))
    agent = pydantic_ai.Agent(pirate, model_settings=SHORT)
    assert agent.run_sync(QUESTION).output == said
    assert "".join(agent.run_stream_sync(QUESTION).stream_text(delta=True)) == said
    form = pydantic_ai.Agent(pirate, output_type=pydantic_ai.NativeOutput(Pet), model_settings=FORM)
    assert isinstance(form.run_sync(DESCRIBE).output, Pet)

    random = OpenAIChatModel("random", provider=OpenAIProvider(**tools))
    settings = {**DRAWN, "parallel_tool_calls": False}
    guide = pydantic_ai.Agent(random, output_type=Weather, model_settings=settings, retries=20)
    asked = []

    @guide.tool_plain
    def temperature(city: Literal["Rome", "Oslo"]) -> str:
        asked.append(city)
        return "15 degrees"

    # Which function a model of random weights calls is chance: it goes on until it calls that of the result.
    for seed in range(12):
        result = guide.run_sync(QUESTION, model_settings={"seed": seed})
        assert isinstance(result.output, Weather)
        if asked:
            break
    assert asked, "no seed of twelve called the function"


def test_cohere_reranks_as_litellm_does(served):
    texts = ["Bread is made of flour.", "The capital of Japan is Tokyo.", "Tokyo"]
    url = served["base_url"].rstrip("/").removesuffix("/v1")
    answer = cohere.ClientV2(served["api_key"], base_url=url).rerank(model="pirate", query=QUESTION, documents=texts, top_n=2)
    scores = [result.relevance_score for result in answer.results]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)
    other = litellm.rerank(
        model="hosted_vllm/pirate", query=QUESTION, documents=texts, top_n=2, api_base=url, api_key=served["api_key"]
    )
    found = [(result["index"], result["relevance_score"]) for result in other.results]
    assert found == [(result.index, result.relevance_score) for result in answer.results]
