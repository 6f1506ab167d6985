//! The connection to a shared registry.
//!
//! While connected, a listener is notified of every committed change, and also polls each second. A
//! notification is a hint; the number of the last change decides. When the connection is lost, no change is
//! possible, and the known records stay in use. A new connection begins with reading everything, because
//! another server may now have the address, without the last commits.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use sqlx::{
    Acquire as _, PgConnection, PgPool,
    postgres::{PgListener, PgPoolOptions},
};
use tokio::time::{sleep, timeout};

pub(crate) use super::postgres::ChangeError;
use super::{
    RegistryChanges,
    address::PostgresAddress,
    cache::{CachedRecords, RegistryCache},
    postgres::{self, CHANNEL},
};
use crate::{
    adapters::{
        database::{DatabaseError, Record},
        store::ContentId,
    },
    lock::lock,
};

/// Timeout of one query or change.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Timeout of the connection at start, if this host has a copy of the registry.
const START_PATIENCE: Duration = Duration::from_secs(1);
/// How often the number of the last change is polled without a notification.
const LOOK: Duration = Duration::from_secs(1);
/// Pause between a lost connection and the next attempt.
const PAUSE: Duration = Duration::from_millis(200);
/// Maximum number of connections per gateway: two listen, the others make changes.
const MAX_CONNECTIONS: u32 = 8;

/// Receiver of the changes that were read.
pub(in crate::adapters) trait ChangeSubscriber: Send + Sync + 'static {
    /// Applies `changes`. Returns false if they are older than this gateway's own; then they are read again.
    fn take_over(self: Arc<Self>, changes: RegistryChanges) -> bool;
}

#[derive(Debug, Clone)]
pub struct Freshness {
    /// Address of the registry, without secrets.
    pub address: String,
    /// Time since the registry was last read.
    pub age: Duration,
    /// Why the registry cannot be reached, if it cannot.
    pub fault: Option<String>,
}

#[derive(Debug)]
pub(crate) struct SharedRegistry {
    address: PostgresAddress,
    /// Pool of connections; `None` while the registry is unreachable.
    session: Mutex<Option<PgPool>>,
    heard: Mutex<(Instant, Option<String>)>,
    /// Number of the last change that this gateway made.
    own: AtomicU64,
    /// Copy of the registry on this host; `None` in programs that only look at the registry.
    mirror: Option<RegistryCache>,
}

impl SharedRegistry {
    /// Connects, creates missing tables, and reads all records.
    ///
    /// # Errors
    /// If the registry cannot be reached, or a later version of the program made the tables.
    pub(in crate::adapters) async fn open(
        address: PostgresAddress,
    ) -> Result<(Self, Vec<Record>), DatabaseError> {
        let shared = Self::at(address, None);
        let records = shared.connect().await?;
        Ok((shared, records))
    }

    /// Like [`SharedRegistry::open`], for a gateway that keeps a copy of the registry in `state`. Returns the
    /// copy's records if the registry does not answer soon. API keys are written to `key_file`, if given.
    ///
    /// # Errors
    /// If the registry cannot be reached and there is no copy, or a later version of the program made the
    /// tables.
    pub(in crate::adapters) async fn open_kept(
        address: PostgresAddress,
        state: &Path,
        key_file: Option<PathBuf>,
    ) -> Result<(Self, Vec<Record>), DatabaseError> {
        let (mirror, known) = RegistryCache::open(state, &address, key_file).await?;
        let shared = Self::at(address, Some(mirror));
        let records = match known {
            None => shared.connect().await?,
            Some(known) => shared.connect_or_take(known).await?,
        };
        Ok((shared, records))
    }

    /// Reads the registry. If the registry is unreachable for [`START_PATIENCE`], returns the copy's records.
    async fn connect_or_take(&self, known: CachedRecords) -> Result<Vec<Record>, DatabaseError> {
        let connected = timeout(START_PATIENCE, self.connect()).await;
        match connected.unwrap_or_else(|_| Err(self.unreachable(&"it does not answer"))) {
            Err(error @ DatabaseError::Unreachable { .. }) => {
                // Falls back to now if the copy is older than the machine's uptime.
                let heard = Instant::now().checked_sub(known.age).unwrap_or_else(Instant::now);
                lock(&self.heard).0 = heard;
                self.lost(&error);
                Ok(known.records)
            }
            read => read,
        }
    }

    pub(super) fn at(address: PostgresAddress, mirror: Option<RegistryCache>) -> Self {
        let heard = Mutex::new((Instant::now(), None));
        Self { address, session: Mutex::default(), heard, own: AtomicU64::new(0), mirror }
    }

