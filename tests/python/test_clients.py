"""Token ids, embeddings and the Responses API asked by the unmodified `openai` package, and Ollama's routes by the unmodified `ollama` package.

HOLOBIONT_URL and HOLOBIONT_PROGRAMS as in test_structured.py; SmolLM2 alone is enough.
"""

import json
import os

import jsonschema
import ollama
import openai
import pytest

from test_structured import NOW, WEATHER, Pet, caller, client  # noqa: F401 (fixtures)

MODEL = "smollm2-135m"
QUESTION = "Name a colour."
FLAT = {"type": "function", **WEATHER["function"], "strict": True}


@pytest.fixture(scope="session")
def plain():
    key = os.environ.get("HOLOBIONT_API_KEY", "none")
    url = os.environ["HOLOBIONT_URL"].rstrip("/").removesuffix("/v1")
    return ollama.Client(host=url, headers={"authorization": f"Bearer {key}"}, timeout=600)


# --- Token ids and embeddings -----------------------------------------------------------------------------------


def test_token_ids_can_be_sent_again(client):
    options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    first = client.completions.create(prompt="The sky is", extra_body={"return_token_ids": True, "prompt_logprobs": 1}, **options)
    choice = first.choices[0]
    assert len(choice.token_ids) == first.usage.completion_tokens and len(choice.prompt_token_ids) == first.usage.prompt_tokens
    assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids) and choice.prompt_logprobs[0] is None
    for token, scores in zip(choice.prompt_token_ids[1:], choice.prompt_logprobs[1:]):
        assert scores[str(token)]["logprob"] <= 0
    again = client.completions.create(prompt=choice.prompt_token_ids, **options)
    assert again.choices[0].text == choice.text
    pieces = client.completions.create(prompt="The sky is", stream=True, extra_body={"return_token_ids": True}, **options)
    pieces = [piece.choices[0] for piece in pieces]
    assert pieces[0].prompt_token_ids == choice.prompt_token_ids
    assert [token for piece in pieces for token in getattr(piece, "token_ids", [])] == choice.token_ids


def test_an_answer_that_is_continued_is_the_answer(client):
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"model": MODEL, "temperature": 0, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    whole = client.chat.completions.create(messages=asked, max_tokens=14, **options).choices[0].message.content
    begun = client.chat.completions.create(messages=asked, max_tokens=6, **options).choices[0].message.content
    options["extra_body"] |= {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*asked, {"role": "assistant", "content": begun}]
    rest = client.chat.completions.create(messages=messages, max_tokens=8, **options).choices[0].message.content
    assert whole.startswith(begun) and begun + rest == whole


def test_embeddings_of_openai_and_ollama_are_the_same(client, plain):
    texts = ["a colour of the sky", "the sky's colour", "a recipe for bread"]
    answer = client.embeddings.create(model=MODEL, input=texts)
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    vectors = [item.embedding for item in answer.data]
    assert vectors == [item.embedding for item in floats.data] and answer.usage.prompt_tokens > 8
    assert all(abs(sum(value * value for value in vector) - 1) < 1e-4 for vector in vectors)
    theirs = plain.embed(MODEL, texts)
    assert [list(map(float, row)) for row in theirs.embeddings] == [item.embedding for item in floats.data]
    mean = client.embeddings.create(model=MODEL, input=texts, extra_body={"pooling": "mean"}).data
    assert all(len(item.embedding) == len(last) and item.embedding != last for item, last in zip(mean, vectors))
    one = client.embeddings.create(model=MODEL, input=texts[2]).data[0].embedding
    assert one == vectors[2], "nobody else in the list changes a vector"
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input="a", dimensions=8)
    assert refused.value.param == "dimensions"


# --- The Responses API ------------------------------------------------------------------------------------------


def test_a_response_says_what_a_chat_says(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    answer = client.responses.create(
        model=MODEL, instructions="Be brief.", input=QUESTION, temperature=0, max_output_tokens=12, metadata={"a": "b"}
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert answer.metadata == {"a": "b"}
    if chat.choices[0].finish_reason == "length":
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    else:
        assert answer.status == "completed"


def test_a_stream_of_a_response_says_what_the_whole_says(client):
    options = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    whole = client.responses.create(**options)
    kinds, numbers, text = [], [], ""
    for event in client.responses.create(stream=True, **options):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text and numbers == list(range(len(numbers)))
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    assert event.response.output_text == whole.output_text
    assert event.response.usage.total_tokens == whole.usage.total_tokens


def test_a_conversation_goes_on_where_it_was(client):
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=8)
    again = client.responses.create(
        model=MODEL, input="Another.", previous_response_id=first.id, temperature=0, max_output_tokens=8
    )
    whole = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Another."},
    ]
    told = client.responses.create(model=MODEL, input=whole, temperature=0, max_output_tokens=8, store=False)
    assert (told.output_text, told.usage.input_tokens) == (again.output_text, again.usage.input_tokens)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = list(client.responses.input_items.list(again.id, order="asc", limit=1))
    assert [item.role for item in items] == ["user", "assistant", "user"], "all pieces of the list"
    client.responses.delete(first.id)
    for gone in (first.id, told.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


def test_a_pydantic_model_is_filled_in(client):
    options = {"model": MODEL, "input": "Describe a cat, Tom.", "text_format": Pet, "temperature": 0, "max_output_tokens": 120}
    answer = client.responses.parse(**options)
    assert answer.status == "completed" and isinstance(answer.output_parsed, Pet)
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


@pytest.mark.parametrize(
    "options, param",
    [({"background": True}, "background"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"truncation": "auto"}, "truncation")],
)
def test_what_is_not_had_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="a", **options)
    assert refused.value.param == param


