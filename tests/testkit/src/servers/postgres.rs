//! A separate PostgreSQL server for a test.

use std::{
    fs::{self, Permissions},
    os::unix::{
        fs::{PermissionsExt as _, chown},
        process::CommandExt as _,
    },
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const DEBIAN: &str = "/usr/lib/postgresql";

/// A cluster that is stopped and removed on drop.
#[derive(Debug)]
pub struct Postgres {
    directory: TempDir,
    port: u16,
    /// User and group of the server, which refuses to run as root.
    owner: Option<(u32, u32)>,
}

fn program(name: &str) -> Option<PathBuf> {
    let versions = fs::read_dir(DEBIAN).into_iter().flatten().flatten();
    super::find(name, versions.map(|version| version.path().join("bin")))
}

/// Returns the user and group of the server, if they differ from the test's.
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
    /// Creates and starts a cluster.
    ///
    /// # Errors
    /// If PostgreSQL is not installed.
    pub fn start() -> Result<Self, &'static str> {
        let (Some(initdb), Some(_)) = (program("initdb"), program("pg_ctl")) else {
            return Err("there is no PostgreSQL; apt install postgresql");
        };
        let postgres = Self::nothing_yet();
        let arguments = ["--no-sync", "--auth=trust", "--username=fleet", "--encoding=UTF8", "--pgdata"];
        postgres.run(Command::new(initdb).args(arguments).arg(postgres.data()));
        postgres.restart();
        Ok(postgres)
    }

    fn nothing_yet() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let owner = owner();
        if let Some((user, group)) = owner {
            chown(directory.path(), Some(user), Some(group)).expect("it can be given away");
        }
        Self { directory, port: super::free_port(), owner }
    }

    /// Creates a standby with this server's data. From then on this server waits for the standby before it
    /// confirms a commit.
    #[must_use]
    pub fn standby(&self) -> Self {
        let standby = Self::nothing_yet();
        let copy = program("pg_basebackup").expect("it comes with the others");
        let mut command = Command::new(copy);
        command.args(["--no-sync", "--checkpoint=fast", "--wal-method=stream", "--write-recovery-conf"]);
        command.args(["--host=127.0.0.1", "--username=fleet", "--port", &self.port.to_string(), "--pgdata"]);
        standby.run(command.arg(standby.data()));
        standby.restart();
        self.ask("ALTER SYSTEM SET synchronous_standby_names = '*'");
        self.ask("SELECT pg_reload_conf()");
        crate::eventually("the standby has all", || {
            self.ask("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") == "1"
        });
        // The standby has everything that was committed before this statement.
        self.ask("CREATE TABLE IF NOT EXISTS standbys (number integer)");
        standby
    }

    /// Promotes a standby to accept writes.
    pub fn promote(&self) {
        self.control(&["promote", "-w"]);
    }

    /// Encrypts connections over loopback from now on, with a certificate and its key in PEM.
    pub fn encrypt(&self, certificate: &str, key: &str) {
        let hosts = "hostssl all all 127.0.0.1/32 trust\n";
        for (name, text) in [("server.crt", certificate), ("server.key", key), ("pg_hba.conf", hosts)] {
            let path = self.data().join(name);
            fs::write(&path, text).expect("its directory can be written to");
            fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("it was just written");
            if let Some((user, group)) = self.owner {
                chown(&path, Some(user), Some(group)).expect("it can be given away");
            }
        }
        self.ask("ALTER SYSTEM SET ssl = on");
        self.ask("SELECT pg_reload_conf()");
        crate::eventually("it encrypts", || self.ask("SHOW ssl") == "on");
    }

    /// Runs an SQL command and returns its first column without spaces.
    pub fn ask(&self, command: &str) -> String {
        let mut psql = Command::new(program("psql").expect("it comes with the others"));
        psql.args(["--no-psqlrc", "--tuples-only", "--no-align", "--command", command, &self.url()]);
        let output = psql.stdin(Stdio::null()).output().expect("it starts");
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(output.status.success(), "{command}: {said:?}");
        said[0].trim().to_owned()
    }

    /// Kills the main process. All other processes end when they notice.
    pub fn kill(&self) {
        let file = fs::read_to_string(self.data().join("postmaster.pid")).expect("it runs");
        let id = file.lines().next().and_then(|id| id.trim().parse().ok()).and_then(Pid::from_raw);
        kill_process(id.expect("a process id"), Signal::KILL).expect("it runs");
    }

    /// Returns the server's port of loopback.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the server's URL for a setting.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://fleet@127.0.0.1:{}/postgres", self.port)
    }

    /// Starts the server again at the same address.
    pub fn restart(&self) {
        let folder = self.directory.path().display();
        let options = format!("-p {} -h 127.0.0.1 -k {folder} -F", self.port);
        let log = self.directory.path().join("log").display().to_string();
        // Remaining processes of a killed server hold its memory for a moment.
        crate::eventually("it starts", || {
            self.try_control(&["start", "-w", "-l", &log, "-o", &options]).success()
        });
    }

    /// Stops the server immediately: connections break, and committed data stays.
    pub fn stop(&self) {
        self.control(&["stop", "-m", "immediate"]);
    }

    /// Stops the server in order: clients are notified, and open transactions are rolled back.
    pub fn shut_down(&self) {
        self.control(&["stop", "-m", "fast"]);
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn control(&self, arguments: &[&str]) {
        let status = self.try_control(arguments);
        assert!(status.success(), "pg_ctl {arguments:?}: {status}\n{}", self.log());
    }

    fn try_control(&self, arguments: &[&str]) -> ExitStatus {
        let pg_ctl = program("pg_ctl").expect("it was there");
        self.status(Command::new(pg_ctl).arg("--pgdata").arg(self.data()).args(arguments))
    }

    fn run(&self, command: &mut Command) {
        let status = self.status(command);
        assert!(status.success(), "{command:?}: {status}\n{}", self.log());
    }

    fn status(&self, command: &mut Command) -> ExitStatus {
        if let Some((user, group)) = self.owner {
            command.uid(user).gid(group);
        }
        let command = command.current_dir(self.directory.path()).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null()).status().expect("it starts")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
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
        // The server may have stopped already.
        let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}
