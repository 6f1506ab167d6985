//! Relay to a server that can damage its responses.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Shorter responses are not damaged, since they hold headers and messages, not files.
const FILE_BYTES: usize = 4096;
/// Interval at which delayed responses check whether they may continue.
const TICK: Duration = Duration::from_millis(20);
const CHUNK_BYTES: usize = 16 << 10;

/// Fault that the relay injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseFault {
    /// The relay injects no fault.
    None,
    /// One bit changes in each of the next responses with a file.
    Flip(usize),
    /// The next responses with a file are truncated half-way.
    Break(usize),
    /// Responses are delayed by this time.
    Slow(Duration),
    /// Responses are held back while this fault is set.
    Silence,
    /// No bytes arrive in either direction, without notice.
    Cut,
    /// The relay refuses connections.
    Gone,
}

#[derive(Debug)]
struct RelayState {
    /// Port of loopback that the relay connects to.
    target: u16,
    harm: ResponseFault,
    asked: Vec<String>,
}

/// Relay between clients and one server.
#[derive(Debug)]
pub struct FaultyRelay {
    port: u16,
    state: Arc<Mutex<RelayState>>,
}

fn lock(state: &Mutex<RelayState>) -> MutexGuard<'_, RelayState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FaultyRelay {
    /// Creates a relay to a port of loopback, whose threads end with the test's process.
    #[must_use]
    pub fn to(target: u16) -> Self {
        Self::from(IpAddr::from(Ipv4Addr::LOCALHOST), target)
    }

    /// Creates a relay for clients that reach this machine at another address.
    #[must_use]
    pub fn from(listen: IpAddr, target: u16) -> Self {
        let listener = TcpListener::bind((listen, 0)).expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let state = Arc::new(Mutex::new(RelayState { target, harm: ResponseFault::None, asked: Vec::new() }));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                thread::spawn(move || relay(&stream, &state));
            }
        });
        Self { port, state }
    }

    /// Returns the listen address of the relay.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets the current fault.
    pub fn set(&self, harm: ResponseFault) {
        lock(&self.state).harm = harm;
    }

    /// Redirects new connections to another port. Existing connections stay.
    pub fn lead_to(&self, target: u16) {
        lock(&self.state).target = target;
    }

    /// Returns the current fault.
    #[must_use]
    pub fn harm(&self) -> ResponseFault {
        lock(&self.state).harm
    }

    /// Returns and clears the heads of the recorded requests.
    #[must_use]
    pub fn take_asked(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.state).asked)
    }
}

fn relay(client: &TcpStream, state: &Arc<Mutex<RelayState>>) {
    wait_while(state, &[ResponseFault::Cut]);
    let (harm, target) = {
        let state = lock(state);
        (state.harm, state.target)
    };
    if harm == ResponseFault::Gone {
        return;
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else { return };
    let (Ok(from), Ok(to)) = (client.try_clone(), server.try_clone()) else { return };
    let asked = Arc::clone(state);
    thread::spawn(move || {
        let _ = forward(from, to, &asked);
    });
    let _ = back(&server, client, state);
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

fn forward(mut from: TcpStream, mut to: TcpStream, state: &Mutex<RelayState>) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let count = from.read(&mut chunk)?;
        if count == 0 {
            return to.shutdown(Shutdown::Write);
        }
        let text = String::from_utf8_lossy(&chunk[..count]);
        if let Some((head, _)) = text.split_once("\r\n\r\n") {
            lock(state).asked.push(head.to_owned());
        }
        wait_while(state, &[ResponseFault::Cut]);
        to.write_all(&chunk[..count])?;
    }
}

fn wait_while(state: &Mutex<RelayState>, harms: &[ResponseFault]) {
    while harms.contains(&lock(state).harm) {
        thread::sleep(TICK);
    }
}

fn back(mut from: &TcpStream, mut to: &TcpStream, state: &Mutex<RelayState>) -> io::Result<()> {
    let (mut chunk, mut sent) = (vec![0; CHUNK_BYTES], 0);
    loop {
        let count = from.read(&mut chunk)?;
        if count == 0 {
            return Ok(());
        }
        let harm = lock(state).harm;
        if let ResponseFault::Slow(by) = harm {
            thread::sleep(by);
        }
        wait_while(state, &[ResponseFault::Silence, ResponseFault::Cut]);
        let mut state = lock(state);
        let is_file = sent + count > FILE_BYTES;
        let breaks = match state.harm {
            ResponseFault::Gone => return Ok(()),
            ResponseFault::Flip(left @ 1..) if is_file => {
                chunk[count - 1] ^= 1;
                state.harm = ResponseFault::Flip(left - 1);
                false
            }
            ResponseFault::Break(left @ 1..) if is_file => {
                state.harm = ResponseFault::Break(left - 1);
                true
            }
            _ => false,
        };
        drop(state);
        if breaks {
            to.write_all(&chunk[..count / 2])?;
            return Ok(());
        }
        to.write_all(&chunk[..count])?;
        sent += count;
    }
}
