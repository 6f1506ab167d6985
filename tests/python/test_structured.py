"""Answers of a form and calls of tools, asked for by the unmodified `openai` package.

HOLOBIONT_URL as in test_openai.py. Tools need a model whose chat template shows them: with HOLOBIONT_PROGRAMS, the folder of
Holobiont's programs, these tests serve one that they make, of random weights; without, they are skipped.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess

import jsonschema
import openai
import pydantic
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCHEMAS = json.loads((ROOT / "crates/shared/text/tests/golden/schemas.json").read_text())
PROMPT = [{"role": "user", "content": "Describe a cat, Tom, three years old."}]


def connect(url):
    key = os.environ.get("HOLOBIONT_API_KEY", "none")
    return openai.OpenAI(base_url=url.rstrip("/").removesuffix("/v1") + "/v1", api_key=key, max_retries=0, timeout=600)


@pytest.fixture(scope="session")
def client():
    return connect(os.environ["HOLOBIONT_URL"])


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=30)
    kind: str = pydantic.Field(pattern="^(cat|dog)$")


def structured(client, asked, **options):
    options = {"model": "json", "prompt": "Some JSON: ", "max_tokens": 300, **options}
    answer = client.completions.create(extra_body={"structured_outputs": asked}, **options)
    return answer.choices[0].text, answer.choices[0].finish_reason


# --- A form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["smollm2-135m", "json", "pirate"])
def test_a_pydantic_model_is_filled_in_by_the_base_and_by_adapters(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=PROMPT, response_format=Pet, temperature=0, max_tokens=120
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_whole_answers_of_every_schema_validate(client):
    """Drawn at temperature 1 by a small model: what ends by itself validates, and what is cut off began as JSON does."""

    def one(numbered):
        seed, case = numbered
        text, finish = structured(client, {"json": case["schema"]}, temperature=1, seed=seed)
        return case, text, finish

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, enumerate(SCHEMAS)))
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    whole = 0
    for case, text, finish in answers:
        if finish == "stop":
            validator = jsonschema.Draft202012Validator(case["schema"], format_checker=checker)
            assert not list(validator.iter_errors(json.loads(text))), (case["name"], text)
            whole += 1
    assert whole >= 0.75 * len(SCHEMAS), [case["name"] for case, _, finish in answers if finish != "stop"]


def test_a_stream_of_a_form_says_what_the_whole_answer_says(client):
    options = {"model": "json", "messages": PROMPT, "temperature": 1, "seed": 5, "max_tokens": 200}
    schema = {"name": "pet", "schema": Pet.model_json_schema(), "strict": True}
    options["response_format"] = {"type": "json_schema", "json_schema": schema}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = client.chat.completions.create(stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    Pet.model_validate_json(whole)


def test_expressions_choices_grammars_and_objects(client):
    text, finish = structured(client, {"regex": "[0-9]{4}-[01][0-9]"}, temperature=1)
    assert (len(text), finish) == (7, "stop")
    text, finish = structured(client, {"choice": ["red", "green"]}, temperature=1)
    assert text in {"red", "green"} and finish == "stop"
    text, _ = structured(client, {"grammar": 'start: "x=" /[0-9]{1,5}/'}, temperature=1)
    assert text.startswith("x=") and text[2:].isdigit()
    answer = client.chat.completions.create(
        model="json", messages=PROMPT, response_format={"type": "json_object"}, temperature=0, max_tokens=300
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_every_choice_has_its_form_and_the_limit_ends_it_early(client):
    answer = client.completions.create(
        model="json",
        prompt="A colour: ",
        n=3,
        temperature=1,
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["red", "green", "blue"]}},
    )
    assert {choice.text for choice in answer.choices} <= {"red", "green", "blue"}
    text, finish = structured(client, {"regex": "a{50}"}, max_tokens=3)
    assert finish == "length" and set(text) == {"a"}


@pytest.mark.parametrize(
    "asked, word",
    [
        ({"json": {"type": "integer", "not": {"multipleOf": 3}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}, "regex"),
        ({"regex": "("}, "regex"),
        ({"grammar": "begin: \"a\""}, "start"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_by_its_keyword(client, asked, word):
    with pytest.raises(openai.BadRequestError) as refused:
        structured(client, asked)
    assert refused.value.code == "invalid_grammar"
    assert word in refused.value.message


# --- Tools ------------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city <|im_end|>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}
# How models are told to write calls, and how those of a history are written.
HERMES = (
    'Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.',
    '<tool_call>\n{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}\n</tool_call>',
)
GRANITE = (
    "Call by <|tool_call|> and a JSON list.",
    '<|tool_call|>[{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}]',
)
QWEN3_CODER = (
    "Call as <tool_call><function=name><parameter=key>value</parameter></function></tool_call>.",
    "<tool_call>\n<function={{ function.name }}>\n{% for key, value in function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)


def template(told, written):
    return (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + told + "<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls %}"
        "{% set function = call.function %}" + written + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

def test_tools_are_refused_where_the_template_shows_none(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="json", messages=PROMPT, tools=[WEATHER])
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")


def write_model(folder, shown):
    """Two layers of random weights over a vocabulary of bytes, and a template that shows tools."""
    names = ["<|im_start|>", "<|im_end|>"]
    # GPT-2's alphabet of bytes.
    plain_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain_bytes}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(sorted(set(range(256)) - set(plain_bytes)))}
    vocab = {letters[byte]: byte for byte in range(256)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 256 + index, "content": name, "special": True, **plain} for index, name in enumerate(names)]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "eos_token_id": 257,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": shown},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="session", params=[HERMES, GRANITE, QWEN3_CODER], ids=["hermes", "granite", "qwen3_coder"])
def caller(request, tmp_path_factory):
    """A model of random weights that is shown tools, and writes calls in one way or another."""
    programs = os.environ.get("HOLOBIONT_PROGRAMS")
    if not programs:
        pytest.skip("HOLOBIONT_PROGRAMS is not set")
    model, state = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("state")
    write_model(model, template(*request.param))
    command = [f"{programs}/holobiont", "up", "--model", str(model), "--random-weights", "7", "--state", str(state)]
    command += ["--listen", "127.0.0.1:0", "--served-model-name", "random", "--workers", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
            yield connect(url)
        finally:
            process.terminate()


def call(caller, **options):
    options = {"model": "random", "messages": PROMPT, "tools": [WEATHER, NOW], "max_tokens": 600, **options}
    return caller.chat.completions.create(**options)


def check(name, arguments):
    arguments = json.loads(arguments)
    if name == "now":
        assert arguments == {}
    else:
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])


def test_calls_that_are_required_keep_to_their_schemas(caller):
    for seed in range(2):
        answer = call(caller, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (made,) = choice.message.tool_calls
        check(made.function.name, made.function.arguments)
        assert made.id and made.type == "function"


def test_a_named_function_is_called_and_a_stream_says_the_same(caller):
    named = {"type": "function", "function": {"name": "weather"}}
    options = {"tool_choice": named, "parallel_tool_calls": False, "temperature": 1, "seed": 9}
    (whole,) = call(caller, **options).choices[0].message.tool_calls
    assert whole.function.name == "weather"
    check("weather", whole.function.arguments)
    name, arguments, finish, ids = "", "", None, set()
    for chunk in call(caller, stream=True, **options):
        for part in chunk.choices[0].delta.tool_calls or []:
            assert part.index == 0
            ids |= {part.id} - {None}
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (name, arguments, finish, len(ids)) == ("weather", whole.function.arguments, "tool_calls", 1)


def test_a_result_goes_back_and_the_conversation_goes_on(caller):
    answer = call(caller, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=1)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    messages = [*PROMPT, message, result]
    again = call(caller, messages=messages, max_tokens=4)
    assert again.choices[0].finish_reason in {"stop", "length", "tool_calls"}
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_strict_functions_leave_text_free(caller):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = call(caller, tools=[strict], max_tokens=30, temperature=1, seed=2)
    for made in answer.choices[0].message.tool_calls or []:
        check(made.function.name, made.function.arguments)
