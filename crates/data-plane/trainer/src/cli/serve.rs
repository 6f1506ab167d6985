//! The command `serve`, which starts a trainer process for each connection.
//!
//! A client sends one line with the trainer's arguments. From then on the connection is stdin and stdout of
//! the trainer. Tenants share no trainer, a killed trainer affects no other, and this process holds no state
//! to lose.

use std::{
    ffi::OsString,
    io::{self, Read as _, Write as _},
    os::{
        fd::OwnedFd,
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt as _,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use control_protocol::training::{MAX_REQUEST_BYTES, TrainerRequest};
use process::notify::{self, send_status};
use rustix::process::{Pid, Signal, kill_process};
use sd_notify::NotifyState;
use settings::exit::Exit;
use shmproto::private_socket::PrivateSocket;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

use super::{ProgramExit, TunerError, failure};

/// Maximum time until the request line is complete.
const REQUEST_WAIT: Duration = Duration::from_secs(5);
/// Time that trainers have at shutdown to write a checkpoint.
const GRACE: Duration = Duration::from_secs(10);
/// Maximum interval between two watchdog notifications.
const PULSE: Duration = Duration::from_secs(1);
/// Added to the niceness of trainers, because training can wait and serving cannot.
const NICENESS: i32 = 19;

/// Commands that a client may request: both take their input from stdin, or none.
const COMMANDS: [&str; 2] = ["run", "session"];

#[derive(Debug, clap::Args)]
pub(super) struct ServeArguments {
    /// Path of the Unix socket for requests; its directory must be private
    #[arg(long, value_name = "PATH", env = "HOLOBIONT_TRAINER_SOCKET")]
    socket: PathBuf,
    /// Maximum number of trainers; further requests are refused; with 0 the service exits at once
    #[arg(long, value_name = "N", env = "HOLOBIONT_MAX_TRAINERS", default_value_t = 4)]
    max_trainers: u32,
    /// Exit at the end of standard input, as on SIGTERM, because the supervisor is gone
    #[arg(long)]
    exit_with_stdin: bool,
    /// Arguments for all trainers, as `-- --executor PATH`
    #[arg(last = true, value_name = "ARGUMENTS")]
    common: Vec<OsString>,
}

enum ServiceEvent {
    Asked(UnixStream),
    StopWanted,
}

/// Serves until a signal or the end of stdin.
pub(super) fn serve(arguments: ServeArguments) -> Result<ProgramExit, TunerError> {
    if arguments.max_trainers == 0 {
        return Ok(nothing_to_do());
    }
    let system = |what| move |source| TunerError::System { what, source };
    let (_socket, listener) = PrivateSocket::bind(&arguments.socket)
        .map_err(|error| TunerError::Usage(format!("--socket: {error}")))?;
    rustix::process::nice(NICENESS)
        .map_err(|error| system("cannot lower the priority of trainers")(error.into()))?;
    let (sender, events) = channel();
    listen(listener, sender.clone()).map_err(system("cannot start a thread"))?;
    watch(arguments.exit_with_stdin, sender).map_err(system("cannot receive signals"))?;
    let program = std::env::current_exe().map_err(system("cannot find the path of this program"))?;
    let trainers = TrainerPool {
        program,
        common: arguments.common,
        limit: arguments.max_trainers as usize,
        running: Arc::default(),
    };
    send_status(&[NotifyState::Ready]);
    // No process may read this line.
    let _ = writeln!(io::stdout(), "ready");
    loop {
        match events.recv_timeout(PULSE) {
            Ok(ServiceEvent::Asked(connection)) => trainers.answer(connection),
            Ok(ServiceEvent::StopWanted) | Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        send_status(&[NotifyState::Watchdog]);
    }
    send_status(&[NotifyState::Stopping]);
    trainers.stop();
    notify::flush();
    Ok(ProgramExit::Exit(Exit::Ok))
}

/// Reports to the service manager that the service is ready and stops; without trainers this is no failure.
fn nothing_to_do() -> ProgramExit {
    const WHY: &str = "training is off, because --max-trainers (HOLOBIONT_MAX_TRAINERS) is 0";
    send_status(&[NotifyState::Ready, NotifyState::Status(WHY), NotifyState::Stopping]);
    notify::flush();
    eprintln!("{WHY}");
    ProgramExit::Exit(Exit::Ok)
}

fn listen(listener: UnixListener, events: Sender<ServiceEvent>) -> io::Result<()> {
    let listen = move || {
        for connection in listener.incoming() {
            match connection.map(|connection| events.send(ServiceEvent::Asked(connection))) {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return,
                // Mostly no file descriptor is free; some become free when a trainer exits.
                Err(_) => thread::sleep(PULSE),
            }
        }
    };
    thread::Builder::new().name("listen".to_owned()).spawn(listen).map(drop)
}

/// Starts threads that send an event at SIGINT, SIGTERM or the end of stdin.
fn watch(is_stdin_watched: bool, events: Sender<ServiceEvent>) -> io::Result<()> {
    let (mut signals, asked) = (Signals::new([SIGINT, SIGTERM])?, events.clone());
    let wait = move || {
        if signals.forever().next().is_some() {
            let _ = asked.send(ServiceEvent::StopWanted);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    if is_stdin_watched {
        let read = move || {
            // The bytes have no meaning. A closed terminal gives an error, which also counts as the end.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            let _ = events.send(ServiceEvent::StopWanted);
        };
        thread::Builder::new().name("stdin".to_owned()).spawn(read)?;
    }
    Ok(())
}

struct TrainerPool {
    program: PathBuf,
    common: Vec<OsString>,
    limit: usize,
    running: Arc<Mutex<RunningTrainers>>,
}

/// Permits and processes. A connection has a permit from the start, but a process only after its request.
#[derive(Default)]
struct RunningTrainers {
    places: usize,
    processes: Vec<Pid>,
    is_stopping: bool,
}

impl TrainerPool {
    /// Starts the requested trainer for `connection`, or sends a refusal. Never blocks on the connection.
    fn answer(&self, connection: UnixStream) {
        let place = match TrainerPermit::acquire(&self.running, self.limit) {
            Ok(place) => place,
            Err(refused) => return refused.send_refusal(connection),
        };
        let (program, common) = (self.program.clone(), self.common.clone());
        let attend = move || place.run_trainer(connection, &program, &common);
        if let Err(error) = thread::Builder::new().name("trainer".to_owned()).spawn(attend) {
            eprintln!("error: cannot start a trainer: {error}");
        }
    }

    /// Asks all trainers to exit, and kills the rest after [`GRACE`].
    fn stop(&self) {
        lock(&self.running).is_stopping = true;
        for (signal, patience) in [(Signal::TERM, GRACE), (Signal::KILL, PULSE)] {
            for &process in &lock(&self.running).processes {
                let _ = kill_process(process, signal);
            }
            let until = Instant::now() + patience;
            while !lock(&self.running).processes.is_empty() && Instant::now() < until {
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn lock(running: &Mutex<RunningTrainers>) -> MutexGuard<'_, RunningTrainers> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct TrainerRefused {
    why: String,
    exit: Exit,
}

impl TrainerRefused {
    /// Sends the refusal as the event of a failed trainer.
    fn send_refusal(self, mut connection: UnixStream) {
        // The client may be gone.
        let _ = connection.set_write_timeout(Some(PULSE));
        let _ = writeln!(connection, "{}", failure(self.why, self.exit));
    }
}

/// One of the trainers that may run at once, until this is dropped.
struct TrainerPermit(Arc<Mutex<RunningTrainers>>);

impl TrainerPermit {
    fn acquire(running: &Arc<Mutex<RunningTrainers>>, limit: usize) -> Result<Self, TrainerRefused> {
        let mut now = lock(running);
        if now.places >= limit {
            let why = format!("all {limit} trainers are busy; try again when one has ended");
            return Err(TrainerRefused { why, exit: Exit::Unavailable });
        }
        now.places += 1;
        Ok(Self(Arc::clone(running)))
    }

    /// Runs the trainer that `connection` requests, to its end.
    fn run_trainer(self, connection: UnixStream, program: &Path, common: &[OsString]) {
        let usage = |why: String| TrainerRefused { why, exit: Exit::Usage };
        let request = request(&connection).map_err(usage);
        match request.and_then(|request| self.start(&connection, program, common, &request)) {
            Err(refused) => refused.send_refusal(connection),
            Ok(mut child) => {
                drop(connection);
                let _ = child.wait();
                lock(&self.0).processes.retain(|&process| process != Pid::from_child(&child));
            }
        }
    }

    fn start(
        &self,
        connection: &UnixStream,
        program: &Path,
        common: &[OsString],
        request: &TrainerRequest,
    ) -> Result<Child, TrainerRefused> {
        let failed = |error: io::Error| TrainerRefused {
            why: format!("cannot start a trainer: {error}"),
            exit: Exit::Failed,
        };
        let end = || connection.try_clone().map(|end| Stdio::from(OwnedFd::from(end))).map_err(failed);
        let (command, rest) = command(request)?;
        let (stdin, stdout) = (end()?, end()?);
        let mut running = lock(&self.0);
        if running.is_stopping {
            return Err(TrainerRefused {
                why: "the training service is stopping".to_owned(),
                exit: Exit::Unavailable,
            });
        }
        let child = Command::new(program)
            .arg(command)
            .args(common)
            .args(rest)
            .stdin(stdin)
            .stdout(stdout)
            // A terminal's signals reach only this process, which then stops the trainers in order.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        running.processes.push(Pid::from_child(&child));
        Ok(child)
    }
}

impl Drop for TrainerPermit {
    fn drop(&mut self) {
        lock(&self.0).places -= 1;
    }
}

/// Returns command and arguments of the request, if the command is one of [`COMMANDS`].
fn command(request: &TrainerRequest) -> Result<(&str, &[String]), TrainerRefused> {
    match request.arguments.split_first() {
        Some((command, rest)) if COMMANDS.contains(&command.as_str()) => Ok((command, rest)),
        _ => {
            let why = format!("the command of a request must be {}", COMMANDS.join(" or "));
            Err(TrainerRefused { why, exit: Exit::Usage })
        }
    }
}

/// Reads the first line and no byte after it, because the rest belongs to the trainer.
fn request(mut connection: &UnixStream) -> Result<TrainerRequest, String> {
    let until = Instant::now() + REQUEST_WAIT;
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let read = connection.set_read_timeout(Some(left)).and_then(|()| connection.read(&mut byte));
        match (read, byte) {
            (Ok(1), [b'\n']) => break,
            (Ok(1), _) if line.len() < MAX_REQUEST_BYTES => line.extend(byte),
            (Ok(1), _) => return Err(format!("the request is longer than {MAX_REQUEST_BYTES} bytes")),
            (Ok(_), _) => return Err("the request ended before its line was complete".to_owned()),
            (Err(error), _) => return Err(format!("cannot read the request: {error}")),
        }
    }
    connection.set_read_timeout(None).map_err(|error| error.to_string())?;
    serde_json::from_slice(&line).map_err(|error| format!("the request is not valid: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(line: &[u8]) -> Result<TrainerRequest, String> {
        let (mut user, service) = UnixStream::pair().unwrap();
        let line = line.to_vec();
        let writer = thread::spawn(move || {
            // The request is too long and not read to its end.
            let _ = user.write_all(&line);
            user
        });
        let read = request(&service);
        drop(service);
        writer.join().unwrap();
        read
    }

    #[test]
    fn a_request_is_a_line_and_what_follows_is_the_trainers() {
        let (mut user, mut service) = UnixStream::pair().unwrap();
        user.write_all(b"{\"arguments\":[\"run\",\"--seed\",\"1\"]}\nrest").unwrap();
        drop(user);
        let request = request(&service).unwrap();
        assert_eq!(command(&request).unwrap(), ("run", &["--seed".to_owned(), "1".to_owned()][..]));
        let mut rest = String::new();
        service.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "rest");
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for line in [&b"{}\n"[..], b"run\n", b"{\"arguments\":[],\"more\":1}\n", b"{\"arguments\":[]}", b""] {
            assert!(asked(line).is_err(), "{}", String::from_utf8_lossy(line));
        }
        let long = vec![b' '; MAX_REQUEST_BYTES + 2];
        assert!(asked(&long).unwrap_err().contains("longer"));
        for arguments in [vec![], vec!["serve".to_owned()], vec!["--help".to_owned()]] {
            assert!(command(&TrainerRequest { arguments }).is_err());
        }
    }

    #[test]
    fn there_are_so_many_places_and_each_comes_back() {
        let running = Arc::default();
        let first = TrainerPermit::acquire(&running, 1).unwrap();
        assert!(matches!(
            TrainerPermit::acquire(&running, 1),
            Err(TrainerRefused { exit: Exit::Unavailable, .. })
        ));
        drop(first);
        TrainerPermit::acquire(&running, 1).unwrap();
    }
}
