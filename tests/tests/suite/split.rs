//! Split clients against the real processes: equal bits on every route, and the operator's view of them.
//!
//! `HOLOBIONT_PROMPTS` sets the compared prompts per model, `HOLOBIONT_ANSWER` the tokens of each answer,
//! `HOLOBIONT_CONTEXT` the tokens of the long context.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use client::masking::{Masking, NoiseSettings};
use e2e_tests::{
    BASE, Client, CompletionAnswer, CompletionRequest, Deployment, DeploymentPlan, DeploymentProcess,
    EXAMPLES, MODELS, StateDirectory, direct_adapters, eventually, eventually_some, fixtures, repeats,
    split::{
        CERTIFIED, HeldResources, Program, SplitEndpoints, SplitRoute, SplitTenant, TokenScore,
        tenant::{LINEAR, OPEN, continuation, text},
    },
    watched,
};
use serde_json::{Value, json};

/// Tokens of a text that is compared at every position.
const PASSAGE: usize = 256;
const QUESTION: &str = "What is the capital of Japan?";
const STORY: &str = "Once upon a time there was a little ship that";

fn ask(model: &str, prompt: &[u32]) -> CompletionRequest {
    CompletionRequest::new(
        model,
        prompt.to_vec(),
        u32::try_from(repeats::ANSWER.number()).expect("a small number"),
    )
}

/// Prompts of many lengths; some end within a KV block, some at its end.
fn prompts() -> Vec<Vec<u32>> {
    let count = u32::try_from(repeats::PROMPTS.number()).expect("a small number");
    (0..count).map(|seed| fixtures::prompt(5000 + seed, 3 + (seed as usize * 29 + 61) % 120)).collect()
}

/// Scores of an HTTP answer, as bits.
fn bits(answer: &CompletionAnswer) -> Vec<TokenScore> {
    #[expect(clippy::cast_possible_truncation, reason = "they were 32 bits before they were text")]
    let bits = |value: &Value| (value.as_f64().expect("a score") as f32).to_bits();
    let score = |[_, chosen, top]: &[Value; 3]| TokenScore {
        chosen: bits(chosen),
        top: top.as_object().expect("the likeliest tokens").values().map(bits).collect(),
    };
    answer.scored.iter().map(score).collect()
}

/// Checks that every value of the HTTP answer is equal bit by bit. Tokens of equal text share an entry in
/// that answer.
fn assert_same(resident: &[TokenScore], split: &[TokenScore], what: &str) {
    assert_eq!(resident.len(), split.len(), "{what}");
    for (at, (resident, split)) in resident.iter().zip(split).enumerate() {
        assert_eq!(resident.chosen, split.chosen, "{what}, token {at}");
        assert!(!resident.top.is_empty(), "{what}, token {at}");
        assert!(
            resident.top.iter().all(|score| split.top.contains(score)),
            "{what}, token {at}: {resident:?} is not {split:?}"
        );
    }
}

/// Model, directory of its adapter, and the resident engine's answer to each prompt.
#[derive(Clone)]
struct SplitGolden {
    model: String,
    adapter: Option<PathBuf>,
    answers: Arc<Vec<(Vec<u32>, CompletionAnswer)>>,
}

impl SplitGolden {
    fn learn(client: &Client, model: &str, adapter: Option<PathBuf>, prompts: &[Vec<u32>]) -> Self {
        let answer = |prompt: &Vec<u32>| {
            let answer = client.ask(&ask(model, prompt)).answer;
            (prompt.clone(), answer)
        };
        let answers = Arc::new(prompts.iter().map(answer).collect());
        Self { model: model.to_owned(), adapter, answers }
    }

    /// Compares the answers of two split clients: one generates, and one returns its logits.
    fn compare(&self, generating: &mut SplitTenant, scoring: &mut SplitTenant, route: SplitRoute) {
        let text = text();
        for tenant in [&mut *generating, &mut *scoring] {
            tenant.wear(self.adapter.as_deref());
        }
        for (index, (prompt, resident)) in self.answers.iter().enumerate() {
            let what = format!("{} over {}, a prompt of {} tokens", self.model, route.name(), prompt.len());
            let (tokens, scores) = scoring.scored(prompt, repeats::ANSWER.count());
            assert_same(&bits(resident), &scores, &what);
            assert_eq!(continuation(&text, &tokens), resident.text, "{what}");
            if index == 0 {
                assert_eq!(
                    generating.generate(prompt, repeats::ANSWER.count()).expect(&what),
                    tokens,
                    "{what}"
                );
            }
        }
    }
}

