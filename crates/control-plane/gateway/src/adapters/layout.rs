//! Tables of the SQLite database.

/// Migrations in order; the layout number is the number of applied ones. Never edit one.
pub(super) const MIGRATIONS: &[&str] = &[
    "CREATE TABLE adapters (
        name TEXT PRIMARY KEY NOT NULL,
        tenant TEXT,
        content BLOB NOT NULL CHECK (length(content) = 32),
        generation BLOB NOT NULL CHECK (length(generation) = 32),
        rank INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        modules INTEGER NOT NULL,
        source TEXT NOT NULL,
        loaded_at INTEGER NOT NULL,
        last_used_us INTEGER NOT NULL,
        pinned INTEGER NOT NULL CHECK (pinned IN (0, 1))
    ) STRICT;",
    "CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT UNIQUE NOT NULL,
        tenant TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        record TEXT NOT NULL
    ) STRICT;
    CREATE INDEX files_of_tenant ON files (tenant, number);
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT UNIQUE NOT NULL,
        tenant TEXT NOT NULL,
        due INTEGER NOT NULL CHECK (due IN (0, 1)),
        record TEXT NOT NULL
    ) STRICT;
    CREATE INDEX jobs_of_tenant ON jobs (tenant, number);
    CREATE INDEX jobs_due ON jobs (number) WHERE due;
    CREATE TABLE job_events (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        record TEXT NOT NULL
    ) STRICT;
    CREATE INDEX events_of_job ON job_events (job, number);",
    "ALTER TABLE jobs ADD COLUMN key BLOB;
    CREATE UNIQUE INDEX jobs_of_key ON jobs (tenant, key) WHERE key IS NOT NULL;",
    "ALTER TABLE adapters ADD COLUMN draft_layers INTEGER NOT NULL DEFAULT 0;",
    // Old snapshots of Tinker's models were known only by name. The gateway that made them has ended.
    "ALTER TABLE adapters ADD COLUMN made_by TEXT;
    ALTER TABLE adapters ADD COLUMN expires_at INTEGER;
    UPDATE adapters SET made_by = 'unknown'
        WHERE name LIKE 'tinker-%~%' AND tenant IS NOT NULL AND source LIKE '%/tinker/passing/%';",
    "ALTER TABLE adapters ADD COLUMN chat_template TEXT;
    ALTER TABLE adapters ADD COLUMN weights BLOB;",
    "CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT UNIQUE NOT NULL,
        tenant TEXT NOT NULL,
        due INTEGER NOT NULL CHECK (due IN (0, 1)),
        outputs_expire_at INTEGER,
        record TEXT NOT NULL
    ) STRICT;
    CREATE INDEX batches_of_tenant ON batches (tenant, number);
    CREATE INDEX batches_due ON batches (number) WHERE due;
    CREATE INDEX batches_expiring ON batches (outputs_expire_at) WHERE outputs_expire_at IS NOT NULL;",
    "ALTER TABLE adapters ADD COLUMN labels TEXT NOT NULL DEFAULT '[]';",
];
