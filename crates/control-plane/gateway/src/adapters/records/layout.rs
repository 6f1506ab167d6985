//! Tables of the shared registry in PostgreSQL.

/// Migrations in order; the layout number is the number of applied ones. Never edit one.
pub(super) const MIGRATIONS: &[&str] = &[ADAPTERS, TRAINING, KEYS, LIFETIMES, SECRETS, TEMPLATES, LABELS];

/// Registered adapters, and the log of their changes.
const ADAPTERS: &str = "CREATE TABLE holobiont_clock (
        only_one BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (only_one),
        change BIGINT NOT NULL
    );
    INSERT INTO holobiont_clock (change) VALUES (0);
    CREATE TABLE holobiont_changes (number BIGINT PRIMARY KEY, name TEXT COLLATE \"C\" NOT NULL);
    CREATE TABLE holobiont_adapters (
        name TEXT COLLATE \"C\" PRIMARY KEY,
        tenant TEXT,
        content BYTEA NOT NULL CHECK (octet_length(content) = 32),
        generation BYTEA NOT NULL CHECK (octet_length(generation) = 32),
        rank BIGINT NOT NULL,
        bytes BIGINT NOT NULL,
        modules BIGINT NOT NULL,
        draft_layers BIGINT NOT NULL,
        source TEXT NOT NULL,
        loaded_at BIGINT NOT NULL,
        last_used_us BIGINT NOT NULL,
        pinned BOOLEAN NOT NULL,
        version BIGINT NOT NULL
    );";

/// Training files and jobs. `holder` holds a job until the time `until` of the server's clock; `fence` counts
/// the holders. `holobiont_litter` lists objects of the bucket without a row: uploads in progress, and
/// objects to be deleted.
const TRAINING: &str = "CREATE TABLE holobiont_files (
        number BIGINT GENERATED ALWAYS AS IDENTITY UNIQUE,
        id TEXT COLLATE \"C\" PRIMARY KEY,
        tenant TEXT COLLATE \"C\" NOT NULL,
        bytes BIGINT NOT NULL,
        record TEXT NOT NULL
    );
    CREATE INDEX holobiont_files_of_tenant ON holobiont_files (tenant, number);
    CREATE TABLE holobiont_jobs (
        number BIGINT GENERATED ALWAYS AS IDENTITY UNIQUE,
        id TEXT COLLATE \"C\" PRIMARY KEY,
        tenant TEXT COLLATE \"C\" NOT NULL,
        due BOOLEAN NOT NULL,
        record TEXT NOT NULL,
        key BYTEA,
        data TEXT[] NOT NULL,
        holder TEXT,
        fence BIGINT NOT NULL DEFAULT 0,
        until TIMESTAMPTZ NOT NULL DEFAULT '-infinity'
    );
    CREATE INDEX holobiont_jobs_of_tenant ON holobiont_jobs (tenant, number);
    CREATE INDEX holobiont_jobs_due ON holobiont_jobs (number) WHERE due;
    CREATE UNIQUE INDEX holobiont_jobs_of_key ON holobiont_jobs (tenant, key) WHERE key IS NOT NULL;
    CREATE TABLE holobiont_job_events (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        job TEXT COLLATE \"C\" NOT NULL REFERENCES holobiont_jobs (id) ON DELETE CASCADE,
        record TEXT NOT NULL
    );
    CREATE INDEX holobiont_events_of_job ON holobiont_job_events (job, number);
    CREATE TABLE holobiont_litter (
        path TEXT COLLATE \"C\" PRIMARY KEY,
        after TIMESTAMPTZ NOT NULL
    );";

/// Chat templates of adapters, each with the adapter version by the weights alone.
const TEMPLATES: &str = "ALTER TABLE holobiont_adapters ADD COLUMN chat_template TEXT;
    ALTER TABLE holobiont_adapters ADD COLUMN weights BYTEA;";

/// Labels of adapters that classify, as a JSON array.
const LABELS: &str = "ALTER TABLE holobiont_adapters ADD COLUMN labels TEXT NOT NULL DEFAULT '[]';";

/// API keys: the hash, the line of a key file, and the number of the change that added the key.
const KEYS: &str = "CREATE TABLE holobiont_keys (
        hash TEXT COLLATE \"C\" PRIMARY KEY,
        line TEXT NOT NULL,
        number BIGINT NOT NULL
    );";

/// Gateways with the time until which they count as alive, by the server's clock; adapters with the gateway
/// that needs them and their expiry. Older snapshots of Tinker's models do not name their gateway.
const LIFETIMES: &str = "CREATE TABLE holobiont_gateways (
        id TEXT COLLATE \"C\" PRIMARY KEY,
        until TIMESTAMPTZ NOT NULL
    );
    ALTER TABLE holobiont_adapters ADD COLUMN made_by TEXT COLLATE \"C\";
    ALTER TABLE holobiont_adapters ADD COLUMN expires_at BIGINT;
    UPDATE holobiont_adapters SET made_by = 'unknown'
        WHERE name LIKE 'tinker-%~%' AND tenant IS NOT NULL AND source LIKE '%/tinker/passing/%';";

/// Secrets with which gateways sign, by use.
const SECRETS: &str = "CREATE TABLE holobiont_secrets (
        name TEXT COLLATE \"C\" PRIMARY KEY,
        secret BYTEA NOT NULL CHECK (octet_length(secret) = 32)
    );";
