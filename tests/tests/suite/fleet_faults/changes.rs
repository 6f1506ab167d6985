//! Adapters that are loaded, replaced, unloaded and pinned continuously, on any of the hosts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use e2e_tests::{
    Client, RequestFault,
    chaos::{AdapterVariants, ChaosRng, PossibleNames},
};
use serde_json::{Value, json};

/// Names whose content changes all the time, or is absent.
pub(crate) const CHANGING: [&str; 3] = ["ash", "birch", "cedar"];
pub(crate) const STEADY: [&str; 2] = ["oak", "yew"];
const PAUSE: Duration = Duration::from_millis(60);
/// Errors that any change may get: a host that has not yet seen the last change may handle the next.
const ALWAYS: [&str; 2] = ["registry_conflict", "model_not_found"];
/// Pseudo code for a missing or incomplete answer.
pub(crate) const SILENCE: &str = "silence";

#[derive(Debug, Default)]
pub(crate) struct ChangeState {
    names: PossibleNames,
    pins: PossibleNames,
    /// Errors since the last check, with counts.
    refused: BTreeMap<String, u64>,
    pub(crate) done: u64,
}

#[derive(Debug)]
struct ChangeShared {
    state: Mutex<ChangeState>,
    hosts: Mutex<Vec<Client>>,
    stop: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct AdapterChanges {
    shared: Arc<ChangeShared>,
    thread: Option<JoinHandle<()>>,
}

impl AdapterChanges {
    /// Loads the steady adapters on the first of `hosts`, and starts the thread.
    pub(crate) fn begin(hosts: Vec<Client>, variants: &Arc<AdapterVariants>, seed: u64) -> Self {
        let mut state = ChangeState::default();
        for (name, (path, generation)) in STEADY.iter().zip(&variants.adapters) {
            assert_eq!(hosts[0].load(name, path), *generation);
            state.names.change(name, Some(generation.clone()), &Ok(()));
        }
        let (hosts, stop) = (Mutex::new(hosts), AtomicBool::new(false));
        let shared = Arc::new(ChangeShared { state: Mutex::new(state), hosts, stop });
        let changer = AdapterChanger {
            shared: Arc::clone(&shared),
            variants: Arc::clone(variants),
            random: ChaosRng::new(seed),
        };
        Self { shared, thread: Some(thread::spawn(move || changer.run())) }
    }

    /// Waits for the current change and blocks further ones until the guard is dropped.
    pub(crate) fn pause(&self) -> MutexGuard<'_, ChangeState> {
        lock(&self.shared.state)
    }

    pub(crate) fn ask(&self, hosts: Vec<Client>) {
        let _between = self.pause();
        *lock(&self.shared.hosts) = hosts;
    }

    /// Fails if the thread has seen an unexpected result.
    pub(crate) fn check(&mut self) {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.finish();
        }
    }

    pub(crate) fn finish(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ChangeState {
    /// Compares with the hosts' list, which resolves uncertain changes; returns each name's content.
    pub(crate) fn reconcile(&mut self, listed: &[ListedAdapter]) -> BTreeMap<String, String> {
        let registry: Vec<_> = listed.iter().map(|one| (one.name.clone(), one.generation.clone())).collect();
        self.names.reconcile(&registry);
        let pinned = listed.iter().filter(|one| one.is_pinned && STEADY.contains(&one.name.as_str()));
        let pinned: Vec<_> = pinned.map(|one| (one.name.clone(), "pinned".to_owned())).collect();
        self.pins.reconcile(&pinned);
        registry.into_iter().collect()
    }

    /// Fails if a change got an error that the fault does not explain.
    pub(crate) fn explain(&mut self, what: &str, with: &[&str]) {
        let known: BTreeSet<&str> = ALWAYS.iter().chain(with).copied().collect();
        for (code, count) in std::mem::take(&mut self.refused) {
            eprintln!("  {count} changes: {code}");
            assert!(known.contains(code.as_str()), "{what} explains no {code}");
        }
    }

    fn note<T>(&mut self, outcome: &Result<T, RequestFault>) {
        match outcome {
            Ok(_) => self.done += 1,
            Err(RequestFault::Refused { code, .. }) => *self.refused.entry(code.clone()).or_default() += 1,
            Err(RequestFault::Silence(_)) => *self.refused.entry(SILENCE.to_owned()).or_default() += 1,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListedAdapter {
    pub(crate) name: String,
    generation: String,
    is_pinned: bool,
}

impl ListedAdapter {
    /// All entries of a host, by name; `None` if it does not answer.
    pub(crate) fn all(client: &Client) -> Option<Vec<Self>> {
        let body = client.try_get("/v1/lora_adapters").ok()?;
        // A draining adapter has already lost its name.
        let entries = body["data"].as_array()?.iter().filter(|entry| entry["state"] != "draining");
        let mut listed: Vec<_> = entries.map(Self::read).collect();
        listed.sort();
        Some(listed)
    }

    fn read(entry: &Value) -> Self {
        let text = |field: &str| entry[field].as_str().expect("a string").to_owned();
        Self { name: text("name"), generation: text("generation"), is_pinned: entry["pinned"] == true }
    }
}

struct AdapterChanger {
    shared: Arc<ChangeShared>,
    variants: Arc<AdapterVariants>,
    random: ChaosRng,
}

impl AdapterChanger {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            self.change();
            thread::sleep(PAUSE);
        }
    }

    fn change(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = lock(&shared.state);
        let client = self.random.pick(&lock(&shared.hosts)).clone();
        match self.random.below(8) {
            0..5 => {
                let name = *self.random.pick(&CHANGING);
                let (path, generation) = self.random.pick(&self.variants.adapters).clone();
                let body = json!({ "lora_name": name, "lora_path": path, "load_inplace": true });
                let outcome = client.try_post("/v1/load_lora_adapter", &body);
                state.note(&outcome);
                state.names.change(name, Some(generation), &certain(outcome));
            }
            5 => {
                let name = *self.random.pick(&CHANGING);
                let outcome = client.try_post("/v1/unload_lora_adapter", &json!({ "lora_name": name }));
                state.note(&outcome);
                state.names.change(name, None, &certain(outcome));
            }
            more => {
                let (name, pinned) = (*self.random.pick(&STEADY), more == 6);
                let body = json!({ "lora_name": name, "pinned": pinned });
                let outcome = client.try_post("/v1/pin_lora_adapter", &body);
                state.note(&outcome);
                state.pins.change(name, pinned.then(|| "pinned".to_owned()), &certain(outcome));
            }
        }
    }
}

/// Outcome in which a loss of the registry during a change counts as uncertain.
fn certain(outcome: Result<Value, RequestFault>) -> Result<Value, RequestFault> {
    match outcome {
        Err(RequestFault::Refused { code, .. }) if code == "registry_unavailable" => {
            Err(RequestFault::Silence(code))
        }
        other => other,
    }
}
