//! The layer service in the compute thread: the base is lent to split clients between steps, within passes, and while there
//! is nothing else to do.

use std::{
    task::{Context, Poll, Waker},
    time::Duration,
};

use model::{
    forward::{ForwardPass, SequenceSlice},
    sites::EvaluateSites,
};
use tokio::sync::mpsc;

use super::{Engine, event::Event};
use crate::layers::{hub::Hub, start::Doors};

/// Split clients, and how the pass lends them its base.
pub struct Tenancy<P> {
    /// Their calls.
    pub hub: Hub,
    /// The base in the pass.
    pub base: fn(&mut P) -> &mut dyn EvaluateSites,
    /// Where they come in; closed with the engine. `None` in tests.
    pub doors: Option<Doors>,
}

impl<P> std::fmt::Debug for Tenancy<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tenancy").field("hub", &self.hub).finish_non_exhaustive()
    }
}

impl<P: ForwardPass> Engine<P> {
    /// Runs the pass, in company where there is some.
    pub(super) fn forward(
        pass: &mut P,
        tenancy: Option<&mut Tenancy<P>>,
        batch: &[SequenceSlice<'_, P::Adapter>],
        logits: &mut Vec<f32>,
    ) -> Result<(), P::Error> {
        match tenancy {
            Some(tenancy) => pass.forward_in_company(batch, logits, &mut tenancy.hub),
            None => pass.forward(batch, logits),
        }
    }

    /// Computes calls that are due, for as long as the step took: neither starves the other.
    pub(super) fn serve_tenants(&mut self, step: Duration) {
        if let Some(tenancy) = &mut self.tenancy {
            tenancy.hub.poll();
            tenancy.hub.run_for(step, (tenancy.base)(&mut self.pass));
        }
    }

    /// Answers what was let in before the end: it is due soon, since nothing new is let in.
    pub(super) fn finish_tenants(&mut self) {
        let Some(tenancy) = &mut self.tenancy else { return };
        loop {
            tenancy.hub.poll();
            let ran = tenancy.hub.run_due((tenancy.base)(&mut self.pass));
            if tenancy.hub.is_idle() {
                return;
            }
            if ran.rows == 0 {
                tenancy.hub.wait(None);
            }
        }
    }

    /// The next event; calls are computed until it comes. `None` if nobody can send any more.
    pub(super) fn next_event(
        &mut self,
        events: &mut mpsc::Receiver<Event<P::Adapter>>,
    ) -> Option<Event<P::Adapter>> {
        let Some(tenancy) = &mut self.tenancy else { return events.blocking_recv() };
        let waker = Waker::from(tenancy.hub.bell());
        loop {
            if let Poll::Ready(event) = events.poll_recv(&mut Context::from_waker(&waker)) {
                return event;
            }
            tenancy.hub.poll();
            if tenancy.hub.run_due((tenancy.base)(&mut self.pass)).rows == 0 {
                tenancy.hub.wait(None);
            }
        }
    }
}
