//! The connection to a registry of many hosts.
//!
//! As long as it is there, a listener hears of every change when it is committed, and looks by itself each second: what it
//! hears is a hint, what counts is the number of the last change. When it is lost, nothing can be changed and what was read
//! stays true as far as anybody knows; a new one begins with reading everything, for the server behind the address may be
//! another now, one that has lost what was committed last.

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

/// How long the server may take for one thing that is asked of it.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How long a start waits for it that could serve what this host knew.
const START_PATIENCE: Duration = Duration::from_secs(1);
/// How often the number of the last change is looked at when nothing is heard.
const LOOK: Duration = Duration::from_secs(1);
/// Between a connection that was lost and the next.
const PAUSE: Duration = Duration::from_millis(200);
/// Connections of one gateway: two listen, the others change something.
const MAX_CONNECTIONS: u32 = 8;

/// Who is told what was read.
pub(in crate::adapters) trait ChangeSubscriber: Send + Sync + 'static {
    /// Takes over what was read. False if it is older than what this gateway has changed itself: then it is read again.
    fn take_over(self: Arc<Self>, changes: RegistryChanges) -> bool;
}

/// How old what is known of a registry is.
#[derive(Debug, Clone)]
pub struct Freshness {
    /// Where the registry is.
    pub address: String,
    /// Since it was read last.
    pub age: Duration,
    /// Why it cannot be reached, if it cannot.
    pub fault: Option<String>,
}

/// A registry of many hosts.
#[derive(Debug)]
pub(crate) struct SharedRegistry {
    address: PostgresAddress,
    /// The connections there are; none as long as it cannot be reached.
    session: Mutex<Option<PgPool>>,
    heard: Mutex<(Instant, Option<String>)>,
    /// Number of the last change that was made here.
    own: AtomicU64,
    /// What is kept here of it; nothing by who only looks at it.
    mirror: Option<RegistryCache>,
}

impl SharedRegistry {
    /// Connects, makes the tables where there are none, and reads everything.
    ///
    /// # Errors
    /// If it cannot be reached, or a later version made the tables.
    pub(in crate::adapters) async fn open(
        address: PostgresAddress,
    ) -> Result<(Self, Vec<Record>), DatabaseError> {
        let shared = Self::at(address, None);
        let records = shared.connect().await?;
        Ok((shared, records))
    }

    /// The same for a gateway, whose host keeps a part of it in `state`. What is kept there is returned if the registry does
    /// not answer soon, and API keys are brought to `key_file`, if it is given.
    ///
    /// # Errors
    /// If it cannot be reached and nothing is kept here, or a later version made the tables.
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

    /// What the registry says, or what is known of it, if that takes too long. Then it is read later.
    async fn connect_or_take(&self, known: CachedRecords) -> Result<Vec<Record>, DatabaseError> {
        let connected = timeout(START_PATIENCE, self.connect()).await;
        match connected.unwrap_or_else(|_| Err(self.unreachable(&"it does not answer"))) {
            Err(error @ DatabaseError::Unreachable { .. }) => {
                // Since the machine began, at most.
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
            reason: format!("it has layout {}, this version knows up to {}", newer.found, newer.known),
            next: "start the version that made it",
        })
    }

    /// Keeps here what was read, and the API keys that there are now.
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

    /// How old what is known is.
    pub(in crate::adapters) fn freshness(&self) -> Freshness {
        let (at, fault) = lock(&self.heard).clone();
        Freshness { address: self.address.to_string(), age: at.elapsed(), fault }
    }

    /// Number of the last change that was made here.
    pub(in crate::adapters) fn own(&self) -> u64 {
        self.own.load(Ordering::SeqCst)
    }

    /// Does `work`, unless an adapter of `content` is registered; no change is committed meanwhile.
    pub(super) async fn unless_registered<T>(
        &self,
        content: ContentId,
        work: impl Future<Output = T>,
    ) -> Result<Option<T>, DatabaseError> {
        let held = self.done(postgres::block_commits(&self.session()?, content)).await?;
        let Some(held) = held else { return Ok(None) };
        let done = work.await;
        // Nothing was changed.
        self.within(held.rollback()).await?;
        Ok(Some(done))
    }

    /// Registers many adapters where there is none.
    pub(super) async fn fill(&self, records: &[Record]) -> Result<(), DatabaseError> {
        let pool = self.session()?;
        postgres::put_all(&pool, records).await.map_err(|broken| self.broken(broken))
    }

