//! Queue of messages to a client: written in order and completely, without copies.

use std::{collections::VecDeque, io::IoSlice};

use shmproto::{
    codec::Wire as _,
    layer::{CONTROL, ReplyHeader, control::FromLayers},
    zmtp,
};

use crate::event_queue::{Payload, Reply};

/// Number of waiting messages from which on a client is not read from.
const MAX_MESSAGES: usize = 64;

#[derive(Debug)]
struct OutgoingMessage {
    /// All bytes but the rows.
    head: Vec<u8>,
    /// Rows, whose bytes return to the tenant's quota when they are written.
    rows: Option<Payload>,
}

impl OutgoingMessage {
    fn rows(&self) -> &[u8] {
        self.rows.as_ref().map_or(&[], |rows| &rows.bytes)
    }

    fn bytes(&self) -> usize {
        self.head.len() + self.rows().len()
    }
}

#[derive(Debug, Default)]
pub(super) struct SendQueue {
    messages: VecDeque<OutgoingMessage>,
    /// Written bytes of the first message.
    written: usize,
}

impl SendQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether new messages may be created. Messages already in progress may still be added.
    pub(super) fn has_room(&self) -> bool {
        self.messages.len() < MAX_MESSAGES
    }

    pub(super) fn put_bytes(&mut self, head: Vec<u8>) {
        self.messages.push_back(OutgoingMessage { head, rows: None });
    }

    pub(super) fn put_control(&mut self, message: &FromLayers) {
        let mut head = Vec::new();
        zmtp::put_message(&mut head, &[&CONTROL, &message.to_bytes()]);
        self.put_bytes(head);
    }

    pub(super) fn put_refusal(&mut self, header: &ReplyHeader) {
        self.put_reply(Reply { header: *header, payload: None });
    }

    pub(super) fn put_reply(&mut self, reply: Reply) {
        let Reply { header, payload: rows } = reply;
        let mut head = Vec::with_capacity(128);
        let bytes = rows.as_ref().map_or(0, |rows| rows.bytes.len());
        zmtp::put_two_frames_head(&mut head, &header.to_bytes(), bytes);
        self.messages.push_back(OutgoingMessage { head, rows });
    }

    /// Returns the unwritten rest of the first message.
    pub(super) fn first(&self) -> Option<[IoSlice<'_>; 2]> {
        let message = self.messages.front()?;
        let head = self.written.min(message.head.len());
        let rows = self.written - head;
        Some([IoSlice::new(&message.head[head..]), IoSlice::new(&message.rows()[rows..])])
    }

    /// Records that `bytes` bytes of the first message were written.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.written += bytes;
        if self.messages.front().is_some_and(|message| self.written >= message.bytes()) {
            self.messages.pop_front();
            self.written = 0;
        }
    }
}
