//! Sessions, and what tenants may hold: in front of the hub, asked from the doors' threads.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use shmproto::{
    channel::{ExecutorChannel, Geometry},
    layer::{
        CallHeader, LAYER_VERSION, MAX_ROWS, ReplyHeader, Status,
        control::{Open, Opened, RefusalCode, Refused, SessionStats},
    },
    message::LayerStats,
};

use super::{
    SessionId, SessionNumber, Tenant, Transport,
    figures::{Counts, Past},
    inbox::{HubEvent, HubSender, Opening, Payload, Replies, SendError},
    purse::{Held, Purse},
    session::{Account, Facts},
    settings::Quotas,
};

/// Calls of a session under way; more are refused. Also the descriptors of each ring of a local one.
pub const MOST_CALLS: u32 = 64;

/// Most bytes of a client's name.
const MOST_NAME_BYTES: usize = 64;

/// When a call that was refused for bytes or places is worth repeating.
const RETRY_MS: u32 = 10;

/// When a session that was refused for lack of places is worth opening again.
const REOPEN_MS: u32 = 1000;

/// What sessions are told of the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Base {
    /// Chosen at random when the executor starts.
    pub instance: u64,
    /// Bytes of the encoded catalog.
    pub catalog_bytes: u32,
    /// Whether masked rows may be sent to every site.
    pub linearity: Linearity,
}

/// Which sites have the linear path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Linearity {
    /// All: masks cancel out.
    Everywhere,
    /// Not all.
    InPart,
}

#[derive(Debug)]
struct Entry {
    facts: Arc<Facts>,
    account: Arc<Account>,
}

#[derive(Debug, Default)]
struct Table {
    sessions: BTreeMap<SessionId, Entry>,
    purses: BTreeMap<Tenant, Weak<Purse>>,
    /// Counts connections; the source of ids and numbers.
    connections: u64,
    /// What closed sessions have used.
    past: Past,
}

#[derive(Debug)]
struct Shared {
    quotas: Quotas,
    base: Base,
    hub: HubSender,
    table: Mutex<Table>,
    is_draining: AtomicBool,
    counts: Counts,
}

/// The sessions of an executor. Clones are the same. It authenticates nobody: a door does, and names the tenant.
#[derive(Debug, Clone)]
pub struct Registry(Arc<Shared>);

impl Registry {
    /// Without sessions, in front of `hub`.
    #[must_use]
    pub fn new(quotas: Quotas, base: Base, hub: HubSender) -> Self {
        let shared = Shared {
            quotas,
            base,
            hub,
            table: Mutex::new(Table { connections: before_first(base.instance), ..Table::default() }),
            is_draining: AtomicBool::new(false),
            counts: Counts::default(),
        };
        Self(Arc::new(shared))
    }

    /// Opens a session for `tenant`, whose calls come over `transport` and whose answers go to `replies`; a local one is
    /// given a channel later. With a number, it takes the place of the session of that number, whose connection was lost,
    /// whether or not that was noticed: what the old connection waits for is forgotten and it is hung up on.
    ///
    /// # Errors
    /// What the client is to be told.
    pub fn open(
        &self,
        tenant: &Tenant,
        open: &Open,
        transport: Transport,
        replies: Option<Replies>,
    ) -> Result<Session, Refused> {
        let opened = self.admit(tenant, open, transport, replies);
        opened.inspect_err(|_| self.count_refusal())
    }

    fn admit(
        &self,
        tenant: &Tenant,
        open: &Open,
        transport: Transport,
        replies: Option<Replies>,
    ) -> Result<Session, Refused> {
        self.check(open)?;
        let mut table = self.table();
        let predecessor = table.predecessor(tenant, SessionNumber(open.session))?;
        if predecessor.is_none() {
            table.check_room(tenant, &self.0.quotas)?;
        }
        table.connections += 1;
        let session = SessionId(table.connections);
        let number = SessionNumber(if open.session == 0 { session.0 } else { open.session });
        let Open { name, masking, .. } = open.clone();
        let facts = Arc::new(Facts { number, tenant: tenant.clone(), name, masking, transport });
        let account = Arc::new(Account::default());
        if let Some(entry) = predecessor.and_then(|old| table.sessions.remove(&old)) {
            entry.account.close();
            table.past.add(&entry.facts, &entry.account);
        }
        table.sessions.insert(session, Entry { facts: Arc::clone(&facts), account: Arc::clone(&account) });
        let purse = table.purse(tenant, self.0.quotas.tenant_bytes);
        drop(table);
        let opened = self.opened(&facts);
        let session =
            Session { registry: self.clone(), id: session, facts, account, purse, slab: None, opened };
        session.begin(predecessor, replies)?;
        failpoint::pass("layer.session_opened");
        Ok(session)
    }

    /// The process is about to end: no sessions are opened any more.
    pub fn drain(&self) {
        self.0.is_draining.store(true, Ordering::Relaxed);
    }