    /// How many fine-tuning jobs have not ended.
    pub(super) async fn count_unfinished_jobs(&self) -> Result<u64, DatabaseError> {
        let pool = self.session()?;
        let count = sqlx::query_scalar("SELECT COUNT(*) FROM holobiont_jobs WHERE due").fetch_one(&pool);
        self.within(count).await.map(i64::cast_unsigned)
    }

    pub(super) fn pool(&self) -> PgPool {
        let options = PgPoolOptions::new().max_connections(MAX_CONNECTIONS).acquire_timeout(PATIENCE);
        options.connect_lazy_with(self.address.options().clone())
    }

    /// The connections there are.
    ///
    /// # Errors
    /// If it cannot be reached now.
    pub(crate) fn session(&self) -> Result<PgPool, DatabaseError> {
        let session = lock(&self.session).clone();
        session.ok_or_else(|| {
            let freshness = self.freshness();
            let why = freshness.fault.unwrap_or_else(|| "it is being connected to".to_owned());
            self.unreachable(&format!("{why}; what is known is {} s old", freshness.age.as_secs()))
        })
    }

    /// What comes of reading, or of what does no harm if it happens twice.
    pub(crate) async fn within<T>(
        &self,
        asked: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, DatabaseError> {
        match timeout(PATIENCE, asked).await {
            Ok(done) => done.map_err(|error| self.unreachable(&said(&error))),
            Err(_) => Err(self.unreachable(&"it does not answer")),
        }
    }

    /// What comes of a change that knows itself what it has changed.
    pub(crate) async fn done<T>(
        &self,
        change: impl Future<Output = Result<T, ChangeError>>,
    ) -> Result<T, DatabaseError> {
        match timeout(PATIENCE, change).await {
            Ok(done) => done.map_err(|broken| self.broken(broken)),
            Err(_) => Err(self.unclear("it does not answer".to_owned())),
        }
    }

    /// What came of a change of `name`.
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

    /// Notes that it was read just now.
    fn heard(&self) {
        *lock(&self.heard) = (Instant::now(), None);
    }

    /// Notes that it cannot be reached.
    fn lost(&self, error: &DatabaseError) {
        let reason = match error {
            DatabaseError::Unreachable { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        *lock(&self.session) = None;
        let was = lock(&self.heard).1.replace(reason.clone());
        if was.is_none() {
            tracing::error!(registry = %self.address, reason, "the registry is lost; what is known is served");
        }
    }

    /// Reads changes for `reader` as they come, until it is gone.
    pub(in crate::adapters) async fn follow(self: Arc<Self>, reader: Weak<impl ChangeSubscriber>) {
        while reader.strong_count() > 0 {
            match self.listen(&reader).await {
                Ok(()) => return,
                Err(error) => self.lost(&error),
            }
            sleep(PAUSE).await;
        }
    }

    /// The same over one connection. Returns when the reader is gone.
    async fn listen(&self, reader: &Weak<impl ChangeSubscriber>) -> Result<(), DatabaseError> {
        // Of its own: what hangs on a connection that is dead without saying so keeps nobody from the next.
        let pool = self.pool();
        let mut listener = self.within(PgListener::connect_with(&pool)).await?;
        listener.eager_reconnect(false);
        self.within(listener.listen(CHANNEL)).await?;
        // What was numbered by another server means nothing to this one.
        self.own.store(0, Ordering::SeqCst);
        // The tables may be those of another server now, or of an older version.
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

    /// Notes that it was read, over connections that changes may be made over, too.
    fn is_back(&self, pool: &PgPool) {
        self.heard();
        let mut session = lock(&self.session);
        if session.is_none() {
            tracing::info!(registry = %self.address, "the registry is back");
            *session = Some(pool.clone());
        }
    }

    /// Returns when there may be something to read.
    async fn next(&self, listener: &mut PgListener) -> Result<(), DatabaseError> {
        match timeout(LOOK, listener.try_recv()).await {
            Ok(Ok(Some(_))) => {
                // One reading is enough for all that was heard.
                while listener.next_buffered().is_some() {}
                Ok(())
            }
            Ok(Ok(None)) => Err(self.unreachable(&"the connection was closed")),
            Ok(Err(error)) => Err(self.unreachable(&said(&error))),
            Err(_) => Ok(()),
        }
    }
}

/// An error with its causes, in one line.
fn said(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::PoolTimedOut => "it does not answer".to_owned(),
        sqlx::Error::Io(error) => error.to_string(),
        other => settings::exit::in_one_line(other),
    }
}
