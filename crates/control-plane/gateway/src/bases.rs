//! All bases of the gateway: the base that a model name means, and the sleep of the bases.
//!
//! A gateway has one [`App`] for each base, in the order of the settings. The names of bases and of their
//! adapters are one namespace: a request names a base, an adapter, or both as `base:adapter`.
//!
//! A base without requests falls asleep after its time. A request for a sleeping base wakes it. If the memory
//! of the host is too small for all bases, a wake lets the base that was idle for the longest time fall
//! asleep first.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    app::App,
    caller::Caller,
    errors::ApiError,
    lifecycle::GatewayReadiness,
    lock::lock,
    served_base::{BaseUse, SleepPhase, StaysAwake},
    tenant_slots::TenantSlots,
};

/// Failpoints of sleeping bases (crate `failpoint`).
pub const FAILPOINTS: &[&str] = &["gateway.base_fell_asleep"];

/// How often the idle times of all bases are compared with their settings.
const IDLE_LOOK: Duration = Duration::from_millis(500);
/// How often a request that waits for memory of the host looks again.
const MEMORY_LOOK: Duration = Duration::from_millis(100);
/// Maximum number of requests that wait for sleeping bases, and of those of one tenant.
const MAX_WAITING: usize = 512;
const MAX_TENANT_WAITING: usize = 64;

/// The bases of the gateway; at least one.
#[derive(Debug)]
pub struct Bases {
    apps: Vec<Arc<App>>,
    host_bytes: Option<u64>,
    wake_timeout: Duration,
    /// Held while it is decided which bases sleep.
    ledger: Mutex<()>,
    /// Requests that wait for sleeping bases.
    waiting: Arc<TenantSlots>,
}

impl Bases {
    /// Collects the bases, the first one first.
    ///
    /// # Panics
    /// If there is no base.
    #[must_use]
    pub fn new(apps: Vec<Arc<App>>, host_bytes: Option<u64>, wake_timeout: Duration) -> Arc<Self> {
        assert!(!apps.is_empty(), "a gateway has a base");
        for (index, app) in apps.iter().enumerate() {
            let others = apps.iter().enumerate().filter(|(other, _)| *other != index);
            let named = |(_, other): (usize, &Arc<App>)| {
                Some((other.base.served_name()?.to_owned(), Arc::downgrade(&other.registry)))
            };
            app.registry.share_names(others.filter_map(named).collect());
        }
        Arc::new(Self {
            apps,
            host_bytes,
            wake_timeout,
            ledger: Mutex::default(),
            waiting: TenantSlots::new(MAX_WAITING, MAX_TENANT_WAITING),
        })
    }

    #[must_use]
    pub fn all(&self) -> &[Arc<App>] {
        &self.apps
    }

    #[must_use]
    pub fn first(&self) -> &Arc<App> {
        &self.apps[0]
    }

    #[must_use]
    pub(crate) fn are_several(&self) -> bool {
        self.apps.len() > 1
    }

    /// Whether every request uses the first base at once, as in a gateway with one base that never sleeps.
    #[must_use]
    pub(crate) fn is_plain(&self) -> bool {
        !self.are_several() && !self.first().base.can_sleep()
    }

    /// Returns the status of the readiest base, and follows it.
    pub(crate) fn follow_status(self: &Arc<Self>) -> watch::Receiver<GatewayReadiness> {
        if !self.are_several() {
            return self.first().status.clone();
        }
        let (sender, receiver) = watch::channel(self.readiness());
        let bases = Arc::clone(self);
        tokio::spawn(async move {
            let mut each: Vec<_> = bases.apps.iter().map(|app| app.status.clone()).collect();
            loop {
                let changes = each.iter_mut().map(|status| Box::pin(status.changed()));
                let (changed, ..) = futures::future::select_all(changes).await;
                sender.send_replace(bases.readiness());
                if changed.is_err() {
                    return;
                }
            }
        });
        receiver
    }

    /// Returns the status of the readiest base.
    pub(crate) fn readiness(&self) -> GatewayReadiness {
        let rank = |status: &GatewayReadiness| match status {
            GatewayReadiness::Ready(_) => 0,
            GatewayReadiness::Asleep(_) => 1,
            GatewayReadiness::Starting { .. } => 2,
            GatewayReadiness::Lost { .. } => 3,
            GatewayReadiness::Closing => 4,
        };
        let each = self.apps.iter().map(|app| app.status.borrow().clone());
        each.min_by_key(rank).unwrap_or(GatewayReadiness::Closing)
    }

