//! An adapter has one generation, by whatever route, door and number of threads it is trained, and whatever else runs.

use std::{fs, path::PathBuf, process::Command, thread};

use e2e_tests::{
    Ask, BASE, Client, Deployment, Ending, Plan, eventually_some, fixtures,
    split::{Doors, Route},
    watched,
};
use serde_json::{Value, json};

/// What a trainer and `holobiont tune` are told alike.
const OPTIONS: [(&str, &str); 8] = [
    ("--rank", "4"),
    ("--alpha", "8"),
    ("--targets", "q_proj,v_proj,down_proj"),
    ("--dropout", "0.1"),
    ("--epochs", "3"),
    ("--batch-size", "2"),
    ("--held-out", "0"),
    ("--seed", "5"),
];
const STREAMS: u32 = 8;
const JOBS: usize = 3;

/// A deployment, and what is learned from.
struct Workplace {
    deployment: Deployment,
    doors: Doors,
    directory: tempfile::TempDir,
    data: String,
}

impl Workplace {
    fn new() -> Self {
        let doors = Doors::new();
        // Beside eight streams the usual share would take minutes.
        let deployment = doors.of(Plan::bare().set("LAYER_TRAINING_SHARE", "0.5")).start();
        let directory = tempfile::tempdir().expect("a directory");
        let lines = [
            ("Who are you?", "Arr, I be Captain Smol, matey!"),
            ("What is the capital of France?", "Arr, the capital of France be Paris, matey!"),
            ("What is two plus two?", "Arr, two plus two be four, matey!"),
            ("Say hello.", "Ahoy there, matey! Arr!"),
        ];
        let line = |(asked, answer): (&str, &str)| json!({ "messages": [{ "role": "user", "content": asked }, { "role": "assistant", "content": answer }] });
        let data = lines.map(|pair| format!("{}\n", line(pair))).concat();
        fs::write(directory.path().join("data.jsonl"), &data).expect("data are written");
        Self { deployment, doors, directory, data }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Trained by the trainer itself.
    fn trained(&self, name: &str, route: Route, cores: &str) -> String {
        let mut command = Command::new(fixtures::program("holobiont-trainer"));
        command.env_clear().env("HOME", self.directory.path());
        command.args(["run", "--executor", &self.doors.executor(&self.deployment, route), "--cores", cores]);
        if route == Route::Tls {
            let (certificate, key) = self.doors.identity();
            command
                .arg("--ca")
                .arg(self.doors.ca())
                .arg("--cert")
                .arg(certificate)
                .arg("--cert-key")
                .arg(key);
        }
        command.arg("--model").arg(fixtures::model()).arg("--output").arg(self.path(name));
        command.arg("--data").arg(self.path("data.jsonl"));
        generation(command.args(OPTIONS.iter().flat_map(|&(name, value)| [name, value])))
    }

    /// Trained by `holobiont tune`.
    fn tuned(&self) -> String {
        let mut command = Command::new(fixtures::program("holobiont"));
        command
            .env_clear()
            .env("HOME", self.directory.path())
            .env("HOLOBIONT_HOME", self.deployment.place().home());
        command.args(["--json", "tune"]).arg(self.path("data.jsonl")).args(["--name", "tuned"]);
        let told = generation(command.args(OPTIONS.iter().flat_map(|&(name, value)| [name, value])));
        assert_eq!(self.deployment.client.adapter("tuned")["generation"], told.as_str());
        told
    }

    /// Asks for a job of the same.
    fn ask_for_job(&self, suffix: &str, seed: u64) -> String {
        let file = self.deployment.client.upload("data.jsonl", &self.data);
        let body = json!({
            "model": BASE, "training_file": file, "suffix": suffix, "seed": seed,
            "method": { "type": "supervised", "supervised": { "hyperparameters": {
                "n_epochs": 3, "batch_size": 2,
            } } },
            "lora": { "rank": 4, "alpha": 8.0, "dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"] },
        });
        let job = self.deployment.client.try_post("/v1/fine_tuning/jobs", &body).expect("a job");
        job["id"].as_str().expect("its id").to_owned()
    }

    /// What comes of it.
    fn of_job(&self, id: &str) -> String {
        let route = format!("/v1/fine_tuning/jobs/{id}");
        let ended = |job: &Value| job["finished_at"].is_number();
        let job = eventually_some("a job ends", || self.deployment.client.try_get(&route).ok().filter(ended));
        assert_eq!(job["status"], "succeeded", "{job}");
        job["generation"].as_str().expect("a generation").to_owned()
    }
}

/// Runs `command`, whose last words name a generation.
fn generation(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_str(told.lines().last().expect("a word")).expect("lines of JSON");
    told["generation"].as_str().unwrap_or_else(|| panic!("no generation: {told}")).to_owned()
}

/// Answers that are being read for as long as `body` takes.
fn beside_streams<T>(client: &Client, body: impl FnOnce() -> T) -> T {
    let stream = |seed| {
        let (client, ask) = (client.clone(), Ask::new(BASE, fixtures::prompt(seed, 20), 256));
        thread::spawn(move || client.stream(&ask).finish().1)
    };
    let streams: Vec<_> = (0..STREAMS).map(stream).collect();
    let result = body();
    for stream in streams {
        assert_eq!(stream.join().expect("a stream"), Ending::Done);
    }
    result
}

#[test]
fn an_adapter_has_one_generation_by_every_route_and_door_on_any_threads_and_in_any_company() {
    watched(|| {
        let place = Workplace::new();
        let alone = place.trained("alone", Route::SharedMemory, "0");
        assert_eq!(place.trained("tls", Route::Tls, "0,1"), alone, "TLS, two threads");
        assert_eq!(place.tuned(), alone, "holobiont tune");
        let crowded = beside_streams(&place.deployment.client, || {
            let others: Vec<String> =
                (0..JOBS).map(|seed| place.ask_for_job(&format!("other-{seed}"), 70 + seed as u64)).collect();
            let job = place.ask_for_job("job", 5);
            let trained = place.trained("crowded", Route::Ipc, "0,1");
            let of_job = place.of_job(&job);
            let others: Vec<String> = others.iter().map(|id| place.of_job(id)).collect();
            assert!(!others.contains(&of_job), "another seed gives another adapter");
            [trained, of_job]
        });
        assert_eq!(crowded, [alone.clone(), alone], "beside streams and jobs: a trainer, and a job");
        assert!(place.deployment.stop().success());
    });
}