    /// Whether it is: clients are to be told once, with [`shmproto::layer::control::FromLayers::Draining`].
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.0.is_draining.load(Ordering::Relaxed)
    }

    /// Sessions, and what all of them have used.
    #[must_use]
    pub fn figures(&self) -> LayerStats {
        let table = self.table();
        let open = table.sessions.values().map(|entry| (&*entry.facts, &*entry.account));
        self.0.counts.tell(&table.past, open)
    }

    /// Counts a client that a door refused.
    pub(super) fn count_refusal(&self) {
        self.0.counts.refused.add(1);
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.0.counts
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Every change is one call on a map, so the table is whole even if a holder of the lock panicked.
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has nothing to do with who asks.
    fn check(&self, open: &Open) -> Result<(), Refused> {
        if open.version != LAYER_VERSION {
            let message = format!(
                "the client speaks version {} of the layer protocol and this executor {LAYER_VERSION}: run one release",
                open.version
            );
            return Err(refused(RefusalCode::Version, message));
        }
        if self.is_draining() {
            let message = "the executor is about to end: open the session with its successor".to_owned();
            return Err(Refused { retry_after_ms: REOPEN_MS, ..refused(RefusalCode::Draining, message) });
        }
        if open.name.len() > MOST_NAME_BYTES || open.name.chars().any(char::is_control) {
            let message = format!(
                "a client's name has at most {MOST_NAME_BYTES} bytes and no control characters: shorten it"
            );
            return Err(refused(RefusalCode::Malformed, message));
        }
        check_masking(&open.masking, self.0.base.linearity)
    }

    fn opened(&self, facts: &Facts) -> Opened {
        let Shared { quotas, base, .. } = &*self.0;
        Opened {
            session: facts.number.0,
            instance: base.instance,
            tenant: facts.tenant.to_string(),
            catalog_bytes: base.catalog_bytes,
            max_rows: MAX_ROWS.min(quotas.tenant_rows),
            max_waiting_rows: quotas.tenant_rows,
            max_bytes: quotas.tenant_bytes,
        }
    }

    fn leave(&self, session: SessionId) {
        let mut table = self.table();
        // Gone already if it was taken over.
        if let Some(entry) = table.sessions.remove(&session) {
            table.past.add(&entry.facts, &entry.account);
        }
        table.purses.retain(|_, purse| purse.strong_count() > 0);
        drop(table);
        failpoint::pass("layer.session_left");
        // Without a hub there is nobody to tell.
        let _ = self.0.hub.send(HubEvent::Close { session });
    }
}

impl Table {
    /// The connection to take over, if there is to be one.
    fn predecessor(&self, tenant: &Tenant, number: SessionNumber) -> Result<Option<SessionId>, Refused> {
        if number == SessionNumber(0) {
            return Ok(None);
        }
        let same = |entry: &Entry| entry.facts.number == number && entry.facts.tenant == *tenant;
        let found = self.sessions.iter().find(|(_, entry)| same(entry)).map(|(&session, _)| session);
        let message = "the session is over, or another tenant's: open a new one; what it has no answer to may be repeated";
        found.map(Some).ok_or_else(|| refused(RefusalCode::NoSuchSession, message.to_owned()))
    }

    fn check_room(&self, tenant: &Tenant, quotas: &Quotas) -> Result<(), Refused> {
        let of_tenant = self.sessions.values().filter(|entry| entry.facts.tenant == *tenant).count();
        let (code, message) = if self.sessions.len() >= quotas.sessions {
            let message =
                format!("the executor has {} sessions, as many as it takes: try again", quotas.sessions);
            (RefusalCode::Busy, message)
        } else if of_tenant >= quotas.tenant_sessions {
            let message =
                format!("{tenant} has {of_tenant} sessions, as many as a tenant may have: close one");
            (RefusalCode::Quota, message)
        } else {
            return Ok(());
        };
        Err(Refused { retry_after_ms: REOPEN_MS, ..refused(code, message) })
    }

    fn purse(&mut self, tenant: &Tenant, most_bytes: u64) -> Arc<Purse> {
        if let Some(purse) = self.purses.get(tenant).and_then(Weak::upgrade) {
            return purse;
        }
        let purse = Arc::new(Purse::new(tenant, most_bytes));
        self.purses.insert(tenant.clone(), Arc::downgrade(&purse));
        purse
    }
}

/// A session as its door knows it. Dropped, it is over: its place is free, and the hub forgets it.
#[derive(Debug)]
pub struct Session {
    registry: Registry,
    id: SessionId,
    facts: Arc<Facts>,
    account: Arc<Account>,
    purse: Arc<Purse>,
    /// What the channel takes.
    slab: Option<Held>,
    opened: Opened,
}

