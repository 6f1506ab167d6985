//! Servers, separate for each test: those that a fleet shares (PostgreSQL, and S3 by moto), and a hub.
//!
//! - [`hub`]: a server that answers like a hub, which is part of this crate.
//! - [`postgres`]: a database cluster in a temporary directory, which can be stopped and started again.
//! - [`s3`]: a bucket; [`wire`] is the relay to it, which changes, delays and drops bytes.
//!
//! If a real server is not installed, a test is skipped with a message.

pub mod hub;
pub mod postgres;
pub mod s3;
pub mod wire;

use std::{env, net::TcpListener, path::PathBuf};

/// Returns a program in one of `folders`, or on the path.
fn find(name: &str, folders: impl IntoIterator<Item = PathBuf>) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).collect::<Vec<_>>();
    folders.into_iter().chain(on_path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").port()
}

/// Starts a database and a bucket; otherwise prints the reason.
#[must_use]
pub fn both() -> Option<(postgres::Postgres, s3::Bucket)> {
    let (postgres, bucket) = (postgres::Postgres::start(), s3::Bucket::start());
    for missing in [postgres.as_ref().err(), bucket.as_ref().err()].into_iter().flatten() {
        eprintln!("skipped: {missing}");
    }
    Some((postgres.ok()?, bucket.ok()?))
}
