//! A relay before an executor's socket, which forwards all bytes of clients and shows each call to an
//! observer first.

use std::{
    io::{self, Read, Write as _},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use shmproto::layer::{CallHeader, HEADER_BYTES};

/// Observer of a call with its rows or its draw.
pub type CallObserver = Arc<dyn Fn(&CallHeader, &[u8]) + Send + Sync>;

/// Bytes that a peer sends before its first frame (ZMTP 3.1).
const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Listens at `near`, in front of the socket `far`, until the test's process ends.
///
/// # Panics
/// If the socket cannot be created.
pub fn listen(near: &Path, far: PathBuf, witness: CallObserver) {
    let listener = UnixListener::bind(near).expect("a socket in a directory of one's own");
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // Without an executor the client is disconnected and connects again.
            let Ok(executor) = UnixStream::connect(&far) else { continue };
            let (from, to) = (client.try_clone(), executor.try_clone());
            let (Ok(from), Ok(to)) = (from, to) else { continue };
            let witness = Arc::clone(&witness);
            thread::spawn(move || forward(from, to, &witness));
            thread::spawn(move || back(executor, client));
        }
    });
}

fn forward(mut client: UnixStream, mut executor: UnixStream, witness: &CallObserver) {
    let mut frames = Frames::default();
    let _ = relay(&mut client, &mut |bytes| {
        frames.push(bytes, witness);
        executor.write_all(bytes)
    });
    let _ = executor.shutdown(Shutdown::Both);
}

fn back(mut executor: UnixStream, mut client: UnixStream) {
    let _ = relay(&mut executor, &mut |bytes| client.write_all(bytes));
    let _ = client.shutdown(Shutdown::Both);
}

fn relay(from: &mut UnixStream, to: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            count => to(&buffer[..count])?,
        }
    }
}

#[derive(Debug, Default)]
struct Frames {
    bytes: Vec<u8>,
    is_greeted: bool,
    message: Vec<Vec<u8>>,
}

impl Frames {
    fn push(&mut self, bytes: &[u8], witness: &CallObserver) {
        self.bytes.extend_from_slice(bytes);
        if !self.is_greeted && self.bytes.len() >= GREETING_BYTES {
            self.bytes.drain(..GREETING_BYTES);
            self.is_greeted = true;
        }
        while let Some((flags, body)) = self.next() {
            if flags & COMMAND != 0 {
                continue;
            }
            self.message.push(body);
            if flags & MORE == 0 {
                show(&std::mem::take(&mut self.message), witness);
            }
        }
    }

    /// Returns the next complete frame: a byte of flags, a length of one byte or of eight, the body.
    fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        let (&flags, rest) = self.bytes.split_first().filter(|_| self.is_greeted)?;
        let (length, head) = if flags & LONG == 0 {
            (u64::from(*rest.first()?), 2)
        } else {
            (u64::from_be_bytes(*rest.first_chunk()?), 9)
        };
        let end = head + usize::try_from(length).expect("a frame of this host's");
        let body = self.bytes.get(head..end)?.to_vec();
        self.bytes.drain(..end);
        Some((flags, body))
    }
}

/// Shows a message to the observer if it is a call.
fn show(message: &[Vec<u8>], witness: &CallObserver) {
    let [head, body] = message else { return };
    let header = <&[u8; HEADER_BYTES]>::try_from(head.as_slice()).ok().map(CallHeader::from_bytes);
    if let Some(Ok(header)) = header {
        witness(&header, body);
    }
}
