//! Adapters that are loaded, replaced, unloaded and pinned all the time, on any of the hosts.

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

/// Names that stand for another content all the time, or for none.
pub(crate) const CHANGING: [&str; 3] = ["ash", "birch", "cedar"];
/// Names that stand for the same from the beginning to the end.
pub(crate) const STEADY: [&str; 2] = ["oak", "yew"];
/// Between two changes.
const PAUSE: Duration = Duration::from_millis(60);
/// What a change may always be refused with: a host that has not yet heard of the last one is asked for the next.
const ALWAYS: [&str; 2] = ["registry_conflict", "model_not_found"];
/// No answer, or half of one.
pub(crate) const SILENCE: &str = "silence";

/// What was changed, and what became of it.
#[derive(Debug, Default)]
pub(crate) struct ChangeState {
    names: PossibleNames,
    pins: PossibleNames,
    /// What changes were refused with since that was looked at last, and how often.
    refused: BTreeMap<String, u64>,
    /// Changes that were answered.
    pub(crate) done: u64,
}

#[derive(Debug)]
struct ChangeShared {
    state: Mutex<ChangeState>,
    /// Who may be asked: those that can be reached.
    hosts: Mutex<Vec<Client>>,
    stop: AtomicBool,
}

/// Somebody who changes adapters until this is finished.
#[derive(Debug)]
pub(crate) struct AdapterChanges {
    shared: Arc<ChangeShared>,
    thread: Option<JoinHandle<()>>,
}

impl AdapterChanges {
    /// Loads what stays, on the first of `hosts`, and begins.
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

    /// Waits for the change under way; there is no other until this is dropped.
    pub(crate) fn pause(&self) -> MutexGuard<'_, ChangeState> {
        lock(&self.shared.state)
    }

    /// From now on these are asked, and nobody else any more.
    pub(crate) fn ask(&self, hosts: Vec<Client>) {
        let _between = self.pause();
        *lock(&self.shared.hosts) = hosts;
    }

    /// Fails if whoever changes adapters has seen something they should not have.
    pub(crate) fn check(&mut self) {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.finish();
        }
    }

    /// Ends it.
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
    /// Compares with what the hosts list, which settles what was uncertain; returns what each name stands for.
    pub(crate) fn reconcile(&mut self, listed: &[ListedAdapter]) -> BTreeMap<String, String> {
        let registry: Vec<_> = listed.iter().map(|one| (one.name.clone(), one.generation.clone())).collect();
        self.names.reconcile(&registry);
        let pinned = listed.iter().filter(|one| one.is_pinned && STEADY.contains(&one.name.as_str()));
        let pinned: Vec<_> = pinned.map(|one| (one.name.clone(), "pinned".to_owned())).collect();
        self.pins.reconcile(&pinned);
        registry.into_iter().collect()
    }

    /// Fails if a change was refused with something that nothing explains.
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

/// What a host lists.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListedAdapter {
    pub(crate) name: String,
    generation: String,
    is_pinned: bool,
}

impl ListedAdapter {
    /// All that a host lists, by name; `None` if it does not answer.
    pub(crate) fn all(client: &Client) -> Option<Vec<Self>> {
        let body = client.try_get("/v1/lora_adapters").ok()?;
        // What is being drained has lost its name already.
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

/// The same, but for a registry that was lost in the middle of a change: that may have happened.
fn certain(outcome: Result<Value, RequestFault>) -> Result<Value, RequestFault> {
    match outcome {
        Err(RequestFault::Refused { code, .. }) if code == "registry_unavailable" => {
            Err(RequestFault::Silence(code))
        }
        other => other,
    }
}
