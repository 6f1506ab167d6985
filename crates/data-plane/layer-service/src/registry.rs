//! Sessions and tenants' quotas, used by the connection threads.
//!
//! # Layout
//!
//! - this file: opening of sessions, and the table of all sessions
//! - `session`: a session, as its connection holds it

mod session;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use kv_cache::ledger;
use shmproto::{
    layer::{
        LAYER_VERSION, MAX_ROWS,
        control::{RefusalCode, SessionOpen, SessionOpened, SessionRefused},
    },
    message::LayerStats,
};

pub use self::session::RegisteredSession;
use super::{
    ConnectionId, SessionId, SessionTransport, Tenant,
    event_queue::{AccountedChannel, DispatcherEvent, DispatcherSender, Replies},
    session::{SessionCounters, SessionInfo},
    settings::Quotas,
    stats::{ClosedSessions, ServiceCounts},
};

/// Maximum number of concurrent calls per session, and the number of descriptors in each ring of a local one.
pub const MAX_CALLS: u32 = 64;

const MAX_NAME_BYTES: usize = 64;

/// Retry delay of a call that was refused for bytes or calls, in milliseconds.
const RETRY_MS: u32 = 10;

/// Retry delay of a session that was refused because the limit is reached, in milliseconds.
const REOPEN_MS: u32 = 1000;

/// Data about the base that sessions get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServedBase {
    /// Random number of this executor process.
    pub instance: u64,
    /// Bytes of the encoded catalog.
    pub catalog_bytes: u32,
    /// Kinds of masked rows that every site accepts.
    pub maskable: MaskedRowSupport,
}

/// Kinds of masked rows that every site accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskedRowSupport {
    /// Whether all sites have the float path, on which noises cancel out.
    pub linear: bool,
    /// Whether all sites have the modular path, on which pads cancel out exactly.
    pub ring: bool,
}

#[derive(Debug)]
struct RegistryEntry {
    info: Arc<SessionInfo>,
    account: Arc<SessionCounters>,
}

#[derive(Debug, Default)]
struct SessionTable {
    sessions: BTreeMap<ConnectionId, RegistryEntry>,
    memory: BTreeMap<Tenant, ledger::MemoryAccount>,
    /// Number of connections so far, the source of ids and session numbers.
    connections: u64,
    past: ClosedSessions,
}

#[derive(Debug)]
struct RegistryShared {
    quotas: Quotas,
    /// Memory of all tenants' channels and messages.
    memory: ledger::MemoryAccount,
    base: ServedBase,
    dispatcher: DispatcherSender,
    table: Mutex<SessionTable>,
    is_draining: AtomicBool,
    counts: ServiceCounts,
    /// Channels that the dispatcher has released; freeing them takes a while, so a connection thread does.
    discarded: Mutex<Vec<AccountedChannel>>,
}

/// The sessions of an executor; clones share them. Authentication is the servers' task; they name the tenant.
#[derive(Debug, Clone)]
pub struct Registry(Arc<RegistryShared>);

impl Registry {
    /// Makes an empty registry in front of the `dispatcher`; `memory` pays for channels and messages.
    #[must_use]
    pub fn new(
        quotas: Quotas,
        base: ServedBase,
        dispatcher: DispatcherSender,
        memory: ledger::MemoryAccount,
    ) -> Self {
        let shared = RegistryShared {
            quotas,
            memory,
            base,
            dispatcher,
            table: Mutex::new(SessionTable {
                connections: before_first(base.instance),
                ..SessionTable::default()
            }),
            is_draining: AtomicBool::new(false),
            counts: ServiceCounts::default(),
            discarded: Mutex::default(),
        };
        Self(Arc::new(shared))
    }

    /// Opens a session for `tenant`, whose calls come over `transport` and whose answers go to `replies`; a
    /// local session gets a channel later.
    ///
    /// With a session number, the session resumes: waiting calls of the old connection are dropped, and the
    /// old connection is closed if its loss was not noticed.
    ///
    /// # Errors
    /// Returns the refusal for the client.
    pub fn open(
        &self,
        tenant: &Tenant,
        open: &SessionOpen,
        transport: SessionTransport,
        replies: Option<Replies>,
    ) -> Result<RegisteredSession, SessionRefused> {
        let opened = self.admit(tenant, open, transport, replies);
        opened.inspect_err(|_| self.count_refusal())
    }

