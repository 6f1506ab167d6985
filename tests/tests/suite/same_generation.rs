//! A trained adapter has the same version on any route, listener, thread count and with any other load.

use std::{fs, path::PathBuf, process::Command, thread};

use e2e_tests::{
    BASE, Client, CompletionRequest, Deployment, DeploymentPlan, StreamEnd, fixtures, jobs,
    split::{SplitEndpoints, SplitRoute},
    tinker::{Example, TinkerModel},
    watched,
};
use serde_json::{Value, json};

/// Common options of a trainer and `holobiont tune`.
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
/// Examples; a step takes two at once through the model.
const EXAMPLES: &str = "data.jsonl";
/// Preference pairs; a step takes each by itself.
const PAIRS: &str = "pairs.jsonl";
const STREAMS: u32 = 8;
const JOBS: usize = 3;

struct TrainingSetup {
    deployment: Deployment,
    endpoints: SplitEndpoints,
    directory: tempfile::TempDir,
    data: String,
}

impl TrainingSetup {
    fn new() -> Self {
        let endpoints = SplitEndpoints::new();
        // Beside eight streams the default share would take minutes.
        let deployment = endpoints.of(DeploymentPlan::bare().set("LAYER_TRAINING_SHARE", "0.5")).start();
        let directory = tempfile::tempdir().expect("a directory");
        let lines = [
            ("Who are you?", "Arr, I be Captain Smol, matey!"),
            ("What is the capital of France?", "Arr, the capital of France be Paris, matey!"),
            ("What is two plus two?", "Arr, two plus two be four, matey!"),
            ("Say hello.", "Ahoy there, matey! Arr!"),
        ];
        let line = |(asked, answer): (&str, &str)| json!({ "messages": [{ "role": "user", "content": asked }, { "role": "assistant", "content": answer }] });
        let data = lines.map(|pair| format!("{}\n", line(pair))).concat();
        fs::write(directory.path().join(EXAMPLES), &data).expect("data are written");
        let pair = |(asked, answer): (&str, &str)| json!({ "prompt": asked, "chosen": answer, "rejected": "I do not know." });
        let pairs = lines.map(|line| format!("{}\n", pair(line))).concat();
        fs::write(directory.path().join(PAIRS), pairs).expect("data are written");
        Self { deployment, endpoints, directory, data }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn trained(&self, name: &str, data: &str, route: SplitRoute, arguments: &[&str]) -> String {
        generation(&mut self.trainer(name, data, route, arguments))
    }

    fn trainer(&self, name: &str, data: &str, route: SplitRoute, arguments: &[&str]) -> Command {
        let mut command = Command::new(fixtures::program("holobiont-trainer"));
        command.env_clear().env("HOME", self.directory.path());
        command
            .args(["run", "--executor", &self.endpoints.executor(&self.deployment, route)])
            .args(arguments);
        if route == SplitRoute::Tls {
            let (certificate, key) = self.endpoints.identity();
            command
                .arg("--ca")
                .arg(self.endpoints.ca())
                .arg("--cert")
                .arg(certificate)
                .arg("--cert-key")
                .arg(key);
        }
        command.arg("--model").arg(fixtures::model()).arg("--output").arg(self.path(name));
        command.arg("--data").arg(self.path(data));
        command.args(OPTIONS.iter().flat_map(|&(name, value)| [name, value]));
        command
    }

    fn tuned(&self) -> String {
        let mut command = Command::new(fixtures::program("holobiont"));
        command
            .env_clear()
            .env("HOME", self.directory.path())
            .env("HOLOBIONT_HOME", self.deployment.place().home());
        command.args(["--json", "tune"]).arg(self.path(EXAMPLES)).args(["--name", "tuned"]);
        let told = generation(command.args(OPTIONS.iter().flat_map(|&(name, value)| [name, value])));
        assert_eq!(self.deployment.client.adapter("tuned")["generation"], told.as_str());
        told
    }

    fn ask_for_job(&self, suffix: &str, seed: u64) -> String {
        let file = self.deployment.client.upload(EXAMPLES, &self.data);
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

    fn of_job(&self, id: &str) -> String {
        jobs::generation(&self.deployment.client, id)
    }
}

fn generation(command: &mut Command) -> String {
    let told = events(command).pop().expect("a word");
    told["generation"].as_str().unwrap_or_else(|| panic!("no generation: {told}")).to_owned()
}

fn events(command: &mut Command) -> Vec<Value> {
    let output = command.output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    told.lines().map(|line| serde_json::from_str(line).expect("lines of JSON")).collect()
}

/// Calls `body` while several streams are read.
fn beside_streams<T>(client: &Client, body: impl FnOnce() -> T) -> T {
    let stream = |seed| {
        let (client, ask) = (client.clone(), CompletionRequest::new(BASE, fixtures::prompt(seed, 20), 256));
        thread::spawn(move || client.stream(&ask).finish().1)
    };
    let streams: Vec<_> = (0..STREAMS).map(stream).collect();
    let result = body();
    for stream in streams {
        assert_eq!(stream.join().expect("a stream"), StreamEnd::Done);
    }
    result
}

#[test]
fn an_adapter_has_one_generation_by_every_route_and_door_on_any_threads_and_in_any_company() {
    watched(|| {
        let place = TrainingSetup::new();
        let alone = place.trained("alone", EXAMPLES, SplitRoute::SharedMemory, &["--cores", "0"]);
        let two_threads = ["--cores", "0,1", "--lanes", "1"];
        assert_eq!(place.trained("tls", EXAMPLES, SplitRoute::Tls, &two_threads), alone, "TLS, two threads");
        assert_eq!(place.tuned(), alone, "holobiont tune");
        let crowded = beside_streams(&place.deployment.client, || {
            let others: Vec<String> =
                (0..JOBS).map(|seed| place.ask_for_job(&format!("other-{seed}"), 70 + seed as u64)).collect();
            let job = place.ask_for_job("job", 5);
            let trained = place.trained("crowded", EXAMPLES, SplitRoute::Ipc, &["--cores", "0,1"]);
            let of_job = place.of_job(&job);
            let others: Vec<String> = others.iter().map(|id| place.of_job(id)).collect();
            assert!(!others.contains(&of_job), "another seed gives another adapter");
            [trained, of_job]
        });
        assert_eq!(crowded, [alone.clone(), alone], "beside streams and jobs: a trainer, and a job");
        assert!(place.deployment.stop().success());
    });
}

#[test]
fn what_is_masked_learns_as_it_would_without_up_to_rounding() {
    watched(|| {
        let place = TrainingSetup::new();
        let losses = |name, masking: &[&str]| -> Vec<f64> {
            let arguments = [&["--precision", "exact", "--max-steps", "3", "--lanes", "2"], masking].concat();
            let told = events(&mut place.trainer(name, EXAMPLES, SplitRoute::Tls, &arguments));
            told.iter()
                .filter(|event| event["event"] == "step")
                .filter_map(|step| step["loss"].as_f64())
                .collect()
        };
        let (plain, masked) = (losses("plain", &[]), losses("masked", &["--masking", "paper"]));
        assert_eq!((plain.len(), masked.len()), (3, 3));
        assert!(
            plain.iter().zip(&masked).all(|(plain, masked)| (plain - masked).abs() < 1e-2),
            "{plain:?} {masked:?}"
        );
        assert_ne!(plain, masked, "something was added and taken away");
        let refused = place
            .trainer("rounded", EXAMPLES, SplitRoute::Tls, &["--masking", "paper"])
            .output()
            .expect("it runs");
        assert_eq!(refused.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("--precision exact"), "{refused:?}");
        assert!(place.deployment.stop().success());
    });
}

#[test]
fn an_adapter_has_one_generation_on_any_number_of_lanes() {
    watched(|| {
        let place = TrainingSetup::new();
        let lanes = |count| ["--lanes", count, "--max-steps", "3"];
        let alone = place.trained("one", PAIRS, SplitRoute::SharedMemory, &lanes("1"));
        for (count, route) in
            [("2", SplitRoute::SharedMemory), ("3", SplitRoute::SharedMemory), ("2", SplitRoute::Tls)]
        {
            let name = format!("{count}-{route:?}");
            assert_eq!(place.trained(&name, PAIRS, route, &lanes(count)), alone, "{name}");
        }
        assert!(place.deployment.stop().success());
    });
}

/// Options of `holobiont tune` that match Tinker's adapters: `lora_alpha` 32, and a trained head.
const AS_TINKER: [(&str, &str); 10] = [
    ("--rank", "4"),
    ("--alpha", "32"),
    ("--targets", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"),
    ("--epochs", "3"),
    ("--batch-size", "2"),
    ("--held-out", "0"),
    ("--seed", "5"),
    ("--weight-decay", "0.01"),
    ("--schedule", "linear"),
    ("--max-grad-norm", "0.5"),
];

/// Prompts with completions, two of which exceed the number of tokens in one partial sum.
fn stories() -> [(String, String); 4] {
    let sea = " the wind was in the sails and the sea was wide and green,".repeat(8);
    [
        ("Once upon a time".to_owned(), format!("{sea} and nobody came home.")),
        (format!("It is said that{sea}"), " but who would believe it?".to_owned()),
        (format!("They sang:{sea}"), sea),
        ("The end,".to_owned(), " said the captain.".to_owned()),
    ]
}

/// Example of a data line: the model's tokens and its end token; only the completion has loss.
fn example(client: &Client, (prompt, completion): &(String, String)) -> Example {
    let tokens = |text: &str| -> Vec<u32> {
        let answer = client.try_post("/tokenize", &json!({ "model": BASE, "prompt": text })).expect("tokens");
        serde_json::from_value(answer["tokens"].clone()).expect("token ids")
    };
    const END: u32 = 2;
    let (asked, mut tokens) = (tokens(prompt), tokens(&format!("{prompt}{completion}")));
    assert!(tokens.starts_with(&asked), "these stories are cut between two tokens");
    tokens.push(END);
    let weights = (1..tokens.len()).map(|at| if at < asked.len() { 0.0 } else { 1.0 }).collect();
    Example { tokens, weights }
}

/// Examples of a step whose summed losses equal the mean over their tokens.
#[expect(clippy::cast_possible_truncation, reason = "weights are numbers of 32 bits")]
fn as_a_mean(examples: &[&Example]) -> Vec<Example> {
    let total: f64 = examples.iter().flat_map(|example| &example.weights).copied().map(f64::from).sum();
    let share = |weight: &f32| (f64::from(*weight) / total) as f32;
    let example = |example: &&Example| Example {
        tokens: example.tokens.clone(),
        weights: example.weights.iter().map(share).collect(),
    };
    examples.iter().map(example).collect()
}

#[test]
fn who_asks_tinker_for_the_same_training_gets_the_same_generation() {
    watched(|| {
        let deployment = DeploymentPlan::bare().start();
        let directory = tempfile::tempdir().expect("a directory");
        let (data, stories) = (directory.path().join("data.jsonl"), stories());
        let line = |(prompt, completion): &(String, String)| {
            format!("{}\n", json!({ "prompt": prompt, "completion": completion }))
        };
        fs::write(&data, stories.iter().map(line).collect::<String>()).expect("data are written");
        let mut command = Command::new(fixtures::program("holobiont"));
        command.env_clear().env("HOME", directory.path()).env("HOLOBIONT_HOME", deployment.place().home());
        command.args(["--json", "tune"]).arg(&data).args(["--name", "tuned"]);
        let told = events(command.args(AS_TINKER.iter().flat_map(|&(name, value)| [name, value])));
        let steps: Vec<&Value> = told.iter().filter(|event| event["event"] == "step").collect();
        assert_eq!(steps.len(), 6);

        let client = &deployment.client;
        let examples = stories.each_ref().map(|story| example(client, story));
        let mut model = TinkerModel::begin(client, &json!({ "rank": 4, "seed": 5 }));
        for step in steps {
            let lines = step["lines"].as_array().expect("lines").iter().filter_map(Value::as_u64);
            let batch: Vec<&Example> = lines.map(|line| &examples[line as usize - 1]).collect();
            let adam = json!({
                "learning_rate": step["learning_rate"], "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
                "weight_decay": 0.01, "grad_clip_norm": 0.5,
            });
            model.step(&as_a_mean(&batch), &adam);
        }
        let stepwise = model.publish("same");
        assert_eq!(client.adapter(&stepwise)["generation"], client.adapter("tuned")["generation"]);
        model.end();
        assert!(deployment.stop().success());
    });
}
