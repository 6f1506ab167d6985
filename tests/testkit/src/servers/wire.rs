//! The way to a server: a relay of connections that can be told to do harm to what comes back.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Answers shorter than this are left alone: they are heads and words, not files.
const FILE_BYTES: usize = 4096;
/// How often what is kept back looks whether it may go on.
const TICK: Duration = Duration::from_millis(20);
/// Bytes relayed at once.
const CHUNK_BYTES: usize = 16 << 10;

/// What happens to answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseFault {
    /// Nothing.
    None,
    /// A bit of the next so many that hold a file is another.
    Flip(usize),
    /// The next so many that hold a file break off half-way.
    Break(usize),
    /// They come so much later.
    Slow(Duration),
    /// They are kept back as long as this lasts.
    Silence,
    /// Nothing arrives as long as this lasts, either way, and nobody is told.
    Cut,
    /// Nobody is there.
    Gone,
}

#[derive(Debug)]
struct RelayState {
    /// Port of loopback that it leads to.
    target: u16,
    harm: ResponseFault,
    /// Heads of requests.
    asked: Vec<String>,
}

/// See the module's description.
#[derive(Debug)]
pub struct FaultyRelay {
    port: u16,
    state: Arc<Mutex<RelayState>>,
}

fn lock(state: &Mutex<RelayState>) -> MutexGuard<'_, RelayState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FaultyRelay {
    /// The way to a port of loopback. Its threads end with the test's process.
    #[must_use]
    pub fn to(target: u16) -> Self {
        Self::from(IpAddr::from(Ipv4Addr::LOCALHOST), target)
    }

    /// The same, for who reaches this machine at another address.
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

    /// Where it begins.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on this happens.
    pub fn set(&self, harm: ResponseFault) {
        lock(&self.state).harm = harm;
    }

    /// From now on it leads to another port. Connections that are there stay.
    pub fn lead_to(&self, target: u16) {
        lock(&self.state).target = target;
    }

    /// What happens now.
    #[must_use]
    pub fn harm(&self) -> ResponseFault {
        lock(&self.state).harm
    }

    /// Forgets what was asked, and returns the heads of those requests.
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

/// Waits as long as one of these happens.
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