    fn admit(
        &self,
        tenant: &Tenant,
        open: &SessionOpen,
        transport: SessionTransport,
        replies: Option<Replies>,
    ) -> Result<RegisteredSession, SessionRefused> {
        self.check(open)?;
        let mut table = self.table();
        let predecessor = table.predecessor(tenant, SessionId(open.session))?;
        if predecessor.is_none() {
            table.check_room(tenant, &self.0.quotas)?;
        }
        table.connections += 1;
        let connection = ConnectionId(table.connections);
        let number = SessionId(if open.session == 0 { connection.0 } else { open.session });
        let SessionOpen { name, masking, .. } = open.clone();
        let info = Arc::new(SessionInfo { number, tenant: tenant.clone(), name, masking, transport });
        let account = Arc::new(SessionCounters::default());
        if let Some(entry) = predecessor.and_then(|old| table.sessions.remove(&old)) {
            entry.account.close();
            table.past.add(&entry.info, &entry.account);
        }
        table
            .sessions
            .insert(connection, RegistryEntry { info: Arc::clone(&info), account: Arc::clone(&account) });
        let memory = table.memory(tenant, &self.0);
        drop(table);
        let opened = self.opened(&info);
        let session = RegisteredSession {
            registry: self.clone(),
            connection,
            info,
            account,
            memory,
            slab: None,
            opened,
        };
        session.begin(predecessor, replies)?;
        failpoint::pass("layer.session_opened");
        Ok(session)
    }

    /// Stops opening sessions, because the process is shutting down.
    pub fn drain(&self) {
        self.0.is_draining.store(true, Ordering::Relaxed);
    }

    /// Whether the process is shutting down. Each client gets one
    /// [`shmproto::layer::control::FromLayers::Draining`].
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.0.is_draining.load(Ordering::Relaxed)
    }

    /// Returns the stats of all sessions, open and closed.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        let table = self.table();
        let open = table.sessions.values().map(|entry| (&*entry.info, &*entry.account));
        self.0.counts.report(&table.past, open)
    }

    pub(super) fn count_refusal(&self) {
        self.0.counts.refused.add(1);
    }

    pub(super) fn counts(&self) -> &ServiceCounts {
        &self.0.counts
    }

    /// Leaves a channel for a connection thread to free its memory.
    pub(super) fn discard(&self, channel: AccountedChannel) {
        self.discarded().push(channel);
    }

    /// Frees the memory of discarded channels.
    pub(super) fn empty_discarded(&self) {
        let discarded = std::mem::take(&mut *self.discarded());
        drop(discarded);
    }

    fn discarded(&self) -> MutexGuard<'_, Vec<AccountedChannel>> {
        // Every change is one call on a list, so a poisoned lock is usable.
        self.0.discarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, SessionTable> {
        // Every change is one call on a map, so the table is consistent even after a panic.
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the parts of a request that do not depend on the tenant.
    fn check(&self, open: &SessionOpen) -> Result<(), SessionRefused> {
        if open.version != LAYER_VERSION {
            let message = format!(
                "the client uses version {} of the layer protocol and the executor {LAYER_VERSION}: use \
                 one release",
                open.version
            );
            return Err(refused(RefusalCode::Version, message));
        }
        if self.is_draining() {
            let message = "the executor is shutting down: open the session with its successor".to_owned();
            return Err(SessionRefused {
                retry_after_ms: REOPEN_MS,
                ..refused(RefusalCode::Draining, message)
            });
        }
        if open.name.len() > MAX_NAME_BYTES || open.name.chars().any(char::is_control) {
            let message = format!(
                "a client's name has at most {MAX_NAME_BYTES} bytes and no control characters: shorten it"
            );
            return Err(refused(RefusalCode::Malformed, message));
        }
        check_masking(&open.masking, self.0.base.maskable)
    }

    fn opened(&self, info: &SessionInfo) -> SessionOpened {
        let RegistryShared { quotas, base, .. } = &*self.0;
        SessionOpened {
            session: info.number.0,
            instance: base.instance,
            tenant: info.tenant.to_string(),
            catalog_bytes: base.catalog_bytes,
            max_rows: MAX_ROWS.min(quotas.tenant_rows),
            max_waiting_rows: quotas.tenant_rows,
            max_bytes: quotas.tenant_bytes,
        }
    }

    fn remove_session(&self, connection: ConnectionId) {
        let mut table = self.table();
        // The entry is gone already if another connection resumed the session.
        if let Some(entry) = table.sessions.remove(&connection) {
            table.past.add(&entry.info, &entry.account);
        }
        table.memory.retain(|_, account| account.is_in_use());
        drop(table);
        failpoint::pass("layer.session_left");
        // Without a dispatcher there is no receiver.
        let _ = self.0.dispatcher.send(DispatcherEvent::Close { connection });
    }
}

