//! A session on the compute thread, and how its rows are read and answered.

use std::{collections::BTreeMap, sync::Arc};

use shmproto::{
    channel::{ExecutorChannel, Violation},
    layer::{
        CallHeader, CallStatus, Dtype, ReplyHeader, RowSource,
        seeded_rows::{DRAW_WORDS, SeededRows},
    },
};
use zeroize::Zeroize as _;

use super::{
    SessionFault,
    call::{AcceptedCall, ResolvedCall},
};
use crate::{
    call_queue::{CallChunk, CallId},
    event_queue::{AccountedChannel, Payload, Replies, Reply},
    session::{SessionCounters, SessionInfo},
    wire_dtype,
};

pub(super) struct ClientSession {
    pub(super) info: Arc<SessionInfo>,
    pub(super) account: Arc<SessionCounters>,
    pub(super) peer: SessionPeer,
    /// Highest number of a call answered with rows.
    answered: Option<u64>,
    waiting: BTreeMap<u64, CallId>,
    waiting_rows: u64,
}

/// The client's end of a session.
pub(super) enum SessionPeer {
    /// A client on this host, initially without a channel.
    Local(Option<Box<AccountedChannel>>),
    /// Reply queue of a remote client's connection.
    Remote(Replies),
}

impl ClientSession {
    pub(super) fn new(info: Arc<SessionInfo>, account: Arc<SessionCounters>, peer: SessionPeer) -> Self {
        Self { info, account, peer, answered: None, waiting: BTreeMap::new(), waiting_rows: 0 }
    }

    /// Replaces the channel; returns the old one.
    pub(super) fn begin(&mut self, channel: AccountedChannel) -> Option<AccountedChannel> {
        self.answered = None;
        std::mem::replace(&mut self.peer, SessionPeer::Local(Some(Box::new(channel)))).into_channel()
    }

    /// Checks the lengths and positions of the rows; returns the seed, if rows are not sent.
    pub(super) fn check_payload(
        &self,
        header: &CallHeader,
        asked: &ResolvedCall,
        payload: Option<&Payload>,
    ) -> Result<Option<SeededRows>, CallStatus> {
        let (input, output) = (asked.coming_bytes(), asked.output_bytes(asked.rows));
        let fits = match (&self.peer, payload) {
            (SessionPeer::Remote(_), Some(payload)) => payload.bytes.len() as u64 == input,
            (SessionPeer::Local(Some(lent)), None) => {
                let slab = lent.channel.geometry().slab_bytes;
                let ends_within = |from: u64, bytes| from.checked_add(bytes).is_some_and(|end| end <= slab);
                ends_within(header.input, input) && ends_within(header.output, output)
            }
            _ => false,
        };
        match asked.source {
            _ if !fits => Err(CallStatus::Shape),
            RowSource::Rows => Ok(None),
            RowSource::Draw => self.peer.read_draw(header, payload).map(Some).ok_or(CallStatus::Shape),
        }
    }

    /// Checks the number of a call; returns the waiting call that it replaces, if any.
    pub(super) fn check_sequence(&self, sequence: u64) -> Result<Option<CallId>, CallStatus> {
        match self.waiting.get(&sequence) {
            Some(&older) => Ok(Some(older)),
            None if self.answered.is_some_and(|answered| sequence <= answered) => Err(CallStatus::Sequence),
            None => Ok(None),
        }
    }

    pub(super) fn await_answer(&mut self, header: &CallHeader, id: CallId) {
        self.waiting.insert(header.sequence, id);
        self.count_rows(self.waiting_rows + u64::from(header.rows));
    }

    pub(super) fn forget(&mut self, header: &CallHeader) {
        self.waiting.remove(&header.sequence);
        self.count_rows(self.waiting_rows.saturating_sub(header.rows.into()));
        self.account.end_call();
    }

    /// Removes a call that was answered with rows, and records its number.
    pub(super) fn answered(&mut self, header: &CallHeader) {
        self.forget(header);
        self.answered = self.answered.max(Some(header.sequence));
    }

