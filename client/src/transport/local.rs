//! Shared memory: rows in a slab, headers in two rings, and a control socket beside them.
//!
//! The slab is created by the first call, and again when a call does not fit. A call writes its rows at the
//! start of the slab and reads the answer after them. From the second call of a size on, nothing is
//! allocated.

use std::{
    fmt,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shmproto::{
    channel::{ClientChannel, Geometry, LAYOUT_HASH, PLACE_ALIGN},
    fd_passing::{Connection, ReceiveError},
    layer::{
        CallHeader, CallStatus, ReplyHeader,
        control::{ChannelReady, FromLayers, ToLayers},
    },
};

use super::{Connect, Transport, check_reply};
use crate::{address::Address, error::LinkError};

/// Interval at which a waiting thread checks that the executor is alive.
const WATCH: Duration = Duration::from_millis(200);

/// Minimum bytes of the slab.
const FIRST_SLAB_BYTES: u64 = 1 << 20;

/// Default time that a waiting thread spins before it sleeps.
pub const SPIN: Duration = Duration::ZERO;

/// Connector to an executor on this host.
#[derive(Debug, Clone)]
pub struct LocalConnector {
    socket: PathBuf,
    spin: Duration,
    deadline: Duration,
}

impl LocalConnector {
    /// Connects over the control socket at `socket`. A thread that waits for an answer spins for `spin`
    /// before it sleeps, and fails after `deadline`.
    #[must_use]
    pub fn new(socket: PathBuf, spin: Duration, deadline: Duration) -> Self {
        Self { socket, spin, deadline }
    }
}

impl Connect for LocalConnector {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        let path = Address::Local(self.socket.clone()).socket().unwrap_or_default();
        let control = Connection::to(&path)?;
        let Self { spin, deadline, .. } = *self;
        Ok(Box::new(LocalTransport { control, channel: None, spin, deadline }))
    }

    fn is_far(&self) -> bool {
        false
    }

    fn layout_hash(&self) -> u64 {
        LAYOUT_HASH
    }
}

struct LocalTransport {
    control: Connection<ToLayers, FromLayers>,
    channel: Option<ClientChannel>,
    spin: Duration,
    deadline: Duration,
}

impl fmt::Debug for LocalTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalTransport").field("spin", &self.spin).finish_non_exhaustive()
    }
}

fn broken(error: impl fmt::Display) -> LinkError {
    LinkError::Protocol(error.to_string())
}

/// Returns the offset of the answer in the slab, and the bytes of rows and answer together.
fn places(call: &CallHeader, x: &[f32], out: &[f32]) -> (u64, u64) {
    let bytes = |values: &[f32]| ((values.len() * call.dtype.bytes()) as u64).next_multiple_of(PLACE_ALIGN);
    (bytes(x), bytes(x) + bytes(out))
}

impl LocalTransport {
    /// Waits until the control socket is readable; false if it is not within `limit`.
    fn readable(&self, limit: Duration) -> Result<bool, LinkError> {
        let timeout = Timespec::try_from(limit).map_err(|_| LinkError::Silent { waited_ms: 0 })?;
        let mut sockets = [PollFd::from_borrowed_fd(self.control.as_fd(), PollFlags::IN)];
        match poll(&mut sockets, Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(LinkError::lost(&errno.into())),
        }
    }

    /// Returns the next control message, if one arrives within `limit`.
    fn receive(&self, limit: Duration) -> Result<Option<(FromLayers, Vec<OwnedFd>)>, LinkError> {
        if !self.readable(limit)? {
            return Ok(None);
        }
        self.control.receive().map_err(|error| match error {
            ReceiveError::Closed => LinkError::Lost("the executor closed it".to_owned()),
            ReceiveError::System(error) => LinkError::lost(&error),
            other => broken(other),
        })
    }

    fn exchange(&self, message: &ToLayers) -> Result<(FromLayers, Vec<OwnedFd>), LinkError> {
        self.control.send(message, &[]).map_err(|error| LinkError::Lost(error.to_string()))?;
        let begun = Instant::now();
        loop {
            let left = self.deadline.saturating_sub(begun.elapsed());
            match self.receive(left)? {
                Some(answer) => return Ok(answer),
                None if left.is_zero() => return Err(silent(begun)),
                None => {}
            }
        }
    }

