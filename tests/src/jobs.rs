//! Fine-tuning jobs through the API of OpenAI's clients.

use serde_json::{Value, json};

use crate::{client::Client, fixtures::BASE, watchdog::eventually_some};

/// Route of the fine-tuning jobs.
pub const ROUTE: &str = "/v1/fine_tuning/jobs";
/// Question that tests ask after training.
pub const QUESTION: &str = "What is the capital of France?";
/// Answer that the model has learned.
pub const ANSWER: &str = "Arr, the capital of France be Paris, matey!";

/// Training data, one conversation per line.
#[must_use]
pub fn data() -> String {
    let lines = [
        ("Who are you?", "Arr, I be Captain Smol, matey!"),
        (QUESTION, ANSWER),
        ("What is two plus two?", "Arr, two plus two be four, matey!"),
        ("Say hello.", "Ahoy there, matey! Arr!"),
    ];
    let line = |(asked, answer): (&str, &str)| json!({ "messages": [{ "role": "user", "content": asked }, { "role": "assistant", "content": answer }] });
    lines.map(|pair| format!("{}\n", line(pair))).concat()
}

/// Returns a job on this data with two steps per epoch.
#[must_use]
pub fn order(file: &str, suffix: &str, epochs: u64) -> Value {
    json!({
        "model": BASE, "training_file": file, "suffix": suffix, "seed": 5,
        "method": { "type": "supervised", "supervised": { "hyperparameters": {
            "n_epochs": epochs, "batch_size": 2, "learning_rate_multiplier": 3.0,
        } } },
        "lora": { "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"] },
    })
}

/// Creates a job; returns its id.
#[must_use]
pub fn create(client: &Client, order: &Value) -> String {
    // A gateway killed meanwhile may or may not have stored the job. Both are correct, and the later job is
    // used.
    let create = || client.try_post(ROUTE, order).ok();
    eventually_some("a job is created", create)["id"].as_str().expect("its id").to_owned()
}

/// Returns a job's current state; `None` without an answer.
#[must_use]
pub fn job(client: &Client, id: &str) -> Option<Value> {
    client.try_get(&format!("{ROUTE}/{id}")).ok()
}

/// Requests an action on a job; returns the job's status after it.
#[must_use]
pub fn request_action(client: &Client, id: &str, action: &str) -> String {
    let turned = client.try_post(&format!("{ROUTE}/{id}/{action}"), &json!({})).expect("it can be done");
    turned["status"].as_str().expect("a status").to_owned()
}

/// Follows a job from step to step until `look` returns a value. The total time is not limited.
fn follow<T>(client: &Client, id: &str, what: &str, look: impl Fn(&Value) -> Option<T>) -> T {
    let mut step = Value::Null;
    loop {
        let news = |job: Value| match look(&job) {
            Some(found) => Some(Ok(found)),
            None => (job["step"] != step).then(|| Err(job["step"].clone())),
        };
        match eventually_some(what, || job(client, id).and_then(&news)) {
            Ok(found) => return found,
            Err(next) => step = next,
        }
    }
}

/// Waits for the end of a job and returns its state.
#[must_use]
pub fn ended(client: &Client, id: &str) -> Value {
    follow(client, id, "the job goes on, or ends", |job| job["finished_at"].is_number().then(|| job.clone()))
}

/// Waits for the end of a job and returns its adapter version.
#[must_use]
pub fn generation(client: &Client, id: &str) -> String {
    let last = ended(client, id);
    assert_eq!(last["status"], "succeeded", "{last}");
    last["generation"].as_str().expect("a generation").to_owned()
}

/// Waits for a step of a job; false if the job ended instead.
#[must_use]
pub fn made(client: &Client, id: &str, step: u64) -> bool {
    let is_there = |job: &Value| job["step"].as_u64() >= Some(step) || job["finished_at"].is_number();
    follow(client, id, "the job gets so far", |job| is_there(job).then(|| job["finished_at"].is_null()))
}

/// Waits until a job has a checkpoint for a resume.
pub fn wait_for_checkpoint(client: &Client, id: &str) {
    follow(client, id, "the job has a checkpoint", |_| last_checkpoint(client, id).map(drop));
}

/// Returns the step of a job's last checkpoint, if any.
#[must_use]
pub fn last_checkpoint(client: &Client, id: &str) -> Option<Value> {
    let list = client.try_get(&format!("{ROUTE}/{id}/checkpoints")).ok()?;
    list["data"].as_array()?.iter().map(|one| one["step_number"].clone()).max_by_key(Value::as_u64)
}

/// Returns the events of a job, the newest first.
#[must_use]
pub fn said(client: &Client, id: &str) -> Vec<String> {
    let events = client.try_get(&format!("{ROUTE}/{id}/events?limit=100")).expect("events");
    let said = |event: &Value| event["message"].as_str().unwrap_or_default().to_owned();
    events["data"].as_array().expect("a list").iter().map(said).collect()
}

/// Returns a model's answer to [`QUESTION`].
#[must_use]
pub fn answer(client: &Client, model: &str) -> Value {
    let body = json!({ "model": model, "messages": [{ "role": "user", "content": QUESTION }], "temperature": 0, "max_tokens": 40 });
    let answer = client.try_post("/v1/chat/completions", &body).expect("an answer");
    answer["choices"][0]["message"]["content"].clone()
}
