"""Batches by the `openai` package, unmodified, against a running Holobiont (see test_openai.py)."""

import json
import time

import openai
import pytest

from test_openai import base, client  # noqa: F401 (fixtures)

CHAT = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
GREEDY = {"temperature": 0, "max_tokens": 12}


def line(custom_id, body, url=CHAT):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def chat(model, content, **options):
    return {"model": model, "messages": [{"role": "user", "content": content}], **GREEDY, **options}


def create(client, text, endpoint=CHAT, **options):
    file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    assert (file.purpose, file.bytes) == ("batch", len(text.encode()))
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client, batch):
    while batch.status not in ENDED:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client, file):
    """Results by custom id, each of which is there once."""
    lines = [json.loads(text) for text in client.files.content(file).text.splitlines()]
    by_id = {result["custom_id"]: result for result in lines}
    assert len(by_id) == len(lines)
    return by_id


def test_every_line_has_the_answer_of_an_online_request(client, base):
    scored = {"logprobs": True, "top_logprobs": 2}
    bodies = {
        "greedy": chat(base, "Name a colour.", **scored),
        "seeded": chat(base, "Name a colour.", temperature=0.9, seed=11, **scored),
        "adapter": chat("pirate", "Name a colour.", **scored),
        "two": chat(base, "Name a number.", n=2, temperature=1, seed=5),
        "tools": chat(base, "Hello", response_format={"type": "json_object"}),
    }
    metadata = {"run": "1"}
    batch = create(client, "".join(line(*item) for item in bodies.items()), metadata=metadata)
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", metadata)
    assert batch.expires_at - batch.created_at == 24 * 60 * 60
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(bodies), len(bodies), 0)
    assert batch.error_file_id is None
    answers = results(client, batch.output_file_id)
    total = 0
    for custom_id, body in bodies.items():
        response = answers[custom_id]["response"]
        assert (response["status_code"], answers[custom_id]["error"]) == (200, None)
        answer, online = response["body"], client.chat.completions.create(**body).to_dict()
        # Online requests may find prompts in the prefix cache.
        for usage in (answer["usage"], online["usage"]):
            usage.pop("prompt_tokens_details")
        assert answer["choices"] == online["choices"]
        assert answer["usage"] == online["usage"]
        total += answer["usage"]["total_tokens"]
    assert batch.usage.total_tokens == total
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "The quick brown fox", "logprobs": 2, **GREEDY}),
        ("/v1/embeddings", {"input": ["one", "two"], "encoding_format": "float"}),
        ("/v1/responses", {"input": "Say hello.", "temperature": 0, "max_output_tokens": 8}),
    ],
)
def test_lines_of_the_other_endpoints_are_answered_as_online(client, base, endpoint, body):
    body = {"model": base, **body}
    batch = ended(client, create(client, line("a", body, endpoint), endpoint))
    assert batch.status == "completed"
    answer = results(client, batch.output_file_id)["a"]["response"]["body"]
    online = client.post(endpoint.removeprefix("/v1"), cast_to=object, body=body)
    match endpoint:
        case "/v1/completions":
            assert answer["choices"] == online["choices"]
        case "/v1/embeddings":
            assert answer["data"] == online["data"]
            assert batch.usage.input_tokens == answer["usage"]["prompt_tokens"]
        case "/v1/responses":
            assert answer["output"][0]["content"] == online["output"][0]["content"]
            assert batch.usage.output_tokens == answer["usage"]["output_tokens"]


def test_a_wrong_line_fails_alone_with_the_error_of_an_online_request(client, base):
    wrong = {
        "field": chat(base, "a", temperature="hot"),
        "model": chat("no-such-model", "a"),
        "unknown": chat(base, "a", no_such_field=1),
    }
    text = line("good", chat(base, "a")) + "".join(line(*item) for item in wrong.items())
    batch = ended(client, create(client, text))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
    assert set(results(client, batch.output_file_id)) == {"good"}
    failed = results(client, batch.error_file_id)
    for custom_id, body in wrong.items():
        response = failed[custom_id]["response"]
        with pytest.raises(openai.APIStatusError) as online:
            client.post("/chat/completions", cast_to=object, body=body)
        assert response["status_code"] == online.value.status_code
        assert response["body"]["error"] == online.value.body


def test_a_faulty_file_fails_with_the_line_and_the_code_of_each_fault(client, base):
    good = line("a", chat(base, "a"))
    for text, code, at in [
        ("\n", "empty_file", None),
        (good + "{\n", "invalid_json_line", 2),
        (good + good, "duplicate_custom_id", 2),
        (good + line("b", {}, "/v1/completions"), "mismatched_url", 2),
    ]:
        batch = ended(client, create(client, text))
        assert batch.status == "failed"
        assert batch.failed_at
        assert [(error.code, error.line) for error in batch.errors.data] == [(code, at)]
        assert batch.output_file_id is None


def test_a_cancelled_batch_keeps_what_is_complete_and_cannot_be_cancelled_again(client, base):
    text = "".join(line(str(index), chat(base, f"Count from {index}.", max_tokens=200)) for index in range(200))
    batch = create(client, text)
    while not batch.request_counts or not batch.request_counts.completed:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
    batch = ended(client, client.batches.retrieve(batch.id))
    assert batch.status == "cancelled"
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
    assert 0 < batch.request_counts.completed < 200
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)


def test_batches_are_listed_by_pages_and_wrong_orders_are_refused_by_name(client, base):
    made = [ended(client, create(client, line("a", chat(base, "a", max_tokens=1)))).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == made[:0:-1]
    assert page.has_more
    assert page.get_next_page().data[0].id == made[0]
    other = client.files.create(file=("data.jsonl", b"{}\n"), purpose="fine-tune")
    for file, error in [(other.id, openai.BadRequestError), ("file-none", openai.NotFoundError)]:
        with pytest.raises(error) as refused:
            client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        assert refused.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")


def test_result_files_say_when_they_are_deleted(client, base):
    text = line("a", chat(base, "a", max_tokens=1))
    expiry = {"anchor": "created_at", "seconds": 3600}
    batch = ended(client, create(client, text, output_expires_after=expiry))
    output = client.files.retrieve(batch.output_file_id)
    assert 0 <= output.expires_at - output.created_at - 3600 <= 1
