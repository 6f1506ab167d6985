//! One base of the gateway: its name, its users, and whether it sleeps.
//!
//! The executors of a sleeping base do not run. The gateway decides when a base sleeps, and a supervisor, as
//! `holobiont up`, ends and starts the executors. The supervisor carries out requests in their order, so a
//! base that is woken while its executors still end is started after their end. The gateway remembers the
//! executors that it sent to sleep, because one of them may stay connected until its end.

use std::{
    fmt,
    io::Write as _,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::lock::lock;

/// Name of the base of a gateway with one base.
pub const ONLY_BASE: &str = "base";

/// Settings of a base's sleep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SleepSettings {
    /// Time without requests after which the base sleeps; `None` keeps it awake.
    pub after: Option<Duration>,
    /// Whether the executors run when the gateway starts.
    pub first: SleepPhase,
    /// Host memory that the executors of the base may use.
    pub host_bytes: u64,
}

impl Default for SleepSettings {
    fn default() -> Self {
        Self { after: None, first: SleepPhase::Awake, host_bytes: 0 }
    }
}

/// Whether a base sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepPhase {
    Awake,
    Asleep,
    /// The executors start because of a request.
    Waking,
}

impl SleepPhase {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Asleep => "asleep",
            Self::Waking => "waking",
        }
    }
}

/// A request to the supervisor about the executors of one base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SupervisorRequest {
    /// Ends the executors and their workers.
    Sleep(String),
    /// Starts the executors and their workers.
    Wake(String),
}

impl fmt::Display for SupervisorRequest {
    /// Formats the line that `holobiont up` reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sleep(base) => write!(f, "sleep {base}"),
            Self::Wake(base) => write!(f, "wake {base}"),
        }
    }
}

/// The process that ends and starts executors.
#[derive(Clone)]
pub struct Supervisor(Arc<dyn Fn(SupervisorRequest) + Send + Sync>);

impl fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor").finish_non_exhaustive()
    }
}

impl Supervisor {
    /// Creates a supervisor that receives requests through `ask`.
    #[must_use]
    pub fn new(ask: impl Fn(SupervisorRequest) + Send + Sync + 'static) -> Self {
        Self(Arc::new(ask))
    }

    /// Returns the supervisor that reads the standard output of this process.
    #[must_use]
    pub fn on_stdout() -> Self {
        Self::new(|request| {
            // Without a reader the supervisor is gone, and this process ends soon.
            let _ = writeln!(std::io::stdout(), "{request}");
        })
    }
}

/// Reason why a base does not fall asleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StaysAwake {
    /// No supervisor could start the executors again.
    Unsupervised,
    /// Requests use the base.
    InUse,
    /// The base sleeps already, or is waking.
    NotAwake,
}

#[derive(Debug)]
struct BaseUsage {
    users: usize,
    last_use: Instant,
    /// When the supervisor was asked to start the executors.
    woken: Option<Instant>,
    /// Instances of the executors that were sent to sleep.
    sent_to_sleep: Vec<u64>,
}

/// Counts of a base's sleep.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct SleepStats {
    /// How often the base fell asleep.
    pub sleeps: u64,
    /// How often the base served again after a sleep.
    pub wakes: u64,
    /// Seconds of all wakes together.
    pub wake_s: f64,
}

/// A base, shared by its requests, its lifecycle and the sleep of all bases.
#[derive(Debug)]
pub struct ServedBase {
    name: String,
    /// Name of the base in requests; `None` takes the name from its executor.
    served_name: Option<String>,
    settings: SleepSettings,
    supervisor: Option<Supervisor>,
    usage: Mutex<BaseUsage>,
    stats: Mutex<SleepStats>,
    phase: watch::Sender<SleepPhase>,
}

/// A use of a base, which keeps the base awake until it is dropped.
#[derive(Debug)]
pub(crate) struct BaseUse(Arc<ServedBase>);

impl ServedBase {
    #[must_use]
    pub fn new(
        name: String,
        served_name: Option<String>,
        settings: SleepSettings,
        supervisor: Option<Supervisor>,
    ) -> Arc<Self> {
        let (phase, _) = watch::channel(settings.first);
        let usage = BaseUsage { users: 0, last_use: Instant::now(), woken: None, sent_to_sleep: Vec::new() };
        Arc::new(Self {
            name,
            served_name,
            settings,
            supervisor,
            usage: Mutex::new(usage),
            stats: Mutex::default(),
            phase,
        })
    }

    /// Returns the name in settings and administration.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the configured name in requests.
    #[must_use]
    pub fn served_name(&self) -> Option<&str> {
        self.served_name.as_deref()
    }

    #[must_use]
    pub(crate) fn host_bytes(&self) -> u64 {
        self.settings.host_bytes
    }

    /// Returns the time without requests after which the base sleeps.
    #[must_use]
    pub(crate) fn sleeps_after(&self) -> Option<Duration> {
        self.settings.after.filter(|_| self.supervisor.is_some())
    }