    /// Returns the base with this name in administration.
    pub(crate) fn named(&self, name: &str) -> Result<&Arc<App>, ApiError> {
        let found = self.apps.iter().find(|app| app.base.name() == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.apps.iter().map(|app| app.base.name()).collect();
            ApiError::not_found(format!("there is no base '{name}'; the bases are {}", names.join(", ")))
        })
    }

    /// Returns the base that `served_name` names in requests.
    pub(crate) fn served_as(&self, served_name: &str) -> Option<&Arc<App>> {
        self.apps.iter().find(|app| name_in_requests(app).as_deref() == Some(served_name))
    }

    /// Returns the base of the model that a request names; `None` if no base knows the model.
    ///
    /// # Errors
    /// If the model names an adapter of another base than its own.
    pub(crate) fn of_model(&self, model: &str, caller: &Caller) -> Result<Option<&Arc<App>>, ApiError> {
        if !self.are_several() {
            return Ok(Some(self.first()));
        }
        // Clients of Ollama's API add the tag.
        let untagged = model.strip_suffix(":latest").unwrap_or(model);
        for name in [model, untagged] {
            if let Some(app) = self.served_as(name).or_else(|| self.with_adapter(name, caller)) {
                return Ok(Some(app));
            }
            if let Some((app, adapter)) = self.of_pair(name) {
                return self.check_pair(app, adapter, caller).map(|()| Some(app));
            }
        }
        Ok(None)
    }

    /// Splits `base:adapter`.
    fn of_pair<'a>(&self, model: &'a str) -> Option<(&Arc<App>, &'a str)> {
        self.apps.iter().find_map(|app| {
            let rest = model.strip_prefix(&*name_in_requests(app)?)?.strip_prefix(':')?;
            Some((app, rest.strip_prefix(':').unwrap_or(rest)))
        })
    }

    /// Refuses an adapter of another base by name. The base itself refuses an adapter that no base has.
    fn check_pair(&self, app: &Arc<App>, adapter: &str, caller: &Caller) -> Result<(), ApiError> {
        match self.with_adapter(adapter, caller).filter(|owner| !Arc::ptr_eq(owner, app)) {
            Some(owner) if !has_adapter(app, adapter, caller) => {
                let [wrong, right] = [app, owner].map(|app| name_in_requests(app).unwrap_or_default());
                let message = format!(
                    "the adapter '{adapter}' belongs to the base '{right}', not to '{wrong}'; request \
                     '{right}:{adapter}'"
                );
                Err(ApiError::bad_request("adapter_of_other_base", message).of("model"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the base at which the caller's adapter, or a sum with it, is registered.
    pub(crate) fn with_adapter(&self, name: &str, caller: &Caller) -> Option<&Arc<App>> {
        self.apps.iter().find(|app| has_adapter(app, name, caller))
    }

    /// Collects the lists of all bases, without those that neither serve nor sleep.
    ///
    /// # Errors
    /// The error of the first base, if no base has a list.
    pub(crate) fn listed<T>(
        &self,
        list: impl Fn(&Arc<App>) -> Result<Vec<T>, ApiError>,
    ) -> Result<Vec<T>, ApiError> {
        let (mut all, mut refused) = (Vec::new(), None);
        let mut lists = 0;
        for app in &self.apps {
            match list(app) {
                Ok(one) => {
                    all.extend(one);
                    lists += 1;
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        match refused {
            Some(error) if lists == 0 => Err(error),
            _ => Ok(all),
        }
    }

    /// Uses a base, and wakes it if it sleeps.
    ///
    /// # Errors
    /// If the base does not serve in time, or too many requests of the tenant wait for sleeping bases.
    pub(crate) async fn use_awake(&self, app: &Arc<App>, tenant: &Arc<str>) -> Result<BaseUse, ApiError> {
        let used = app.base.begin_use();
        if app.base.phase() == SleepPhase::Awake {
            return Ok(used);
        }
        let slot = self.waiting.acquire(tenant, Duration::ZERO).await;
        let _slot = slot.ok_or_else(|| {
            ApiError::queue_full(1, "too many requests wait for sleeping bases; try again when a base serves")
        })?;
        let deadline = Instant::now() + self.wake_timeout;
        self.wake(app, deadline).await?;
        let mut phases = app.base.phases();
        let mut status = app.status.clone();
        let awake = phases.wait_for(|phase| *phase == SleepPhase::Awake);
        let serves = status
            .wait_for(|status| matches!(status, GatewayReadiness::Ready(_) | GatewayReadiness::Closing));
        let served = timeout_at(deadline, async { awake.await.is_ok() && serves.await.is_ok() }).await;
        match served {
            Ok(true) => Ok(used),
            Ok(false) => Err(ApiError::shutting_down()),
            Err(_) => Err(ApiError::unavailable(
                "base_still_waking",
                format!(
                    "the base '{}' did not wake within {} ms (--wake-timeout-ms); try again shortly",
                    app.base.name(),
                    self.wake_timeout.as_millis()
                ),
            )),
        }
    }

    /// Starts the executors of a sleeping base as soon as the memory of the host suffices.
    async fn wake(&self, app: &Arc<App>, deadline: Instant) -> Result<(), ApiError> {
        while !self.try_wake(app) {
            if Instant::now() >= deadline {
                let message = format!(
                    "the base '{}' sleeps, and bases in use hold the memory of the host; try again shortly",
                    app.base.name()
                );
                return Err(ApiError::unavailable("base_waits_for_memory", message));
            }
            sleep(MEMORY_LOOK).await;
        }
        Ok(())
    }

    /// Starts the executors of a base if the memory of the host suffices. Idle bases that may sleep fall
    /// asleep for it, the longest idle one first.
    fn try_wake(&self, app: &Arc<App>) -> bool {
        let _held = lock(&self.ledger);
        let others = self.apps.iter().filter(|other| !Arc::ptr_eq(other, app));
        let mut awake: Vec<_> = others.filter(|other| other.base.phase() != SleepPhase::Asleep).collect();
        awake.sort_by_key(|other| other.base.idle_time());
        let mut held_bytes =
            app.base.host_bytes() + awake.iter().map(|other| other.base.host_bytes()).sum::<u64>();
        while self.host_bytes.is_some_and(|limit| held_bytes > limit) {
            let may_sleep = |other: &App| other.base.sleeps_after().is_some();
            let idle = awake.iter().rposition(|other| may_sleep(other) && fall_asleep(other).is_ok());
            let Some(index) = idle else { return false };
            held_bytes -= awake.remove(index).base.host_bytes();
        }
        app.base.wake();
        true
    }

    /// Lets a base fall asleep on request of an administrator.
    pub(crate) fn send_to_sleep(&self, app: &Arc<App>) -> Result<(), StaysAwake> {
        let _held = lock(&self.ledger);
        fall_asleep(app)
    }

    /// Lets bases fall asleep that were idle for their time, until the task is aborted.
    pub(crate) async fn follow_idle_times(self: Arc<Self>) {
        loop {
            sleep(IDLE_LOOK).await;
            for app in &self.apps {
                if app.is_busy() {
                    app.base.note_use();
                    self.wake_for_work(app);
                } else if is_idle_for_its_time(app) && self.send_to_sleep(app).is_ok() {
                    tracing::info!(base = app.base.name(), "the base falls asleep");
                }
            }
        }
    }

    /// Wakes a sleeping base whose training waits, for example after a restart of the gateway.
    fn wake_for_work(&self, app: &Arc<App>) {
        if app.base.phase() == SleepPhase::Asleep {
            self.try_wake(app);
        }
    }
}

/// Returns the name of a base in requests; `None` until the first executor names it.
pub(crate) fn name_in_requests(app: &App) -> Option<String> {
    let configured = app.base.served_name().map(str::to_owned);
    configured.or_else(|| app.last_serving().ok().map(|serving| serving.base_name.clone()))
}

fn has_adapter(app: &App, name: &str, caller: &Caller) -> bool {
    let entries = app.registry.entries();
    let is_known = |name: &str| entries.find(name, caller).is_some();
    // The parts of a sum belong to one base.
    let part = name.split('+').next().unwrap_or(name);
    is_known(name) || is_known(part) || part.rsplit_once(':').is_some_and(|(part, _)| is_known(part))
}

fn is_idle_for_its_time(app: &App) -> bool {
    let idle = app.base.idle_time().zip(app.base.sleeps_after());
    let is_awake = app.base.phase() == SleepPhase::Awake && app.serving().is_ok();
    is_awake && idle.is_some_and(|(idle, limit)| idle >= limit)
}

/// Lets an idle base fall asleep.
fn fall_asleep(app: &App) -> Result<(), StaysAwake> {
    if !app.base.can_sleep() {
        return Err(StaysAwake::Unsupervised);
    }
    if app.is_busy() {
        return Err(StaysAwake::InUse);
    }
    let serving = app.serving().map_err(|_| StaysAwake::NotAwake)?;
    app.base.fall_asleep(serving.ready.iter().map(|ready| ready.welcome.instance).collect())?;
    // The executors end soon, so no request may be sent to them.
    app.executors.all().iter().for_each(|member| member.fall_asleep());
    failpoint::pass("gateway.base_fell_asleep");
    Ok(())
}
