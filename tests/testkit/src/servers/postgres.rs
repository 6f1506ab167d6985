//! A PostgreSQL of its own for a test.

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
        let postgres = Self::nothing_yet();
        let arguments = ["--no-sync", "--auth=trust", "--username=fleet", "--encoding=UTF8", "--pgdata"];
        postgres.run(Command::new(initdb).args(arguments).arg(postgres.data()));
        postgres.restart();
        Ok(postgres)
    }

    /// Room for a cluster.
    fn nothing_yet() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let owner = owner();
        if let Some((user, group)) = owner {
            chown(directory.path(), Some(user), Some(group)).expect("it can be given away");
        }
        Self { directory, port: super::free_port(), owner }
    }

    /// A standby, which has what this one has. From now on this one answers what the standby has received, too.
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
        // What was committed before came before this.
        self.ask("CREATE TABLE IF NOT EXISTS standbys (number integer)");
        standby
    }

    /// Makes a standby the one that takes changes.
    pub fn promote(&self) {
        self.control(&["promote", "-w"]);
    }

    /// From now on connections over loopback are encrypted, with a certificate and its key in PEM.
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

    /// What comes of a command in SQL: its first column, without spaces.
    pub fn ask(&self, command: &str) -> String {
        let mut psql = Command::new(program("psql").expect("it comes with the others"));
        psql.args(["--no-psqlrc", "--tuples-only", "--no-align", "--command", command, &self.url()]);
        let output = psql.stdin(Stdio::null()).output().expect("it starts");
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
        assert!(output.status.success(), "{command}: {said:?}");
        said[0].trim().to_owned()
    }

    /// Kills its first process. The others end when they notice.
    pub fn kill(&self) {
        let file = fs::read_to_string(self.data().join("postmaster.pid")).expect("it runs");
        let id = file.lines().next().and_then(|id| id.trim().parse().ok()).and_then(Pid::from_raw);
        kill_process(id.expect("a process id"), Signal::KILL).expect("it runs");
    }

    /// The port of loopback that it has.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
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
        let log = self.directory.path().join("log").display().to_string();
        // What is left of one that was killed holds its memory for a moment.
        crate::eventually("it starts", || {
            self.try_control(&["start", "-w", "-l", &log, "-o", &options]).success()
        });
    }

    /// Ends it at once: whoever is connected is cut off, and what was committed is there when it comes back.
    pub fn stop(&self) {
        self.control(&["stop", "-m", "immediate"]);
    }

    /// Ends it in good order: whoever is connected is told, and what is under way is rolled back.
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
        // It may be stopped already.
        let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}