def test_a_function_is_called_and_its_result_goes_back(caller):
    options = {"model": "random", "input": QUESTION, "tools": [FLAT], "parallel_tool_calls": False}
    options |= {"tool_choice": {"type": "function", "name": "weather"}, "temperature": 1, "max_output_tokens": 600}
    seed = {"seed": 9}
    answer = caller.responses.create(extra_body=seed, **options)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "weather")
    jsonschema.validate(json.loads(call.arguments), FLAT["parameters"])
    arguments = ""
    for event in caller.responses.create(stream=True, extra_body=seed, **options):
        arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
    assert arguments == call.arguments == event.response.output[0].arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    rest = {"model": "random", "tools": [FLAT], "max_output_tokens": 4}
    again = caller.responses.create(previous_response_id=answer.id, input=[result], **rest)
    whole = caller.responses.create(input=[{"role": "user", "content": QUESTION}, call, result], **rest)
    assert again.usage.input_tokens == whole.usage.input_tokens > answer.usage.input_tokens


# --- Ollama's routes --------------------------------------------------------------------------------------------


def test_a_chat_of_ollamas_says_what_a_chat_says(client, plain):
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    options = {"temperature": 0, "num_predict": 12}
    whole = plain.chat(MODEL + ":latest", messages, options=options)
    assert whole.message.content == chat.choices[0].message.content
    assert (whole.prompt_eval_count, whole.eval_count) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert whole.done_reason == chat.choices[0].finish_reason
    assert whole.total_duration == whole.load_duration + whole.prompt_eval_duration + whole.eval_duration > 0
    parts = list(plain.chat(MODEL, messages, options=options, stream=True, keep_alive="5m"))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done and not any(part.done for part in parts[:-1])


def test_a_prompt_of_ollamas_raw_or_in_a_turn(client, plain):
    options = {"temperature": 0, "num_predict": 8}
    raw = client.completions.create(model=MODEL, prompt="The sky is", temperature=0, max_tokens=8)
    assert plain.generate(MODEL, "The sky is", raw=True, options=options).response == raw.choices[0].text
    whole = plain.generate(MODEL, QUESTION, system="Be brief.", options=options)
    parts = plain.generate(MODEL, QUESTION, system="Be brief.", options=options, stream=True)
    assert "".join(part.response for part in parts) == whole.response
    assert plain.generate(MODEL, "").done_reason == "load"


def test_a_form_of_ollamas(plain):
    messages = [{"role": "user", "content": "Describe a cat, Tom."}]
    schema = {**Pet.model_json_schema(), "additionalProperties": False}
    answer = plain.chat(MODEL, messages, format=schema, options={"temperature": 0, "num_predict": 120})
    Pet.model_validate_json(answer.message.content)


def test_tools_of_ollamas(caller):
    host = str(caller.base_url).removesuffix("/v1/")
    plain = ollama.Client(host=host, timeout=600)
    messages = [{"role": "user", "content": QUESTION}]
    called = ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Rome", "days": 2})
    history = [
        *messages,
        ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall(function=called)]),
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    options = {"num_predict": 4}
    short = plain.chat("random", messages, tools=[WEATHER, NOW], options=options)
    long = plain.chat("random", history, tools=[WEATHER, NOW], options=options)
    assert long.prompt_eval_count > short.prompt_eval_count
    assert plain.show("random").capabilities == ["completion", "embedding", "tools"]


def test_models_of_ollamas_and_what_is_refused(plain):
    (base,) = [model for model in plain.list().models if model.model == MODEL]
    assert base.size > 0 and len(base.digest) == 64 and base.modified_at
    assert MODEL in {model.model for model in plain.ps().models}
    shown = plain.show(MODEL)
    assert shown.modelinfo["llama.context_length"] > 0
    assert (shown.details.family, shown.details.quantization_level) == ("llama", "Q4_1")
    for refused in (
        lambda: plain.pull("llama3"),
        lambda: plain.create("mine", from_=MODEL),
        lambda: plain.delete(MODEL),
        lambda: plain.chat(MODEL, [{"role": "user", "content": "a"}], options={"mirostat": 2}),
        lambda: plain.chat("none", [{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(ollama.ResponseError) as error:
            refused()
        assert error.value.error and not error.value.error.startswith("{"), error.value.error