    async fn connect(&self) -> Result<Vec<Record>, DatabaseError> {
        let pool = self.pool();
        let mut connection = self.within(pool.acquire()).await?;
        self.migrate(&mut connection).await?;
        let changes = self.within(postgres::read(&mut connection, None)).await?;
        self.keep(&mut connection, &changes).await?;
        drop(connection);
        *lock(&self.session) = Some(pool);
        Ok(changes.records.into_iter().filter_map(|(_, record)| record).collect())
    }

    async fn migrate(&self, connection: &mut PgConnection) -> Result<(), DatabaseError> {
        self.within(postgres::migrate(connection)).await?.map_err(|newer| DatabaseError::Foreign {
            address: self.address.to_string(),
            reason: format!(
                "it has layout {}, and this version supports layouts up to {}",
                newer.found, newer.known
            ),
            next: "use the version that created it",
        })
    }

    /// Updates the copy and the key file on this host.
    async fn keep(
        &self,
        connection: &mut PgConnection,
        changes: &RegistryChanges,
    ) -> Result<(), DatabaseError> {
        let Some(mirror) = &self.mirror else { return Ok(()) };
        mirror.keep(changes).await;
        if mirror.wants_keys() {
            mirror.keep_keys(self.within(postgres::keys(connection)).await?).await;
        }
        Ok(())
    }

    pub(in crate::adapters) fn freshness(&self) -> Freshness {
        let (at, fault) = lock(&self.heard).clone();
        Freshness { address: self.address.to_string(), age: at.elapsed(), fault }
    }

    pub(in crate::adapters) fn own(&self) -> u64 {
        self.own.load(Ordering::SeqCst)
    }

    /// Runs `work` unless an adapter with `content` is registered. No change is committed meanwhile.
    pub(super) async fn unless_registered<T>(
        &self,
        content: ContentId,
        work: impl Future<Output = T>,
    ) -> Result<Option<T>, DatabaseError> {
        let held = self.done(postgres::block_commits(&self.session()?, content)).await?;
        let Some(held) = held else { return Ok(None) };
        let done = work.await;
        // The transaction only blocked other changes and wrote nothing to keep.
        self.within(held.rollback()).await?;
        Ok(Some(done))
    }

    /// Registers many adapters in an empty registry.
    pub(super) async fn fill(&self, records: &[Record]) -> Result<(), DatabaseError> {
        let pool = self.session()?;
        postgres::put_all(&pool, records).await.map_err(|broken| self.broken(broken))
    }

    pub(super) async fn count_unfinished_jobs(&self) -> Result<u64, DatabaseError> {
        let pool = self.session()?;
        let count = sqlx::query_scalar("SELECT COUNT(*) FROM holobiont_jobs WHERE due").fetch_one(&pool);
        self.within(count).await.map(i64::cast_unsigned)
    }

    pub(super) fn pool(&self) -> PgPool {
        let options = PgPoolOptions::new().max_connections(MAX_CONNECTIONS).acquire_timeout(PATIENCE);
        options.connect_lazy_with(self.address.options().clone())
    }

    /// Returns the pool of connections.
    ///
    /// # Errors
    /// If the registry cannot be reached now.
    pub(crate) fn session(&self) -> Result<PgPool, DatabaseError> {
        let session = lock(&self.session).clone();
        session.ok_or_else(|| {
            let freshness = self.freshness();
            let why = freshness.fault.unwrap_or_else(|| "it is being connected to".to_owned());
            self.unreachable(&format!("{why}; the local copy is {} s old", freshness.age.as_secs()))
        })
    }

