//! The peer: one Unix stream socket per worker, written and read in sequence.

use std::{
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use anyhow::{Context, Result};

use super::{
    round_trip::{MessageShape, RoundTrip},
    worker::{Channel, WorkerProcess, WorkerRole, widen},
};

#[derive(Debug)]
pub(super) struct Sockets {
    shape: MessageShape,
    sockets: Vec<UnixStream>,
    sums: Vec<u8>,
    // Dropped last: a worker ends when its socket closes.
    _workers: Vec<WorkerProcess>,
}

impl Sockets {
    pub(super) fn start(shape: MessageShape, cores: &[Option<usize>]) -> Result<Self> {
        let (mut sockets, mut workers) = (Vec::new(), Vec::new());
        for &core in cores {
            let (ours, theirs) = UnixStream::pair().context("no pair of sockets")?;
            widen(&ours);
            let role = WorkerRole {
                channel: Channel::Socket,
                core,
                receives: shape.x_bytes(cores.len()),
                sends: shape.sums_bytes(cores.len()),
            };
            workers.push(WorkerProcess::start(role, OwnedFd::from(theirs))?);
            sockets.push(ours);
        }
        Ok(Self { shape, sockets, sums: vec![0; shape.rows * shape.width * 4], _workers: workers })
    }
}

impl RoundTrip for Sockets {
    fn trip(&mut self, x: &[f32]) -> Result<()> {
        let count = self.sockets.len();
        let x: &[u8] = bytemuck::cast_slice(x);
        let (reads, writes) = (self.shape.x_bytes(count), self.shape.sums_bytes(count));
        for (index, socket) in self.sockets.iter_mut().enumerate() {
            let first = self.shape.first_byte(index, count);
            socket.write_all(&x[first..first + reads]).context("a worker does not read")?;
        }
        for (socket, sums) in self.sockets.iter_mut().zip(self.sums.chunks_exact_mut(writes)) {
            socket.read_exact(sums).context("a worker does not answer")?;
        }
        Ok(())
    }

    fn sums(&self, index: usize) -> f32 {
        bytemuck::pod_read_unaligned(&self.sums[index * 4..][..4])
    }
}
