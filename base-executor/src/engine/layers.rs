//! The layer service in the compute thread: the base is lent to split clients between steps, within passes, and while there
//! is nothing else to do.

use std::{
    task::{Context, Poll, Waker},
    time::Duration,
};

use model::forward::ForwardPass;
use tokio::sync::mpsc;

pub use super::model_runner::LayerService;
use super::{event::EngineEvent, model_runner::ModelRunner};

impl<P: ForwardPass> ModelRunner<P> {
    /// Computes calls that are due, for as long as the step took at most: neither starves the other.
    pub(super) fn serve_layers(&mut self, step: Duration) {
        if let Some(layers) = &mut self.layers {
            layers.hub.poll();
            layers.hub.run_beside(step, (layers.base)(&mut self.pass));
        }
    }

    /// Answers what was let in before the end: it is due soon, since nothing new is let in.
    pub(super) fn finish_layers(&mut self) {
        let Some(layers) = &mut self.layers else { return };
        loop {
            layers.hub.poll();
            let ran = layers.hub.run_due((layers.base)(&mut self.pass));
            if layers.hub.is_idle() {
                return;
            }
            if ran.rows == 0 {
                layers.hub.wait(None);
            }
        }
    }

    /// The next event; calls are computed until it comes. `None` if nobody can send any more.
    pub(super) fn next_event(
        &mut self,
        events: &mut mpsc::Receiver<EngineEvent<P::Adapter>>,
    ) -> Option<EngineEvent<P::Adapter>> {
        let Some(layers) = &mut self.layers else { return events.blocking_recv() };
        let waker = Waker::from(layers.hub.bell());
        loop {
            if let Poll::Ready(event) = events.poll_recv(&mut Context::from_waker(&waker)) {
                return event;
            }
            layers.hub.poll();
            if layers.hub.run_due((layers.base)(&mut self.pass)).rows == 0 {
                layers.hub.wait(None);
            }
        }
    }
}
