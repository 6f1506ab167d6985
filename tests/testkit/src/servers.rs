//! The real servers that a fleet shares, each for one test: PostgreSQL, and S3 by moto.
//!
//! - [`postgres`]: a database cluster in a temporary directory, which can be stopped and started again.
//! - [`s3`]: a bucket; [`wire`] is the way to it, on which bytes are changed, held back and lost.
//!
//! A test is skipped, with a message, where a server is not installed.

pub mod postgres;
pub mod s3;
pub mod wire;

use std::{env, net::TcpListener, path::PathBuf};

/// A program in one of `folders`, or on the path.
fn find(name: &str, folders: impl IntoIterator<Item = PathBuf>) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).collect::<Vec<_>>();
    folders.into_iter().chain(on_path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// A port of loopback that nobody listens on.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").port()
}

/// A database and a bucket, or nothing and why.
#[must_use]
pub fn both() -> Option<(postgres::Postgres, s3::Bucket)> {
    let (postgres, bucket) = (postgres::Postgres::start(), s3::Bucket::start());
    for missing in [postgres.as_ref().err(), bucket.as_ref().err()].into_iter().flatten() {
        eprintln!("skipped: {missing}");
    }
    Some((postgres.ok()?, bucket.ok()?))
}
