"""What the `openai` package, unmodified, is promised beyond good answers: keys, refusals, retries, and deaths.

These tests start deployments of their own. HOLOBIONT_PROGRAMS is the folder of the programs (`target/debug`), and
HOLOBIONT_TEST_MODEL the model (SmolLM2-135M-Instruct).
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import httpx2
import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
PROGRAMS = pathlib.Path(os.environ.get("HOLOBIONT_PROGRAMS") or TARGET / "debug")
MODEL = os.environ.get("HOLOBIONT_TEST_MODEL") or ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES = ROOT / "examples" / "adapters"
BASE = "smollm2-135m"
# Low enough to be met soon, high enough that the next request is let through two seconds later.
REQUESTS_PER_MIN = 30
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The quick brown fox jumps over the lazy"
GREEDY = {"temperature": 0, "max_tokens": 16}
WILD = {"temperature": 1.5, "max_tokens": 16}
# Nothing but its length ends it, so it can be interrupted.
LONG = {"temperature": 0.8, "seed": 5, "max_tokens": 96, "extra_body": {"ignore_eos": True}}
WATCHDOG_S = 300


class Deployment:
    """A running `holobiont up` with keys."""

    def __init__(self, place, *arguments, **settings):
        self.place = place
        self.key_file = place / "api-keys"
        self.keys = {name: self.add_key(name, role) for name, role in TENANTS.items()}
        command = ["--json", "up", "--listen", "127.0.0.1:0", "--model", MODEL, "--state", place / "state", *arguments]
        settings = {"SERVED_MODEL_NAME": BASE, "API_KEY_FILE": self.key_file, **settings}
        with open(place / "log", "w") as log:
            self.up = subprocess.Popen(
                [PROGRAMS / "holobiont", *command], env=self.environment(settings), stdout=subprocess.PIPE, stderr=log
            )
        greeting = self.up.stdout.readline()
        if not greeting:
            self.stop()
            pytest.fail(f"it did not start; its log:\n{(place / 'log').read_text()}")
        self.url = json.loads(greeting)["url"]

    def environment(self, settings):
        """Without the settings of whoever runs the tests."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("HOLOBIONT_")}
        settings = {f"HOLOBIONT_{name}": str(value) for name, value in settings.items()}
        return {**ours, "HOLOBIONT_HOME": str(self.place), **settings}

    def add_key(self, name, role):
        command = ["--json", "--quiet", "key", "add", "--role", role, "--file", self.key_file, name]
        program = PROGRAMS / "holobiont"
        added = subprocess.run([program, *command], env=self.environment({}), stdout=subprocess.PIPE, check=True)
        return json.loads(added.stdout)["key"]

    def client(self, name, **options):
        """The package's own client, with somebody's key."""
        options = {"api_key": self.keys.get(name, name), "max_retries": 0, "timeout": WATCHDOG_S, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def load(self, name, files, **options):
        """Loads an adapter as the administrator; returns its generation."""
        body = {"lora_name": name, "lora_path": str(EXAMPLES / files), **options}
        self.client("ops").post("/load_lora_adapter", body=body, cast_to=object)
        return self.client("ops").models.retrieve(name).adapter_generation

    def executor(self):
        """The id of the executor that runs now; None while it is started again."""
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, fields = stat.read_text().split("(", 1)[1].rsplit(") ", 1)
                state, parent = fields.split()[:2]
                if name == "base-executor" and int(parent) == self.up.pid and state != "Z":
                    return int(stat.parent.name)
        return None

    def kill_executor(self):
        process = self.executor()
        assert process, "the executor runs"
        os.kill(process, signal.SIGKILL)
        return process

    def stop(self):
        self.up.terminate()
        try:
            self.up.wait(WATCHDOG_S)
        finally:
            self.up.kill()
            self.up.stdout.close()


TENANTS = {"ops": "admin", "alice": "user", "bob": "user", "prometheus": "metrics"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """Everything but what ends a deployment is tested with this one."""
    running = Deployment(
        tmp_path_factory.mktemp("contracts"),
        f"--adapter=pirate={EXAMPLES / 'pirate'}",
        ADAPTER_ROOT=EXAMPLES,
        REQUESTS_PER_MIN_PER_ADAPTER=REQUESTS_PER_MIN,
        MAX_CRASHES_PER_MIN=100,
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def alice(deployment):
    return deployment.client("alice")


@pytest.fixture(scope="module")
def bob(deployment):
    return deployment.client("bob")


@pytest.fixture(scope="module")
def private(deployment):
    """The generation of an adapter that is alice's alone, under the name 'private'."""
    return deployment.load("private", "haiku", tenant="alice")


@contextlib.contextmanager
def counted(deployment, name, **options):
    """A client that keeps its requests, and the list of the answers they got."""
    answers = []
    with httpx2.Client(event_hooks={"response": [answers.append]}, timeout=WATCHDOG_S) as http:
        yield deployment.client(name, http_client=http, **options), answers


def chat(client, model=BASE, **options):
    return client.chat.completions.create(model=model, messages=QUESTION, **{**GREEDY, **options})


def complete(client, model=BASE, **options):
    return client.completions.create(model=model, **{"prompt": PROMPT, **GREEDY, **options})


def text(answer):
    """What a chat or a completion says."""
    choice = answer.choices[0]
    return choice.message.content if hasattr(choice, "message") else choice.text


# --- Keys -------------------------------------------------------------------------------------------------------


def test_no_key_and_a_wrong_key_are_authentication_errors(deployment):
    for key in ("hb-" + "x" * 43, "none"):
        with pytest.raises(openai.AuthenticationError) as caught:
            chat(deployment.client(key))
        assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("name", ["alice", "prometheus"])
def test_a_key_of_another_role_is_a_permission_error(deployment, name):
    with pytest.raises(openai.PermissionDeniedError) as caught:
        deployment.client(name).get("/lora_adapters", cast_to=object)
    assert caught.value.code == "insufficient_permissions"


def test_each_role_opens_its_own_routes(deployment, alice):
    assert text(chat(alice))
    metrics = {"authorization": f"Bearer {deployment.keys['prometheus']}"}
    assert "holobiont_" in httpx2.get(f"{deployment.url}/metrics", headers=metrics).text
    with pytest.raises(openai.PermissionDeniedError):
        chat(deployment.client("prometheus"))
    assert deployment.client("ops").get("/lora_adapters", cast_to=object)["object"] == "list"


def test_probes_and_the_description_of_the_routes_need_no_key(deployment):
    assert httpx2.get(f"{deployment.url}/ready").json() == {"status": "ready"}
    described = httpx2.get(f"{deployment.url}/openapi.json").json()
    assert described["openapi"].startswith("3.")
    assert "/v1/chat/completions" in described["paths"]
    page = httpx2.get(f"{deployment.url}/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")


# --- Adapters ---------------------------------------------------------------------------------------------------


def test_a_private_adapter_serves_its_tenant(private, alice):
    answer = chat(alice, "private")
    assert answer.model == "private"
    assert answer.model_extra["adapter_generation"] == private
    assert text(answer) != text(chat(alice))
    assert "private" in {card.id for card in alice.models.list()}


@pytest.mark.usefixtures("private")
def test_to_others_a_private_adapter_is_a_name_that_does_not_exist(alice, bob):
    assert "private" not in {card.id for card in bob.models.list()}
    asked = [lambda name: chat(bob, name), lambda name: chat(bob, name, stream=True), bob.models.retrieve]
    for ask in asked:
        refusals = []
        for name in ("private", "nothing"):
            with pytest.raises(openai.NotFoundError) as caught:
                ask(name)
            assert caught.value.code == "model_not_found"
            refusals.append(caught.value.response.text.replace(name, "NAME"))
        assert refusals[0] == refusals[1]
    assert alice.models.retrieve("private").id == "private"


def test_an_adapter_may_be_named_beside_the_model(alice):
    beside = chat(alice, extra_body={"adapter": "pirate"})
    assert text(beside) == text(chat(alice, "pirate"))
    assert text(beside) != text(chat(alice))


def test_every_answer_and_every_chunk_names_its_generation(alice):
    generation = alice.models.retrieve("pirate").adapter_generation
    assert re.fullmatch("[0-9a-f]{64}", generation)
    assert chat(alice, "pirate").model_extra["adapter_generation"] == generation
    assert complete(alice, "pirate").model_extra["adapter_generation"] == generation
    chunks = list(chat(alice, "pirate", stream=True))
    assert {chunk.model_extra["adapter_generation"] for chunk in chunks} == {generation}
    by_generation = chat(alice, extra_body={"adapter": {"generation": generation}})
    assert by_generation.model_extra["adapter_generation"] == generation


# --- Retries ----------------------------------------------------------------------------------------------------


def test_another_generation_than_the_one_asked_for_is_a_conflict_that_is_not_retried(deployment):
    with counted(deployment, "alice", max_retries=2) as (client, answers):
        with pytest.raises(openai.ConflictError) as caught:
            chat(client, "pirate", extra_body={"adapter": {"generation": "0" * 64}})
    assert caught.value.code == "generation_mismatch"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(answers) == 1


def test_who_asks_too_often_is_told_when_to_come_back_and_the_package_comes_back_then(deployment):
    deployment.load("limited", "json")
    with counted(deployment, "alice") as (client, _), pytest.raises(openai.RateLimitError) as caught:
        for _ in range(3 * REQUESTS_PER_MIN):
            complete(client, "limited", max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    wait_s = int(caught.value.response.headers["retry-after"])
    assert 1 <= wait_s <= 60 / REQUESTS_PER_MIN

    started = time.monotonic()
    with counted(deployment, "alice", max_retries=3) as (client, answers):
        while all(answer.status_code == 200 for answer in answers):
            assert complete(client, "limited", max_tokens=1).choices
    refused = [answer for answer in answers if answer.status_code == 429]
    assert answers[-1].status_code == 200, "the package got its answer in the end"
    asked_to_wait_s = sum(int(answer.headers["retry-after"]) for answer in refused)
    assert time.monotonic() - started >= asked_to_wait_s


# --- Deaths -----------------------------------------------------------------------------------------------------


def streamed(stream, after=0, then=lambda: None):
    """The text of a stream; calls `then` when `after` pieces have come. Also how many pieces there were."""
    pieces = []
    for chunk in stream:
        pieces += [choice.text for choice in chunk.choices if choice.text]
        if after and len(pieces) == after:
            after = 0
            then()
    return "".join(pieces), len(pieces)


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 0.7}], ids=["plain", "presence_penalty"])
def test_a_stream_outlives_the_executor_and_says_what_it_would_have_said(deployment, alice, options):
    whole = complete(alice, **LONG, **options)
    killed = []
    told, pieces = streamed(
        complete(alice, **LONG, **options, stream=True), 6, lambda: killed.append(deployment.kill_executor())
    )
    assert killed and pieces > 12, "it died in the middle"
    assert told == text(whole)
    assert deployment.executor() not in (None, *killed)


def test_a_stream_whose_executor_does_not_come_back_ends_in_an_error_with_a_code(tmp_path):
    deployment = Deployment(tmp_path, MAX_CRASHES_PER_MIN=1, GRACE_MS=200)
    try:
        stream = complete(deployment.client("alice"), **LONG, stream=True)
        with pytest.raises(openai.APIError) as caught:
            streamed(stream, 3, deployment.kill_executor)
        assert not isinstance(caught.value, openai.APIConnectionError)
        assert caught.value.code == "executor_unavailable"
        assert deployment.up.wait(WATCHDOG_S) != 0, "holobiont up says that it failed"
    finally:
        deployment.stop()


# --- Shapes -----------------------------------------------------------------------------------------------------


def test_usage_comes_in_a_chunk_of_its_own_after_the_last_choice(alice):
    whole = chat(alice)
    *spoken, last = chat(alice, stream=True, stream_options={"include_usage": True})
    assert all(chunk.choices and chunk.usage is None for chunk in spoken)
    assert spoken[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_three_choices_come_whole_and_streamed(alice):
    options = {**WILD, "n": 3, "seed": 11}
    whole = {choice.index: choice.message.content for choice in chat(alice, **options).choices}
    pieces = dict.fromkeys(range(3), "")
    for chunk in chat(alice, **options, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == whole
    assert len(set(whole.values())) > 1


def test_logprobs_have_the_shapes_that_the_package_knows(alice):
    entries = chat(alice, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    assert all(bytes(entry.bytes).decode(errors="replace") == entry.token for entry in entries)
    answer = complete(alice, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert text(answer).startswith(PROMPT)
    lengths = {len(getattr(logprobs, name)) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {answer.usage.total_tokens}


def test_a_request_id_comes_back(alice):
    for name, ask in (("a-1", alice.chat.completions), ("b-2", alice.completions)):
        said = {"messages": QUESTION} if ask is alice.chat.completions else {"prompt": PROMPT}
        answer = ask.with_raw_response.create(model=BASE, **GREEDY, **said, extra_headers={"X-Request-Id": name})
        assert answer.headers["x-request-id"] == name
        assert answer.parse()._request_id == name


def test_an_idempotency_key_gives_the_same_answer_again_and_another_one_another(alice, bob):
    def sampled(client, key):
        return text(complete(client, **WILD, extra_headers={"Idempotency-Key": key}))

    first = sampled(alice, "order-1")
    assert sampled(alice, "order-1") == first
    assert sampled(alice, "order-2") != first
    assert sampled(bob, "order-1") != first, "keys are each tenant's own"


# --- Refusals ---------------------------------------------------------------------------------------------------


def test_an_adapter_nobody_loaded_is_not_found(alice):
    for options in ({"model": "no-such-adapter"}, {"extra_body": {"adapter": "no-such-adapter"}}):
        with pytest.raises(openai.NotFoundError) as caught:
            chat(alice, **options)
        assert caught.value.code == "model_not_found"
        assert "no-such-adapter" in caught.value.message


@pytest.mark.parametrize("parameter", ["functions", "modalities", "prediction"])
def test_an_option_that_is_not_honoured_is_named(alice, parameter):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(alice, extra_body={parameter: [{"name": "f"}]})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", parameter)
    assert parameter in caught.value.message


def test_a_prompt_that_is_too_long_is_told_how_long_it_is_and_how_long_it_may_be(alice):
    limit = next(card.max_model_len for card in alice.models.list() if card.id == BASE)
    with pytest.raises(openai.BadRequestError) as caught:
        complete(alice, prompt=[504] * (limit + 7), max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    numbers = {int(number) for number in re.findall(r"\d+", caught.value.message)}
    assert {limit, limit + 7} <= numbers