    /// Runs a query, or a change that may be repeated, with the timeout [`PATIENCE`].
    pub(crate) async fn within<T>(
        &self,
        asked: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, DatabaseError> {
        match timeout(PATIENCE, asked).await {
            Ok(done) => done.map_err(|error| self.unreachable(&said(&error))),
            Err(_) => Err(self.unreachable(&"it does not answer")),
        }
    }

    /// Runs a change that reports whether it was committed, with the timeout [`PATIENCE`].
    pub(crate) async fn done<T>(
        &self,
        change: impl Future<Output = Result<T, ChangeError>>,
    ) -> Result<T, DatabaseError> {
        match timeout(PATIENCE, change).await {
            Ok(done) => done.map_err(|broken| self.broken(broken)),
            Err(_) => Err(self.unclear("it does not answer".to_owned())),
        }
    }

    /// Maps the outcome of a change of `name` to its change number or an error.
    pub(super) fn settled(
        &self,
        name: &str,
        done: Result<Result<Option<u64>, ChangeError>, tokio::time::error::Elapsed>,
    ) -> Result<u64, DatabaseError> {
        match done {
            Ok(Ok(Some(number))) => {
                self.own.fetch_max(number, Ordering::SeqCst);
                Ok(number)
            }
            Ok(Ok(None)) => Err(DatabaseError::Conflict(name.to_owned())),
            Ok(Err(broken)) => Err(self.broken(broken)),
            Err(_) => Err(self.unclear("it does not answer".to_owned())),
        }
    }

    fn broken(&self, broken: ChangeError) -> DatabaseError {
        match broken {
            ChangeError::Before(error) if postgres::is_full(&error) => DatabaseError::Full,
            ChangeError::Before(error) => self.unreachable(&said(&error)),
            ChangeError::Committing(error) => self.unclear(said(&error)),
            ChangeError::NotHeld(job) => DatabaseError::NotHeld(job),
        }
    }

    fn unreachable(&self, reason: &dyn std::fmt::Display) -> DatabaseError {
        DatabaseError::Unreachable { address: self.address.to_string(), reason: reason.to_string() }
    }

    fn unclear(&self, reason: String) -> DatabaseError {
        DatabaseError::Unclear { address: self.address.to_string(), reason }
    }

    /// Notes that the registry was read just now.
    fn heard(&self) {
        *lock(&self.heard) = (Instant::now(), None);
    }

    /// Notes that the registry cannot be reached.
    fn lost(&self, error: &DatabaseError) {
        let reason = match error {
            DatabaseError::Unreachable { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        *lock(&self.session) = None;
        let was = lock(&self.heard).1.replace(reason.clone());
        if was.is_none() {
            tracing::error!(registry = %self.address, reason, "the registry is not reachable; known \
                adapters are served");
        }
    }

    /// Passes changes to `reader` as they arrive, until `reader` is dropped.
    pub(in crate::adapters) async fn follow(self: Arc<Self>, reader: Weak<impl ChangeSubscriber>) {
        while reader.strong_count() > 0 {
            match self.listen(&reader).await {
                Ok(()) => return,
                Err(error) => self.lost(&error),
            }
            sleep(PAUSE).await;
        }
    }

    /// Like [`SharedRegistry::follow`], over one connection. Returns when `reader` is dropped.
    async fn listen(&self, reader: &Weak<impl ChangeSubscriber>) -> Result<(), DatabaseError> {
        // Each connection has a new pool, so a hanging dead connection does not delay the next one.
        let pool = self.pool();
        let mut listener = self.within(PgListener::connect_with(&pool)).await?;
        listener.eager_reconnect(false);
        self.within(listener.listen(CHANNEL)).await?;
        // Change numbers of another server mean nothing to this one.
        self.own.store(0, Ordering::SeqCst);
        // The tables may now be those of another server, or of an older version.
        self.migrate(self.within(listener.acquire()).await?).await?;
        let mut last = None;
        loop {
            let connection = self.within(listener.acquire()).await?;
            let changes = self.within(postgres::read(connection, last)).await?;
            let number = changes.number;
            if last != Some(number) {
                self.keep(connection, &changes).await?;
            }
            let Some(taken) = reader.upgrade().map(|reader| reader.take_over(changes)) else { return Ok(()) };
            if taken {
                last = Some(number);
                self.is_back(&pool);
                self.next(&mut listener).await?;
            }
        }
    }

    /// Notes that the registry was read, and makes `pool` available for changes.
    fn is_back(&self, pool: &PgPool) {
        self.heard();
        let mut session = lock(&self.session);
        if session.is_none() {
            tracing::info!(registry = %self.address, "the registry is reachable again");
            *session = Some(pool.clone());
        }
    }

    /// Waits until there may be something to read.
    async fn next(&self, listener: &mut PgListener) -> Result<(), DatabaseError> {
        match timeout(LOOK, listener.try_recv()).await {
            Ok(Ok(Some(_))) => {
                // One read covers all buffered notifications.
                while listener.next_buffered().is_some() {}
                Ok(())
            }
            Ok(Ok(None)) => Err(self.unreachable(&"the connection was closed")),
            Ok(Err(error)) => Err(self.unreachable(&said(&error))),
            Err(_) => Ok(()),
        }
    }
}

/// Formats an error with its causes in one line.
fn said(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::PoolTimedOut => "it does not answer".to_owned(),
        sqlx::Error::Io(error) => error.to_string(),
        other => settings::exit::in_one_line(other),
    }
}