    /// Whether the base ever sleeps.
    #[must_use]
    pub(crate) fn can_sleep(&self) -> bool {
        self.supervisor.is_some()
    }

    #[must_use]
    pub(crate) fn phase(&self) -> SleepPhase {
        *self.phase.borrow()
    }

    pub(crate) fn phases(&self) -> watch::Receiver<SleepPhase> {
        self.phase.subscribe()
    }

    #[must_use]
    pub(crate) fn stats(&self) -> SleepStats {
        *lock(&self.stats)
    }

    /// Returns the time since the last request ended; `None` while requests use the base.
    #[must_use]
    pub(crate) fn idle_time(&self) -> Option<Duration> {
        let usage = lock(&self.usage);
        (usage.users == 0).then(|| usage.last_use.elapsed())
    }

    /// Counts a use, which keeps the base awake. The base may be asleep, and is not woken.
    #[must_use]
    pub(crate) fn begin_use(self: &Arc<Self>) -> BaseUse {
        lock(&self.usage).users += 1;
        BaseUse(Arc::clone(self))
    }

    /// Restarts the time after which the base sleeps.
    pub(crate) fn note_use(&self) {
        lock(&self.usage).last_use = Instant::now();
    }

    /// Lets the base fall asleep; `instances` are its executors.
    pub(crate) fn fall_asleep(&self, instances: Vec<u64>) -> Result<(), StaysAwake> {
        let supervisor = self.supervisor.as_ref().ok_or(StaysAwake::Unsupervised)?;
        // The lock also orders the requests to the supervisor.
        let mut usage = lock(&self.usage);
        if self.phase() != SleepPhase::Awake {
            return Err(StaysAwake::NotAwake);
        }
        if usage.users > 0 {
            return Err(StaysAwake::InUse);
        }
        usage.sent_to_sleep = instances;
        lock(&self.stats).sleeps += 1;
        self.phase.send_replace(SleepPhase::Asleep);
        (supervisor.0)(SupervisorRequest::Sleep(self.name.clone()));
        Ok(())
    }

    /// Starts the executors of a sleeping base.
    pub(crate) fn wake(&self) {
        let Some(supervisor) = &self.supervisor else { return };
        let mut usage = lock(&self.usage);
        if self.phase() == SleepPhase::Asleep {
            usage.woken = Some(Instant::now());
            self.phase.send_replace(SleepPhase::Waking);
            (supervisor.0)(SupervisorRequest::Wake(self.name.clone()));
        }
    }

    /// Notes that an executor of the base serves.
    pub(crate) fn serves(&self) {
        let mut usage = lock(&self.usage);
        if self.phase() != SleepPhase::Waking {
            return;
        }
        let mut stats = lock(&self.stats);
        stats.wakes += 1;
        stats.wake_s += usage.woken.take().map_or(0.0, |woken| woken.elapsed().as_secs_f64());
        usage.last_use = Instant::now();
        self.phase.send_replace(SleepPhase::Awake);
    }

    /// Whether the executor with this instance was sent to sleep, and so ends soon.
    #[must_use]
    pub(crate) fn ends(&self, instance: u64) -> bool {
        lock(&self.usage).sent_to_sleep.contains(&instance)
    }
}

impl Drop for BaseUse {
    fn drop(&mut self) {
        let mut usage = lock(&self.0.usage);
        usage.users -= 1;
        usage.last_use = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> (Arc<ServedBase>, Arc<Mutex<Vec<String>>>) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&asked);
        let supervisor = Supervisor::new(move |request| lock(&kept).push(request.to_string()));
        let base = ServedBase::new("small".to_owned(), None, SleepSettings::default(), Some(supervisor));
        (base, asked)
    }

    #[test]
    fn a_base_in_use_stays_awake_and_one_without_users_sleeps_until_it_is_woken() {
        let (base, asked) = base();
        let used = base.begin_use();
        assert_eq!(base.fall_asleep(vec![7]), Err(StaysAwake::InUse));
        assert_eq!(base.idle_time(), None);
        drop(used);
        base.fall_asleep(vec![7]).unwrap();
        assert_eq!(base.fall_asleep(vec![]), Err(StaysAwake::NotAwake));
        assert!(base.ends(7) && !base.ends(8));
        base.wake();
        base.wake();
        assert_eq!(base.phase(), SleepPhase::Waking);
        base.serves();
        base.serves();
        assert_eq!(base.phase(), SleepPhase::Awake);
        assert_eq!(*lock(&asked), ["sleep small", "wake small"]);
        assert_eq!((base.stats().sleeps, base.stats().wakes), (1, 1));
    }

    #[test]
    fn without_a_supervisor_a_base_never_sleeps() {
        let settings = SleepSettings { after: Some(Duration::ZERO), ..SleepSettings::default() };
        let base = ServedBase::new("small".to_owned(), None, settings, None);
        assert_eq!(base.fall_asleep(vec![]), Err(StaysAwake::Unsupervised));
        assert_eq!(base.sleeps_after(), None);
    }
}
