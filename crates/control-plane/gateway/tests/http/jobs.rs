//! Fine-tuning jobs: use of the disk, and waits for a trainer.

use std::{fs::File, time::SystemTime};

use serde_json::{Value, json};

use crate::{
    client::{Response, TestClient},
    fake_executor::reply_with,
    harness::Harness,
};

pub(crate) const JOBS: &str = "/v1/fine_tuning/jobs";

pub(crate) async fn upload(client: &TestClient) -> Value {
    let form = "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nfine-tune\r\n--x\r\n\
                Content-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}\r\n--x--\r\n";
    let sent = client.send("POST", "/v1/files", "multipart/form-data; boundary=x", form).await;
    assert_eq!(sent.status, 200, "{}", sent.body);
    sent.json()["id"].clone()
}

async fn create(client: &TestClient, model: &str, file: &Value) -> Response {
    client.post(JOBS, &json!({ "model": model, "training_file": file, "suffix": "made" })).await
}

#[tokio::test]
async fn a_job_too_many_is_refused_before_anything_is_copied_for_it() {
    let harness = Harness::start_with(reply_with("x"), |config| {
        config.training.tenant_jobs = 1;
        // The socket has no listener, so the first job waits.
        config.training.trainer_socket = Some(config.state.with_file_name("trainers"));
    })
    .await;
    let load = json!({ "lora_name": "a", "lora_path": harness.adapter("a", "one") });
    assert_eq!(harness.client.post("/v1/load_lora_adapter", &load).await.status, 200);
    let file = upload(&harness.client).await;
    let first = create(&harness.client, "a", &file).await;
    assert_eq!(first.status, 200, "{}", first.body);
    let jobs = harness.directory.path().join("state/training/jobs");
    assert_eq!(
        std::fs::read_dir(&jobs).unwrap().count(),
        1,
        "the adapter is copied to the directory of its job"
    );
    // A subfolder that comes and goes changes the folder's modification time.
    File::open(&jobs).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    let refused = create(&harness.client, "a", &file).await;
    assert_eq!((refused.status, &*refused.code()), (429, "job_quota_exceeded"), "{}", refused.body);
    assert_eq!(jobs.metadata().unwrap().modified().unwrap(), SystemTime::UNIX_EPOCH);
}
