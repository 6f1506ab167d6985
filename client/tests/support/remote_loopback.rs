//! An executor behind an emulated round trip per call.

use std::{thread, time::Duration};

use client::{
    error::LinkError,
    transport::{Connect, Transport, loopback::Loopback},
};
use shmproto::layer::{
    CallHeader, ReplyHeader,
    control::{FromLayers, ToLayers},
};

#[derive(Debug, Clone)]
pub struct RemoteLoopback {
    pub executor: Loopback,
    pub round_trip: Duration,
}

#[derive(Debug)]
struct SlowTransport {
    transport: Box<dyn Transport>,
    round_trip: Duration,
}

impl Connect for RemoteLoopback {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        Ok(Box::new(SlowTransport { transport: self.executor.connect()?, round_trip: self.round_trip }))
    }
}

impl Transport for SlowTransport {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        self.transport.ask(message)
    }

    fn send_oneway(&mut self, message: &ToLayers) {
        self.transport.send_oneway(message);
    }

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        thread::sleep(self.round_trip);
        self.transport.call(call, x, out)
    }
}
