//! A ZMTP connection, which turns bytes into events and messages into bytes, in both directions at once.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use shmproto::{
    layer::control::FromLayers,
    zmtp::{AcceptedMechanisms, ZmtpError, ZmtpEvent, ZmtpLimits, ZmtpServer},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    time::{Instant, timeout},
};

use super::send_queue::SendQueue;

/// Time limit for the last message.
const FAREWELL: Duration = Duration::from_secs(1);

/// Direction in which bytes moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IoProgress {
    In,
    Out,
    /// The peer sends no more.
    End,
}

/// Whether bytes are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    On,
    /// No bytes are received until earlier messages are handled.
    Paused,
}

#[derive(Debug)]
pub(super) struct ZmtpLink<S> {
    stream: S,
    zmtp: ZmtpServer,
    pub(super) outbox: SendQueue,
    /// Whether written bytes may still be in a buffer of the stream.
    is_unflushed: bool,
    heard_at: Instant,
    /// Time since when the peer has taken none of the waiting bytes.
    stuck_since: Option<Instant>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ZmtpLink<S> {
    pub(super) fn new(stream: S, limits: ZmtpLimits) -> Self {
        Self {
            stream,
            zmtp: ZmtpServer::new(limits, AcceptedMechanisms::Either),
            outbox: SendQueue::default(),
            is_unflushed: false,
            heard_at: Instant::now(),
            stuck_since: None,
        }
    }

    pub(super) fn zmtp(&mut self) -> &mut ZmtpServer {
        &mut self.zmtp
    }

    pub(super) fn heard_at(&self) -> Instant {
        self.heard_at
    }

    pub(super) fn stuck_since(&self) -> Option<Instant> {
        self.stuck_since
    }

    pub(super) fn next_event(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
        self.zmtp.next_event()
    }

    /// Waits until bytes have moved or the peer has closed. Cancelling the wait loses nothing.
    pub(super) async fn moved(&mut self, reading: Reading) -> io::Result<IoProgress> {
        std::future::poll_fn(|context| self.poll_moved(context, reading)).await
    }

    fn poll_moved(&mut self, context: &mut Context<'_>, reading: Reading) -> Poll<io::Result<IoProgress>> {
        let has_written = self.poll_out(context)?;
        self.note_progress(has_written);
        if reading == Reading::On
            && let Poll::Ready(count) = self.poll_in(context)?
        {
            self.heard_at = Instant::now();
            return Poll::Ready(Ok(if count == 0 { IoProgress::End } else { IoProgress::In }));
        }
        if has_written { Poll::Ready(Ok(IoProgress::Out)) } else { Poll::Pending }
    }

    fn poll_in(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut space = ReadBuf::new(self.zmtp.space());
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut space))?;
        let count = space.filled().len();
        self.zmtp.advance(count);
        Poll::Ready(Ok(count))
    }

    /// Writes what can be written; true if that was anything.
    fn poll_out(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        // The protocol's own bytes go between whole messages.
        if !self.zmtp.outgoing().is_empty() && self.outbox.has_room() {
            let own = self.zmtp.outgoing().to_vec();
            self.zmtp.sent(own.len());
            self.outbox.put_bytes(own);
        }
        let mut has_written = false;
        while let Some(rest) = self.outbox.first() {
            match Pin::new(&mut self.stream).poll_write_vectored(context, &rest)? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(count) => self.outbox.wrote(count),
                Poll::Pending => break,
            }
            has_written = true;
            self.is_unflushed = true;
        }
        if self.is_unflushed && Pin::new(&mut self.stream).poll_flush(context)?.is_ready() {
            self.is_unflushed = false;
            has_written = true;
        }
        Ok(has_written)
    }

    fn note_progress(&mut self, has_written: bool) {
        let waits = !self.outbox.is_empty() || self.is_unflushed;
        if has_written || !waits {
            self.stuck_since = None;
        }
        if waits && self.stuck_since.is_none() {
            self.stuck_since = Some(Instant::now());
        }
    }

    /// Sends a last message, if the peer takes it within the time limit, and closes.
    pub(super) async fn farewell(mut self, message: Option<&FromLayers>) {
        if let Some(message) = message {
            self.outbox.put_control(message);
        }
        let close = async {
            while !self.outbox.is_empty() || self.is_unflushed || !self.zmtp.outgoing().is_empty() {
                self.moved(Reading::Paused).await?;
            }
            self.stream.shutdown().await
        };
        // A peer that is gone does not get the message.
        let _ = timeout(FAREWELL, close).await;
    }
}