impl SessionTable {
    /// Returns the connection to replace, if `number` names a session.
    fn predecessor(
        &self,
        tenant: &Tenant,
        number: SessionId,
    ) -> Result<Option<ConnectionId>, SessionRefused> {
        if number == SessionId(0) {
            return Ok(None);
        }
        let same = |entry: &RegistryEntry| entry.info.number == number && entry.info.tenant == *tenant;
        let found = self.sessions.iter().find(|(_, entry)| same(entry)).map(|(&connection, _)| connection);
        let message =
            "the session has ended or belongs to another tenant: open a new one, and repeat unanswered calls";
        found.map(Some).ok_or_else(|| refused(RefusalCode::NoSuchSession, message.to_owned()))
    }

    fn check_room(&self, tenant: &Tenant, quotas: &Quotas) -> Result<(), SessionRefused> {
        let of_tenant = self.sessions.values().filter(|entry| entry.info.tenant == *tenant).count();
        let (code, message) = if self.sessions.len() >= quotas.sessions {
            let message =
                format!("the executor has {} sessions, which is the limit: try again later", quotas.sessions);
            (RefusalCode::Busy, message)
        } else if of_tenant >= quotas.tenant_sessions {
            let message =
                format!("{tenant} has {of_tenant} sessions, which is the limit of a tenant: close one");
            (RefusalCode::Quota, message)
        } else {
            return Ok(());
        };
        Err(SessionRefused { retry_after_ms: REOPEN_MS, ..refused(code, message) })
    }

    /// Returns the memory account of the tenant, for slabs and messages of all its sessions.
    fn memory(&mut self, tenant: &Tenant, shared: &RegistryShared) -> ledger::MemoryAccount {
        let new = || shared.memory.part(&tenant.to_string(), shared.quotas.tenant_bytes);
        self.memory.entry(tenant.clone()).or_insert_with(new).clone()
    }
}

/// Returns the offset of session numbers, which differs between executors: a client that asks a successor for
/// its old session must not get another client's. Numbers stay below 2^53, so that every JSON reader keeps
/// them.
fn before_first(instance: u64) -> u64 {
    (instance >> 32) << 20
}

fn check_masking(mode: &str, maskable: MaskedRowSupport) -> Result<(), SessionRefused> {
    let MaskedRowSupport { linear, ring } = maskable;
    let message = match mode {
        "off" => return Ok(()),
        "paper" if linear => return Ok(()),
        "pads" | "shares" if ring => return Ok(()),
        "paper" => {
            "some layers of this base have no linear path, so masks would not cancel out: use masking off"
        }
        "pads" | "shares" => {
            "some layers of this base have no ring path, so pads would not cancel out: use masking off"
        }
        _ => "the masking mode is unknown: use off, paper, pads or shares",
    };
    Err(refused(RefusalCode::Masking, message.to_owned()))
}

/// Makes a refusal without a retry delay.
pub(super) fn refused(code: RefusalCode, message: String) -> SessionRefused {
    SessionRefused { code, message, retry_after_ms: 0 }
}
