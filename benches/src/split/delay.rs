//! An emulated link that adds a round trip to every call.

use std::{
    thread,
    time::{Duration, Instant},
};

use client::{
    error::LinkError,
    transport::{Connect, Transport},
};
use shmproto::layer::{
    CallHeader, ReplyHeader,
    control::{FromLayers, ToLayers},
};

/// Spun part of a delay: longer than a sleep on a busy machine overshoots.
const SPUN: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct DelayedConnector {
    pub(super) connector: Box<dyn Connect>,
    pub(super) round_trip: Duration,
}

impl Connect for DelayedConnector {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        let transport = self.connector.connect()?;
        Ok(Box::new(DelayedTransport { transport, round_trip: self.round_trip }))
    }

    fn layout_hash(&self) -> u64 {
        self.connector.layout_hash()
    }
}

#[derive(Debug)]
struct DelayedTransport {
    transport: Box<dyn Transport>,
    round_trip: Duration,
}

impl Transport for DelayedTransport {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        self.transport.ask(message)
    }

    fn send_oneway(&mut self, message: &ToLayers) {
        self.transport.send_oneway(message);
    }

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        let reply = self.transport.call(call, x, out)?;
        let answered = Instant::now();
        thread::sleep(self.round_trip.saturating_sub(SPUN));
        while answered.elapsed() < self.round_trip {
            std::hint::spin_loop();
        }
        Ok(reply)
    }
}