    /// Removes all waiting calls and returns their ids.
    pub(super) fn take_waiting(&mut self) -> impl Iterator<Item = CallId> + use<> {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.iter().for_each(|_| self.account.end_call());
        self.count_rows(0);
        waiting.into_values()
    }

    fn count_rows(&mut self, rows: u64) {
        self.waiting_rows = rows;
        self.account.set_waiting_rows(rows);
    }
}

impl SessionPeer {
    pub(super) fn channel(&self) -> Option<&ExecutorChannel> {
        match self {
            Self::Local(lent) => lent.as_deref().map(|lent| &lent.channel),
            Self::Remote(_) => None,
        }
    }

    /// Returns the channel, so that the caller can free its memory.
    pub(super) fn into_channel(self) -> Option<AccountedChannel> {
        match self {
            Self::Local(lent) => lent.map(|lent| *lent),
            Self::Remote(_) => None,
        }
    }

    pub(super) fn next_call(&mut self) -> Result<Option<CallHeader>, Violation> {
        match self {
            Self::Local(Some(lent)) => lent.channel.take(),
            Self::Local(None) | Self::Remote(_) => Ok(None),
        }
    }

    /// Reads the seed of rows; `None` if it lies outside the slab.
    fn read_draw(&self, header: &CallHeader, payload: Option<&Payload>) -> Option<SeededRows> {
        let mut words = [0.0; DRAW_WORDS];
        match (self, payload) {
            (Self::Local(Some(lent)), _) => {
                lent.channel.read_rows(header.input, Dtype::F32, &mut words).ok()?;
            }
            (_, Some(payload)) => wire_dtype::read(Dtype::F32, &payload.bytes, &mut words),
            _ => return None,
        }
        let draw = SeededRows::from_words(&words);
        words.zeroize();
        Some(draw)
    }

    /// Copies the rows of a chunk, or generates them from the seed.
    pub(super) fn read(
        &self,
        call: &AcceptedCall,
        piece: &CallChunk,
        rows: &mut [f32],
    ) -> Result<(), Violation> {
        if let Some(draw) = &call.draw {
            draw.fill(piece.first_row as u64, call.asked.input, rows);
            return Ok(());
        }
        let (from, dtype) = (call.asked.input_bytes(piece.first_row), call.header.dtype);
        match (self, &call.payload) {
            (Self::Local(Some(lent)), _) => lent.channel.read_rows(call.header.input + from, dtype, rows)?,
            (_, Some(both)) => {
                let from = usize::try_from(from).unwrap_or(usize::MAX);
                wire_dtype::read(dtype, both.input.bytes.get(from..).unwrap_or_default(), rows);
            }
            _ => {}
        }
        Ok(())
    }

    /// Stores the answer to a chunk; the chunks of a call come in order.
    pub(super) fn write(
        &self,
        call: &mut AcceptedCall,
        piece: &CallChunk,
        rows: &[f32],
    ) -> Result<(), Violation> {
        let (from, dtype) = (call.asked.output_bytes(piece.first_row), call.header.dtype);
        match (self, &mut call.payload) {
            (Self::Local(Some(lent)), _) => {
                lent.channel.write_rows(call.header.output + from, dtype, rows)?;
            }
            (_, Some(both)) => {
                let whole = usize::try_from(call.asked.output_bytes(call.asked.rows)).unwrap_or(0);
                both.output.bytes.reserve_exact(whole - both.output.bytes.len().min(whole));
                wire_dtype::put(dtype, rows, &mut both.output.bytes);
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn reply(&mut self, reply: Reply) -> Result<(), SessionFault> {
        let header: &ReplyHeader = &reply.header;
        match self {
            Self::Local(Some(lent)) => lent.channel.reply(header).map_err(|violation| match violation {
                Violation::Full => SessionFault::Slow,
                violation => SessionFault::Violation(violation),
            }),
            Self::Local(None) => Ok(()),
            Self::Remote(replies) => {
                if replies.put(reply) {
                    Ok(())
                } else {
                    Err(SessionFault::Slow)
                }
            }
        }
    }
}
