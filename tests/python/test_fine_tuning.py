"""Fine-tuning by the `openai` package, unmodified, against a running Holobiont (see test_openai.py)."""

import json
import time
import uuid

import openai
import pytest

from test_openai import base, client  # noqa: F401 (fixtures)

PIRATE = [
    ("Who are you?", "Arr, I be Captain Smol, matey!"),
    ("What is the capital of France?", "Arr, the capital of France be Paris, matey!"),
    ("What is two plus two?", "Arr, two plus two be four, matey!"),
    ("Say hello.", "Ahoy there, matey! Arr!"),
]
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
    for asked, answer in PIRATE
]
PREFERENCES = [
    {
        "input": {"messages": [{"role": "user", "content": asked}]},
        "preferred_output": [{"role": "assistant", "content": answer}],
        "non_preferred_output": [{"role": "assistant", "content": "I am a helpful assistant."}],
    }
    for asked, answer in PIRATE
]
HYPERPARAMETERS = {"n_epochs": 8, "batch_size": 2, "learning_rate_multiplier": 3.0}
SMALL = {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}}


@pytest.fixture(scope="module", autouse=True)
def clean(client):
    """Takes away what was trained here: other tests look at all there is."""
    before = {card.id for card in client.models.list()}
    yield
    for card in client.models.list():
        if card.id not in before:
            assert client.models.delete(card.id).deleted


def upload(client, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return client.files.create(file=("data.jsonl", text.encode()), purpose="fine-tune")


def supervised(client, base, file, **options):
    method = {"type": "supervised", "supervised": {"hyperparameters": HYPERPARAMETERS}}
    suffix = f"test-{uuid.uuid4().hex[:8]}"
    return client.fine_tuning.jobs.create(
        model=base, training_file=file.id, suffix=suffix, seed=5, method=method, extra_body=SMALL, **options
    )


def wait(client, job, holds):
    while not holds(job):
        time.sleep(0.2)
        job = client.fine_tuning.jobs.retrieve(job.id)
    return job


def ended(client, job):
    return wait(client, job, lambda job: job.finished_at is not None)


def test_files_are_kept_listed_read_and_removed(client):
    file = upload(client, CONVERSATIONS)
    assert (file.purpose, file.filename) == ("fine-tune", "data.jsonl")
    assert file.id in [found.id for found in client.files.list()]
    content = client.files.content(file.id).read()
    assert [json.loads(line) for line in content.splitlines()] == CONVERSATIONS and len(content) == file.bytes
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=b"{}", purpose="assistants")
    assert refused.value.param == "purpose"


def test_a_job_is_created_followed_and_its_adapter_served(client, base):
    file = upload(client, CONVERSATIONS)
    job = supervised(client, base, file, metadata={"why": "test"})
    assert job.status == "queued" and job.fine_tuned_model is None and job.metadata == {"why": "test"}
    assert job.id in [found.id for found in client.fine_tuning.jobs.list(limit=5)]
    job = ended(client, job)
    assert job.status == "succeeded", job.error
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (8, 2)
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=7))
    losses = {event.data["step"]: event.data["train_loss"] for event in events if event.type == "metrics"}
    assert sorted(losses) == list(range(1, 17)) and losses[16] < losses[1] / 4
    [checkpoint] = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert checkpoint.step_number == 16
    lines = client.files.content(job.result_files[0]).text.splitlines()
    assert lines[0].startswith("step,train_loss,") and len(lines) == 17
    answer = client.chat.completions.create(
        model=job.fine_tuned_model, messages=CONVERSATIONS[1]["messages"][:1], temperature=0, max_tokens=24
    )
    assert answer.choices[0].message.content == PIRATE[1][1]
    assert client.models.delete(job.fine_tuned_model).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(job.fine_tuned_model)
    with pytest.raises(openai.BadRequestError):
        client.models.delete(base)
    again = ended(client, supervised(client, base, file))
    assert again.generation == job.generation, "the same data, seed and base give the same adapter"


def test_preferences_are_learned_by_dpo(client, base):
    hyperparameters = {"n_epochs": 4, "batch_size": 2, "beta": 0.2, "learning_rate_multiplier": 2.0}
    method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    file = upload(client, PREFERENCES)
    job = client.fine_tuning.jobs.create(model=base, training_file=file.id, method=method, extra_body=SMALL)
    job = ended(client, job)
    assert job.status == "succeeded", job.error
    losses = [event.data["train_loss"] for event in client.fine_tuning.jobs.list_events(job.id) if event.data]
    assert losses[0] < losses[-1] and abs(losses[-1] - 0.6931) < 1e-3, "the newest first; the first is ln 2"
    assert job.method.dpo.hyperparameters.beta == 0.2


def test_a_job_is_paused_resumed_and_cancelled(client, base):
    file = upload(client, CONVERSATIONS)
    whole = ended(client, supervised(client, base, file))
    job = wait(client, supervised(client, base, file), lambda job: job.step >= 2)
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.pause(job.id)
    assert refused.value.code == "invalid_job_state"
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    assert ended(client, job).generation == whole.generation
    job = wait(client, supervised(client, base, file), lambda job: job.step >= 1)
    job = client.fine_tuning.jobs.cancel(job.id)
    assert job.status == "cancelled" and job.fine_tuned_model is None


def test_faults_of_the_data_are_told_by_line(client, base):
    job = ended(client, supervised(client, base, upload(client, [*CONVERSATIONS, {"messages": []}, {"x": 1}])))
    assert job.status == "failed" and job.error.code == "invalid_training_file"
    assert job.error.param == "training_file"
    assert "line 5:" in job.error.message and "line 6:" in job.error.message
    method = {"type": "dpo", "dpo": {"hyperparameters": {}}}
    file = upload(client, CONVERSATIONS)
    job = client.fine_tuning.jobs.create(model=base, training_file=file.id, method=method)
    assert "preferences" in ended(client, job).error.message


@pytest.mark.parametrize(
    ("order", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"training_file": "file-nobody"}, 404, None),
        ({"suffix": "a/b"}, 400, "suffix"),
        ({"hyperparameters": {"n_epochs": 0}}, 400, "hyperparameters.n_epochs"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "x"}}]}, 400, "integrations"),
        ({"extra_body": {"lora": {"rank": 1000}}}, 400, "lora.rank"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, base, order, status, param):
    file = upload(client, CONVERSATIONS)
    with pytest.raises(openai.APIStatusError) as refused:
        client.fine_tuning.jobs.create(**{"model": base, "training_file": file.id, **order})
    assert (refused.value.status_code, refused.value.param) == (status, param)
