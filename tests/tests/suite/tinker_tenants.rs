//! Tenants that train and sample at once, while executor and trainers are killed: the log-probabilities of
//! sampling and training are the same bits, and every adapter is that of an undisturbed run.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
    time::Duration,
};

use e2e_tests::{
    Client, DeploymentPlan, eventually,
    keys::add_key,
    repeats, signal,
    tinker::{Example, TinkerModel},
    watched,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const ROUNDS: usize = 3;
const PROMPT: usize = 6;
const SAMPLED: usize = 6;
/// Time between two attempts to begin while processes restart.
const PAUSE: Duration = Duration::from_millis(50);

/// Finished rounds and failed requests of all tenants.
#[derive(Default)]
struct TrainingCounts {
    rounds: AtomicUsize,
    failures: AtomicUsize,
}

/// One tenant, which trains on data of its own.
struct TrainingTenant {
    client: Client,
    number: u32,
}

impl TrainingTenant {
    fn tokens(&self, first: usize, count: usize) -> Vec<u32> {
        let first = 100 + 500 * self.number + u32::try_from(first).expect("few tokens");
        (first..).take(count).collect()
    }

    /// Begins with new weights, or with the state at `path`, as soon as there is a trainer.
    fn begin(&self, path: Option<&str>) -> TinkerModel<'_> {
        loop {
            let begun = match path {
                Some(path) => TinkerModel::try_resume(&self.client, path),
                None => {
                    let lora = json!({ "rank": 4, "seed": self.number, "train_unembed": false });
                    TinkerModel::try_begin(&self.client, &lora)
                }
            };
            match begun {
                Ok(model) => return model,
                Err(failure) => check_server(&failure),
            }
            thread::sleep(PAUSE);
        }
    }

    /// Trains all rounds and serves the adapter; after a failure goes on from the last state. Returns the
    /// generation of the adapter.
    fn learn(&self, counts: &TrainingCounts) -> Value {
        let (mut model, mut state, mut round) = (self.begin(None), None, 0);
        loop {
            let failure = if round < ROUNDS {
                match self.round(&mut model, round) {
                    Ok(path) => {
                        (state, round) = (Some(path), round + 1);
                        counts.rounds.fetch_add(1, Relaxed);
                        continue;
                    }
                    Err(failure) => failure,
                }
            } else {
                match model.try_publish("end") {
                    Ok(name) => {
                        model.end();
                        return self.client.adapter(&name)["generation"].clone();
                    }
                    Err(failure) => failure,
                }
            };
            check_server(&failure);
            counts.failures.fetch_add(1, Relaxed);
            model.end();
            model = self.begin(state.as_deref());
        }
    }

    /// Makes a step, samples with the new weights, and evaluates the sample. Returns the path of the state.
    fn round(&self, model: &mut TinkerModel<'_>, round: usize) -> Result<String, Value> {
        let tokens = self.tokens(20 * round, 16);
        let weights = vec![0.1; tokens.len() - 1];
        model.try_step(&[Example { tokens, weights }], &json!({ "learning_rate": 1e-3 }))?;
        let sampler = model.try_sampler()?;
        let prompt = self.tokens(200, PROMPT);
        let (sampled, logprobs) = model.try_sample(&sampler, &prompt, SAMPLED)?;
        assert_eq!(sampled.len(), SAMPLED);
        let trained = model.try_logprobs(&[prompt, sampled].concat())?;
        let bits = |logprobs: &[f32]| logprobs.iter().map(|logprob| logprob.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&logprobs), bits(&trained[PROMPT - 1..]), "tenant {}, round {round}", self.number);
        model.try_save(&format!("round-{round}"))
    }
}

/// Panics unless the failure is one that a restart may mend.
fn check_server(failure: &Value) {
    assert_eq!(failure["category"], "server", "{failure}");
}

/// Lets all tenants learn at once, while `disturb` runs. Returns the generations of their adapters.
fn learn_at_once(tenants: &[TrainingTenant], counts: &TrainingCounts, disturb: impl FnOnce()) -> Vec<Value> {
    thread::scope(|scope| {
        let learning = tenants.iter().map(|tenant| scope.spawn(|| tenant.learn(counts)));
        let learning: Vec<_> = learning.collect();
        disturb();
        learning.into_iter().map(|tenant| tenant.join().expect("a tenant learns")).collect()
    })
}

#[test]
fn tenants_sample_the_bits_that_they_train_and_learn_the_same_whatever_is_killed() {
    watched(|| {
        let count = repeats::TENANTS.count();
        let key_file = tempfile::NamedTempFile::new().expect("a file").into_temp_path();
        let numbers = 0..u32::try_from(count).expect("few tenants");
        let keys: Vec<_> =
            numbers.map(|number| (number, add_key(&key_file, &format!("t{number}"), "admin"))).collect();
        let plan = DeploymentPlan::bare().restless().set("MAX_TRAINERS", &count.to_string());
        let deployment = plan.set("API_KEY_FILE", &key_file.display().to_string()).start();
        let tenant = |(number, key): (u32, String)| TrainingTenant {
            client: deployment.client.with_key(&key),
            number,
        };
        let tenants: Vec<_> = keys.into_iter().map(tenant).collect();

        let (counts, rounds) = (TrainingCounts::default(), |of: &TrainingCounts| of.rounds.load(Relaxed));
        let disturbed = learn_at_once(&tenants, &counts, || {
            eventually("as many rounds as tenants", || rounds(&counts) >= count);
            deployment.kill_executor();
            eventually("twice as many rounds", || rounds(&counts) >= 2 * count);
            deployment.trainers().into_iter().for_each(|trainer| signal(trainer, Signal::KILL));
        });
        assert_ne!(counts.failures.load(Relaxed), 0, "the kills were noticed");
        let quiet = TrainingCounts::default();
        let undisturbed = learn_at_once(&tenants, &quiet, || {});
        assert_eq!(quiet.failures.load(Relaxed), 0);
        assert_eq!(disturbed, undisturbed);
        assert!(deployment.stop().success());
    });
}