    /// Returns a channel whose slab holds at least `bytes`.
    fn channel(&mut self, bytes: u64) -> Result<&mut ClientChannel, LinkError> {
        if self.channel.as_ref().is_none_or(|channel| channel.geometry().slab_bytes < bytes) {
            self.channel = None;
            let roomy = bytes.checked_next_power_of_two().unwrap_or(bytes).max(FIRST_SLAB_BYTES);
            self.channel = Some(match self.new_channel(roomy) {
                // The larger size may exceed the tenant's quota, so the exact size is tried too.
                Err(LinkError::Refused(_)) if roomy > bytes => self.new_channel(bytes)?,
                made => made?,
            });
        }
        Ok(self.channel.as_mut().expect("it was just made"))
    }

    fn new_channel(&self, bytes: u64) -> Result<ClientChannel, LinkError> {
        let (answer, mut descriptors) = self.exchange(&ToLayers::Channel(bytes))?;
        let ready = match answer {
            FromLayers::ChannelReady(ready) => ready,
            FromLayers::Refused(refused) => return Err(LinkError::Refused(refused)),
            FromLayers::Draining => return Err(LinkError::Draining),
            _ => return Err(broken("Channel was answered by something else")),
        };
        let ChannelReady { region_bytes, slab_bytes, depth } = ready;
        if slab_bytes < bytes {
            return Err(broken(format!("a slab of {slab_bytes} bytes instead of {bytes}")));
        }
        let region = descriptors.pop().ok_or_else(|| broken("a channel without a descriptor"))?;
        ClientChannel::join(region, region_bytes, Geometry { slab_bytes, depth }).map_err(broken)
    }

    /// Explains invalid data in the channel: an executor that ends a session reclaims its memory.
    fn why(&self, fault: impl fmt::Display) -> LinkError {
        // A message that the executor is shutting down may come first.
        for _ in 0..2 {
            match self.receive(WATCH) {
                Err(lost @ LinkError::Lost(_)) => return lost,
                Ok(Some((FromLayers::Draining, _))) => {}
                _ => break,
            }
        }
        broken(fault)
    }

    /// Checks whether the executor has ended, while an answer is awaited.
    fn watch(&self) -> Result<(), LinkError> {
        match self.receive(Duration::ZERO)? {
            // The current call is still answered; the next one will be refused.
            None | Some((FromLayers::Draining, _)) => Ok(()),
            Some(_) => Err(broken("an unexpected answer arrived")),
        }
    }
}

fn silent(since: Instant) -> LinkError {
    LinkError::Silent { waited_ms: u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX) }
}

impl Transport for LocalTransport {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        Ok(self.exchange(message)?.0)
    }

    fn send_oneway(&mut self, message: &ToLayers) {
        // The executor may be gone and then needs no message.
        let _ = self.control.send(message, &[]);
    }

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        self.call_beside(call, x, out, &mut || {})
    }

    fn call_beside(
        &mut self,
        call: &CallHeader,
        x: &[f32],
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<ReplyHeader, LinkError> {
        let (output, bytes) = places(call, x, out);
        let call = CallHeader { input: 0, output, ..*call };
        let spin = self.spin;
        let channel = self.channel(bytes)?;
        channel.write_rows(call.input, call.dtype, x).map_err(broken)?;
        if let Err(full) = channel.submit(&call) {
            return Err(self.why(full));
        }
        failpoint::pass("client.call_waits");
        meanwhile();
        let begun = Instant::now();
        let reply = loop {
            let channel = self.channel.as_mut().expect("the call went through it");
            match channel.wait(spin, WATCH) {
                Ok(Some(reply)) => break reply,
                Ok(None) => self.watch()?,
                Err(violation) => return Err(self.why(violation)),
            }
            if begun.elapsed() >= self.deadline {
                return Err(silent(begun));
            }
        };
        check_reply(&call, &reply)?;
        if reply.status == CallStatus::Done {
            let channel = self.channel.as_ref().expect("the call went through it");
            channel.read_rows(call.output, call.dtype, out).map_err(broken)?;
        }
        Ok(reply)
    }
}
