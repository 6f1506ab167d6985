//! A PostgreSQL of its own for a test.

use std::{
    fs,
    os::unix::{fs::chown, process::CommandExt as _},
    path::PathBuf,
    process::{Command, Stdio},
};

use tempfile::TempDir;

/// Where Debian keeps its programs, by version.
const DEBIAN: &str = "/usr/lib/postgresql";

/// A cluster that is stopped and removed when this is dropped.
#[derive(Debug)]
pub struct Postgres {
    directory: TempDir,
    port: u16,
    /// It does not run as root.
    owner: Option<(u32, u32)>,
}

fn program(name: &str) -> Option<PathBuf> {
    let versions = fs::read_dir(DEBIAN).into_iter().flatten().flatten();
    super::find(name, versions.map(|version| version.path().join("bin")))
}

/// Whom it runs as, if that is not who runs the test.
fn owner() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let mut fields = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let found = fields.find(|fields| fields[0] == "postgres");
    let number = |index: usize| found.as_ref().and_then(|fields| fields.get(index)?.parse().ok());
    Some((number(2).unwrap_or(65534), number(3).unwrap_or(65534)))
}

impl Postgres {
    /// Makes a cluster and starts it.
    ///
    /// # Errors
    /// There is no PostgreSQL on this machine.
    pub fn start() -> Result<Self, &'static str> {
        let (Some(initdb), Some(_)) = (program("initdb"), program("pg_ctl")) else {
            return Err("there is no PostgreSQL; apt install postgresql");
        };
        let directory = tempfile::tempdir().expect("a directory");
        let owner = owner();
        if let Some((user, group)) = owner {
            chown(directory.path(), Some(user), Some(group)).expect("it can be given away");
        }
        let postgres = Self { directory, port: super::free_port(), owner };
        let arguments = ["--no-sync", "--auth=trust", "--username=fleet", "--encoding=UTF8", "--pgdata"];
        postgres.run(Command::new(initdb).args(arguments).arg(postgres.data()));
        postgres.restart();
        Ok(postgres)
    }

    /// Its address, as a setting names it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://fleet@127.0.0.1:{}/postgres", self.port)
    }

    /// Starts it again, at the same address.
    pub fn restart(&self) {
        let folder = self.directory.path().display();
        let options = format!("-p {} -h 127.0.0.1 -k {folder} -F", self.port);
        let log = self.directory.path().join("log");
        self.control(&["start", "-w", "-l", &log.display().to_string(), "-o", &options]);
    }

    /// Ends it at once: whoever is connected is cut off, and what was committed is there when it comes back.
    pub fn stop(&self) {
        self.control(&["stop", "-m", "immediate"]);
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn control(&self, arguments: &[&str]) {
        let pg_ctl = program("pg_ctl").expect("it was there");
        self.run(Command::new(pg_ctl).arg("--pgdata").arg(self.data()).args(arguments));
    }

    fn run(&self, command: &mut Command) {
        if let Some((user, group)) = self.owner {
            command.uid(user).gid(group);
        }
        let command = command.current_dir(self.directory.path()).stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.stderr(Stdio::null()).status().expect("it starts");
        let log = || fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        assert!(status.success(), "{command:?}: {status}\n{}", log());
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let Some(pg_ctl) = program("pg_ctl") else { return };
        let mut command = Command::new(pg_ctl);
        if let Some((user, group)) = self.owner {
            command.uid(user).gid(group);
        }
        let command = command.arg("--pgdata").arg(self.data()).args(["stop", "-m", "immediate"]);
        // It may be stopped already.
        let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}