/// Compares on all routes at once while the resident engine serves others, so that calls are batched together
/// and with it.
fn compare_everywhere(endpoints: &SplitEndpoints, deployment: &Deployment, golden: &[SplitGolden]) {
    thread::scope(|scope| {
        let routes = SplitRoute::ALL.map(|route| {
            scope.spawn(move || {
                let [mut generating, mut scoring] =
                    [0, 1].map(|_| endpoints.tenant(deployment, route, OPEN, None));
                golden.iter().for_each(|golden| golden.compare(&mut generating, &mut scoring, route));
            })
        });
        let mut seed = 9000;
        while !routes.iter().all(thread::ScopedJoinHandle::is_finished) {
            seed += 1;
            deployment.client.ask(&ask(MODELS[seed as usize % 4], &fixtures::prompt(seed, 40)));
            thread::sleep(Duration::from_millis(100));
        }
        for route in routes {
            route.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
}

#[test]
fn resident_and_split_answers_over_every_route_have_the_same_bits() {
    watched(|| {
        let endpoints = SplitEndpoints::new();
        let deployment = endpoints.of(DeploymentPlan::with_examples().cores(2)).start();
        let prompts = prompts();
        let golden = MODELS.map(|model| {
            let adapter = EXAMPLES.contains(&model).then(|| fixtures::example(model));
            SplitGolden::learn(&deployment.client, model, adapter, &prompts)
        });
        // The client merges the adapter file; the gateway names the same weighted sum in the request.
        let merged = deployment.place().adapters().join("merged");
        let parts = ["pirate", "json"].map(|name| format!("{}:0.7", fixtures::example(name).display()));
        let merge = ["adapters", "merge", &parts[0], &parts[1], "--output", &merged.display().to_string()];
        let (is_merged, said) = fixtures::holobiont(&merge, &[]);
        assert!(is_merged, "{said}");
        let sum = SplitGolden::learn(&deployment.client, "pirate:0.7+json:0.7", Some(merged), &prompts);
        let golden: Vec<_> = golden.into_iter().chain([sum]).collect();
        let begun = Instant::now();
        compare_everywhere(&endpoints, &deployment, &golden);
        let joined = deployment.client.metric("holobiont_layer_joined_rows_total");
        eprintln!(
            "{} answers x 3 routes have the resident engine's bits ({:.0} s, {joined} rows joined its passes)",
            golden.len() * prompts.len(),
            begun.elapsed().as_secs_f64()
        );
    });
}

#[test]
fn adapters_without_matrices_have_the_same_bits_when_they_never_leave_the_client() {
    watched(|| {
        let (endpoints, place) = (SplitEndpoints::new(), Arc::new(StateDirectory::new()));
        let deployment = endpoints.of(DeploymentPlan::bare()).start_in(Arc::clone(&place));
        let paths = ["ia3", "prefix"].map(|name| place.adapters().join(name));
        direct_adapters::write_ia3(3, &paths[0]);
        direct_adapters::write_prefix(4, 24, &paths[1]);
        let prompts = [fixtures::prompt(71, 33), fixtures::prompt(72, 90)];
        let golden = [("ia3", &paths[0]), ("prefix", &paths[1])].map(|(name, path)| {
            deployment.client.load(name, path);
            SplitGolden::learn(&deployment.client, name, Some(path.clone()), &prompts)
        });
        let base = SplitGolden::learn(&deployment.client, BASE, None, &prompts);
        for golden in &golden {
            assert_ne!(golden.answers, base.answers, "{} changes nothing", golden.model);
        }
        let [mut generating, mut scoring] =
            [0, 1].map(|_| endpoints.tenant(&deployment, SplitRoute::SharedMemory, OPEN, None));
        for golden in golden.iter().chain([&base]) {
            golden.compare(&mut generating, &mut scoring, SplitRoute::SharedMemory);
        }
    });
}

#[test]
fn split_answers_have_the_same_bits_whatever_numbers_the_operator_chose() {
    watched(|| {
        let prompts = [fixtures::prompt(73, 45)];
        let mut answers = Vec::new();
        for (kv, adapters) in [("f32", "exact"), ("f32", "bf16"), ("f16", "f16"), ("int8", "f16")] {
            let endpoints = SplitEndpoints::new();
            let plan = DeploymentPlan::with_examples().workers(0);
            let plan = plan.set("KV_DTYPE", kv).set("ADAPTER_DTYPE", adapters);
            let deployment = endpoints.of(plan).start();
            let adapter = fixtures::example("pirate");
            let golden = SplitGolden::learn(&deployment.client, "pirate", Some(adapter), &prompts);
            let [mut generating, mut scoring] =
                [0, 1].map(|_| endpoints.tenant(&deployment, SplitRoute::SharedMemory, OPEN, None));
            golden.compare(&mut generating, &mut scoring, SplitRoute::SharedMemory);
            answers.push(bits(&golden.answers[0].1));
        }
        assert!(
            answers.windows(2).all(|pair| pair[0] != pair[1]),
            "the settings change nothing: {answers:?}"
        );
    });
}

fn passages(count: usize) -> Vec<Vec<u32>> {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ARCHITECTURE.md");
    let document = fs::read_to_string(document).expect("the tree's own documentation");
    let tokens = text().encode_raw(&document).expect("text");
    let passages: Vec<_> = tokens.chunks_exact(PASSAGE).map(<[u32]>::to_vec).cycle().take(count).collect();
    assert_eq!(passages.len(), count);
    passages
}

/// Compared positions, positions of equal argmax, and the largest difference of logits.
#[derive(Debug, Default)]
struct Agreement {
    positions: usize,
    equal: usize,
    largest: f32,
}

impl Agreement {
    fn add(&mut self, one: &[f32], other: &[f32], vocabulary: usize) {
        let argmax = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
        for (one, other) in one.chunks(vocabulary).zip(other.chunks(vocabulary)) {
            self.positions += 1;
            self.equal += usize::from(argmax(one) == argmax(other));
            self.largest = one.iter().zip(other).fold(self.largest, |most, (a, b)| most.max((a - b).abs()));
        }
    }

    fn share(&self) -> f64 {
        self.equal as f64 / self.positions as f64
    }
}

#[test]
fn obfuscated_rows_lead_to_the_same_likeliest_tokens() {
    watched(|| {
        let endpoints = SplitEndpoints::new();
        // Keys of 8 bits of precision would amplify the last digit, in which masked rows differ.
        let plan = DeploymentPlan::bare().whole().workers(0).file("[executor]\nkv_dtype = \"f16\"\n");
        let deployment = endpoints.of(plan).start();
        let paper = Masking::Paper(NoiseSettings::default());
        let [mut masked, mut plain, mut fast] = [paper, LINEAR, OPEN]
            .map(|masking| endpoints.tenant(&deployment, SplitRoute::SharedMemory, masking, None));
        let (mut to_linear, mut to_fast) = (Agreement::default(), Agreement::default());
        let passages = passages(2 * repeats::PROMPTS.count());
        for (passage, model) in passages.iter().zip(MODELS.iter().cycle()) {
            let adapter = EXAMPLES.contains(model).then(|| fixtures::whole_example(model));
            let [masked, plain, fast] = [&mut masked, &mut plain, &mut fast].map(|tenant| {
                tenant.wear(adapter.as_deref());
                tenant.logits(passage)
            });
            let vocabulary = plain.len() / PASSAGE;
            to_linear.add(&masked, &plain, vocabulary);
            to_fast.add(&masked, &fast, vocabulary);
        }
        eprintln!(
            "paper masking, {} positions: argmax agrees in {:.3} % with the same arithmetic in the clear (largest \
             difference of logits {:.2e}), in {:.3} % with the resident engine's rounded one ({:.2e})",
            to_linear.positions,
            100.0 * to_linear.share(),
            to_linear.largest,
            100.0 * to_fast.share(),
            to_fast.largest,
        );
        assert!(to_linear.share() >= 0.999, "{to_linear:?}");
        assert!(to_linear.largest > 0.0, "nothing was masked: the bits are those of the clear rows");
    });
}

#[test]
fn a_client_with_a_long_context_leaves_the_executors_memory_flat() {
    let context = repeats::CONTEXT.count();
    watched(move || {
        let endpoints = SplitEndpoints::new();
        let deployment = endpoints.of(DeploymentPlan::bare().workers(0)).start();
        let mut tenant = endpoints.tenant(&deployment, SplitRoute::SharedMemory, OPEN, None);
        // After one chunk of a prompt the buffers have their size, and later calls must not add to them.
        tenant.generate(&fixtures::prompt(1, 600), 4).expect("an answer");
        let before = (deployment.resident_bytes(DeploymentProcess::Executor), HeldResources::of(&deployment));
        tenant.generate(&fixtures::prompt(2, context), 16).expect("an answer");
        let after = (deployment.resident_bytes(DeploymentProcess::Executor), HeldResources::of(&deployment));
        eprintln!("executor before and after a context of {context} tokens: {before:?} {after:?}");
        let slack = 4 << 20;
        assert!(after.0 <= before.0 + slack, "{} bytes became {}", before.0, after.0);
        assert!(after.1.are_within(&before.1), "{before:?} {after:?}");
        // Sessions are reported once a second.
        let slab = eventually_some("the slab's size is told", || {
            deployment.client.status()["layers"]["sessions"][0]["slab_bytes"].as_u64()
        });
        assert!(slab > 0 && slab <= 256 << 20, "{slab}");
    });
}

fn holobiont(deployment: &Deployment) -> Command {
    let mut command = Command::new(fixtures::program("holobiont"));
    command.env("HOLOBIONT_STATE", deployment.place().state());
    command.env("HOLOBIONT_URL", deployment.client.url()).env("NO_COLOR", "1");
    command
}

fn chat_answer(client: &Client, model: &str) -> String {
    let body = json!({
        "model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16,
    });
    let answer = client.try_post("/v1/chat/completions", &body).expect("an answer");
    answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

#[test]
fn a_split_chat_answers_as_the_deployment_itself_does() {
    watched(|| {
        let deployment = DeploymentPlan::with_examples().start();
        for (model, adapter) in [(BASE, None), ("pirate", Some("pirate"))] {
            let mut chat = holobiont(&deployment);
            chat.args(["chat", "--split", "--temperature", "0", "--max-tokens", "16"]);
            if let Some(name) = adapter {
                chat.arg("--adapter").arg(fixtures::example(name));
            }
            let home = deployment.place().adapters();
            let said = chat.arg(QUESTION).env("XDG_CACHE_HOME", &home).output().expect("a chat");
            let complaint = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(said.status.success(), "{complaint}");
            assert!(complaint.contains("masking off"), "it says the mode: {complaint}");
            let text = String::from_utf8(said.stdout).expect("text");
            assert_eq!(text.trim_end(), chat_answer(&deployment.client, model).trim_end(), "{model}");
        }
    });
}

#[test]
fn an_operator_sees_every_session_and_what_it_used() {
    watched(|| {
        let endpoints = SplitEndpoints::new();
        let deployment = endpoints.of(DeploymentPlan::bare()).start();
        let client = &deployment.client;
        let tenants = SplitRoute::ALL.map(|route| {
            let mut tenant = endpoints.tenant(&deployment, route, OPEN, None);
            tenant.generate(&fixtures::prompt(5, 20), 4).expect("an answer");
            tenant
        });
        eventually("status lists three sessions", || {
            let layers = &client.status()["layers"];
            let listed = layers["sessions"].as_array().map_or(0, Vec::len);
            let decoded = layers["used"]["rows"]["decode"].as_u64();
            listed == 3 && layers["open"] == 3 && decoded >= Some(3 * 3 * fixtures::calls())
        });
        let status = client.status();
        for (session, route) in
            status["layers"]["sessions"].as_array().expect("a list").iter().zip(SplitRoute::ALL)
        {
            let tenant = if route == SplitRoute::Tls { CERTIFIED } else { "public" };
            assert_eq!(
                (&session["tenant"], &session["name"]),
                (&json!(tenant), &json!("tenant")),
                "{session}"
            );
            assert_eq!((&session["route"], &session["masking"]), (&json!(route.name()), &json!("off")));
            assert!(session["used"]["rows"]["decode"].as_u64() >= Some(3 * fixtures::calls()), "{session}");
        }
        let rows = client.metric("holobiont_layer_rows_total{class=\"decode\"}");
        assert!(rows >= (3 * 3 * fixtures::calls()) as f64, "{rows}");
        assert_eq!(client.metric("holobiont_layer_sessions"), 3.0);
        let shown = holobiont(&deployment).arg("status").output().expect("holobiont status");
        let shown = String::from_utf8(shown.stdout).expect("text");
        for word in ["shared memory", "ipc", "tls", "public", CERTIFIED] {
            assert!(shown.contains(word), "{word} is missing in\n{shown}");
        }
        drop(tenants);
        eventually("the sessions are gone", || client.metric("holobiont_layer_sessions") == 0.0);
    });
}

#[test]
fn a_key_lets_its_tenant_in_by_every_route_and_revoked_ends_its_sessions() {
    watched(|| {
        let endpoints = SplitEndpoints::new();
        let key = endpoints.add_key("bob");
        // Another key remains, since an empty key file is rejected as a mistake.
        let _ = endpoints.add_key("carol");
        let plan = endpoints
            .of(DeploymentPlan::bare().workers(0))
            .set("LAYER_KEY_FILE", &endpoints.key_file().to_string_lossy());
        let deployment = plan.start();
        for route in SplitRoute::ALL {
            let wrong = endpoints.try_tenant(&deployment, route, OPEN, Some("hb-wrong"));
            let error =
                wrong.err().unwrap_or_else(|| panic!("a wrong key opens {}", route.name())).to_string();
            assert!(error.contains("not authenticated") || error.contains("not accept"), "{error}");
        }
        let prompt = fixtures::prompt(8, 12);
        let golden = deployment.client.ask(&ask(BASE, &prompt)).answer.text;
        let bobs = SplitRoute::ALL.map(|route| {
            let mut tenant = endpoints.tenant(&deployment, route, OPEN, Some(&key));
            assert_eq!(tenant.session().opened().tenant, "bob");
            let tokens = tenant.generate(&prompt, repeats::ANSWER.count()).expect("an answer");
            assert_eq!(continuation(&text(), &tokens), golden, "over {}", route.name());
            tenant
        });
        // Clients with certificates do not depend on keys.
        let mut certified = endpoints.tenant(&deployment, SplitRoute::Tls, OPEN, None);
        endpoints.remove_keys("bob");
        let revoked = Instant::now();
        for (mut tenant, route) in bobs.into_iter().zip(SplitRoute::ALL) {
            let what = format!("the end of a session over {}", route.name());
            let ended = eventually_some(&what, || tenant.generate(&prompt, 1).err()).to_string();
            eprintln!("over {} a session ended {:?} after its key: {ended}", route.name(), revoked.elapsed());
            assert!(ended.contains("not authenticated") || ended.contains("not accept"), "{ended}");
        }
        assert!(certified.generate(&prompt, 1).is_ok());
    });
}

#[test]
fn the_program_answers_over_tls_and_says_what_the_executor_sees() {
    watched(|| {
        let endpoints = SplitEndpoints::new();
        let deployment = endpoints.of(DeploymentPlan::with_examples().workers(0)).start();
        let pirate = fixtures::example("pirate");
        let program = |masking| {
            let program = Program::new("generate", &endpoints, &deployment, SplitRoute::Tls).wearing(&pirate);
            program.arg("--masking").arg(masking).ask(STORY, 12).run()
        };
        let open = program("off");
        let tokens = text().encode_raw(STORY).expect("text");
        assert_eq!(
            open.text(),
            deployment.client.ask(&CompletionRequest::new("pirate", tokens, 12)).answer.text
        );
        assert_eq!(open.answer["mode"], "split over TLS, masking off");
        let covered = program("paper");
        assert_eq!(covered.answer["mode"], "split over TLS, masking paper (obfuscation)");
        assert_eq!(covered.text().is_empty(), open.text().is_empty());
    });
}