impl Session {
    fn begin(&self, takes_over: Option<SessionId>, replies: Option<Replies>) -> Result<(), Refused> {
        let (facts, account) = (Arc::clone(&self.facts), Arc::clone(&self.account));
        let opening = Opening { session: self.id, facts, account, takes_over, replies };
        self.send(HubEvent::Open(opening))
    }

    fn send(&self, event: HubEvent) -> Result<(), Refused> {
        let refuse = |error: SendError| refused(RefusalCode::Draining, error.to_string());
        self.registry.0.hub.send(event).map_err(refuse)
    }

    /// What the client is to be told.
    #[must_use]
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Who it is.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Its connection.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// What it has used.
    #[must_use]
    pub fn stats(&self) -> SessionStats {
        self.account.stats()
    }

    /// The hub has let it go, or another connection has taken it over: hang up.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.account.is_closed()
    }

    /// Takes `bytes` of the tenant's quota for a message, best before its payload is read.
    ///
    /// # Errors
    /// What the client is to be answered if the quota is used up.
    pub fn hold(&self, call: &CallHeader, bytes: u64) -> Result<Held, ReplyHeader> {
        Held::of(&self.purse, bytes).ok_or_else(|| self.refuse(call, Status::Quota))
    }

    /// Hands a remote call to the hub.
    ///
    /// # Errors
    /// What the client is to be answered if it is not taken.
    pub fn call(&self, header: CallHeader, payload: Payload) -> Result<(), ReplyHeader> {
        if !self.account.begin_call(MOST_CALLS) {
            return Err(self.refuse(&header, Status::Busy));
        }
        let sent = self.registry.0.hub.send(HubEvent::Call { session: self.id, header, payload });
        sent.map_err(|error| {
            self.account.end_call();
            let status = if error == SendError::Full { Status::Busy } else { Status::Draining };
            self.refuse(&header, status)
        })
    }

    fn refuse(&self, call: &CallHeader, status: Status) -> ReplyHeader {
        self.account.refused();
        ReplyHeader::refusal(call, status, RETRY_MS)
    }

    /// Makes a channel whose slab has at least so many bytes, instead of the one there was, and hands one end to the hub
    /// once `give` has given the other to the client.
    ///
    /// For a moment both slabs are there; the quota counts the new one.
    ///
    /// # Errors
    /// What the client is to be told.
    pub fn channel(
        &mut self,
        slab_bytes: u64,
        give: impl FnOnce(&ExecutorChannel) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let geometry = Geometry::rounded(slab_bytes, MOST_CALLS)
            .map_err(|error| refused(RefusalCode::Malformed, error.to_string()))?;
        let before = self.slab.as_ref().map_or(0, |held| held.bytes);
        let bytes = geometry.region_bytes();
        self.hold_slab(bytes)?;
        let made = ExecutorChannel::create(geometry)
            .map_err(|error| Refused {
                retry_after_ms: REOPEN_MS,
                ..refused(RefusalCode::Busy, error.to_string())
            })
            .and_then(|channel| give(&channel).map(|()| channel));
        let channel = made.inspect_err(|_| {
            // Less than it holds, so it is given back.
            let _ = self.slab.as_mut().is_some_and(|held| held.resize(before));
        })?;
        self.account.set_slab_bytes(geometry.slab_bytes);
        self.send(HubEvent::Channel { session: self.id, channel })
    }

    fn hold_slab(&mut self, bytes: u64) -> Result<(), Refused> {
        let fits = match &mut self.slab {
            Some(held) => held.resize(bytes),
            empty => {
                *empty = Held::of(&self.purse, bytes);
                empty.is_some()
            }
        };
        if fits {
            return Ok(());
        }
        let Purse { tenant, most_bytes, .. } = &*self.purse;
        let message = format!(
            "a channel of {bytes} bytes is more than is left of the {most_bytes} bytes of {tenant}: ask for less, or \
             close other sessions"
        );
        Err(refused(RefusalCode::Quota, message))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.registry.leave(self.id);
    }
}

/// Numbers of sessions begin elsewhere in every executor: a client that asks a successor for the session it had must not
/// be given another client's. They stay below 2^53, so that every reader of JSON keeps them.
fn before_first(instance: u64) -> u64 {
    (instance >> 32) << 20
}

fn check_masking(mode: &str, linearity: Linearity) -> Result<(), Refused> {
    let message = match (mode, linearity) {
        ("off", _) | ("paper", Linearity::Everywhere) => return Ok(()),
        ("paper", Linearity::InPart) => {
            "some layers of this base have no linear path, so masks would not cancel out: use masking off"
                .to_owned()
        }
        _ => "the masking mode is unknown here: use off or paper".to_owned(),
    };
    Err(refused(RefusalCode::Masking, message))
}

/// A refusal that stands.
pub(super) fn refused(code: RefusalCode, message: String) -> Refused {
    Refused { code, message, retry_after_ms: 0 }
}
