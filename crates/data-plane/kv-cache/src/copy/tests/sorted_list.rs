//! Compares the copy worker with a model that is a plain list, sorted by urgency.

use std::{
    num::NonZeroU64,
    sync::{Arc, Mutex},
};

use proptest::prelude::*;

use super::{CopyHarness, class};
use crate::copy::{
    BytesPerSecond, CopyEnd, CopyPriority, Ticket,
    worker::{CopyWorker, WorkerStep},
};

/// Event between two steps, or in the middle of one.
#[derive(Debug, Clone)]
enum CopyEvent {
    Submit(CopyPriority, Vec<usize>),
    Raise(usize, CopyPriority),
    Cancel(usize),
}

#[derive(Debug, Clone)]
enum CopyAction {
    Between(CopyEvent),
    /// A step; the event happens while the step waits for the link, or else right after the step.
    During(CopyEvent),
    Step,
}

fn happening() -> impl Strategy<Value = CopyEvent> {
    prop_oneof![
        3 => (class(), prop::collection::vec(1_usize..100, 0..5)).prop_map(|(c, s)| CopyEvent::Submit(c, s)),
        2 => (any::<prop::sample::Index>(), class()).prop_map(|(i, c)| CopyEvent::Raise(i.index(40), c)),
        2 => any::<prop::sample::Index>().prop_map(|i| CopyEvent::Cancel(i.index(40))),
    ]
}

fn act() -> impl Strategy<Value = CopyAction> {
    prop_oneof![3 => happening().prop_map(CopyAction::Between), 2 => happening().prop_map(CopyAction::During), 5 => Just(CopyAction::Step)]
}

#[derive(Debug, Clone)]
struct ListedJob {
    place: (CopyPriority, usize),
    pieces: usize,
    copied: usize,
    end: Option<CopyEnd>,
}

#[derive(Default)]
struct SortedListModel {
    jobs: Vec<ListedJob>,
    /// Copied pieces in order: job and piece.
    pieces: Vec<(usize, usize)>,
    arrivals: usize,
    untold: usize,
}

impl SortedListModel {
    fn first(&self) -> Option<usize> {
        let living = self.jobs.iter().enumerate().filter(|(_, job)| job.end.is_none());
        living.min_by_key(|(_, job)| job.place).map(|(name, _)| name)
    }

    fn happen(&mut self, happening: &CopyEvent) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        match *happening {
            CopyEvent::Submit(class, ref sizes) => {
                self.jobs.push(ListedJob {
                    place: (class, arrival),
                    pieces: sizes.len(),
                    copied: 0,
                    end: None,
                });
            }
            CopyEvent::Raise(name, class) => {
                if let Some(job) = self.jobs.get_mut(name).filter(|job| class < job.place.0) {
                    job.place = (class, arrival);
                }
            }
            CopyEvent::Cancel(name) => self.end(name, CopyEnd::Cancelled),
        }
    }

    fn end(&mut self, name: usize, end: CopyEnd) {
        if let Some(job) = self.jobs.get_mut(name).filter(|job| job.end.is_none()) {
            job.end = Some(end);
            self.untold += 1;
        }
    }

    /// Runs one step; the event `meanwhile` happens before the step copies a piece, if any.
    fn step(&mut self, meanwhile: Option<&CopyEvent>) {
        let first = if self.untold > 0 { None } else { self.first() };
        self.untold = self.untold.saturating_sub(1);
        let Some(name) = first else {
            return meanwhile.into_iter().for_each(|happening| self.happen(happening));
        };
        if self.jobs[name].pieces == 0 {
            self.end(name, CopyEnd::Done);
            return meanwhile.into_iter().for_each(|happening| self.happen(happening));
        }
        meanwhile.into_iter().for_each(|happening| self.happen(happening));
        let job = &mut self.jobs[name];
        if job.end.is_none() {
            self.pieces.push((name, job.copied));
            job.copied += 1;
            if job.copied == job.pieces {
                self.end(name, CopyEnd::Done);
            }
        }
    }
}

/// Engine and tickets of all jobs, for events before, during and after a step.
#[derive(Clone)]
struct EventActor {
    stage: Arc<CopyHarness>,
    tickets: Arc<Mutex<Vec<Ticket>>>,
}

impl EventActor {
    fn happen(&self, happening: &CopyEvent) {
        let mut tickets = self.tickets.lock().unwrap();
        match *happening {
            CopyEvent::Submit(class, ref sizes) => {
                let ticket = self.stage.submit(tickets.len(), class, sizes).unwrap();
                tickets.push(ticket);
            }
            CopyEvent::Raise(name, class) => tickets.get(name).into_iter().for_each(|t| t.raise(class)),
            CopyEvent::Cancel(name) => tickets.get(name).into_iter().for_each(Ticket::cancel),
        }
    }
}

proptest! {
    #[test]
    fn the_engine_does_what_a_sorted_list_says_whatever_happens_in_the_middle_of_a_piece(
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let stage = Arc::new(CopyHarness::new(None, acts.len()));
        let link = NonZeroU64::new(1_000).map(BytesPerSecond);
        let mut courier = CopyWorker::new(Arc::clone(&stage.shared), link);
        let actor = EventActor { stage: Arc::clone(&stage), tickets: Arc::default() };
        let mut model = SortedListModel::default();
        for act in &acts {
            match act {
                CopyAction::Between(happening) => {
                    actor.happen(happening);
                    model.happen(happening);
                }
                CopyAction::Step => {
                    courier.step();
                    model.step(None);
                }
                CopyAction::During(happening) => {
                    let (actor, planned) = (actor.clone(), happening.clone());
                    stage.clock.plan(move || actor.happen(&planned));
                    courier.step();
                    stage.clock.happen();
                    model.step(Some(happening));
                }
            }
            for (name, ticket) in actor.tickets.lock().unwrap().iter().enumerate() {
                prop_assert_eq!(ticket.is_done(), model.jobs[name].end.is_some());
            }
        }
        while courier.step() == WorkerStep::Worked {
            model.step(None);
        }
        for (name, job) in model.jobs.iter().enumerate() {
            prop_assert_eq!(stage.end_of(name), job.end);
        }
        prop_assert_eq!(stage.pieces(), model.pieces);
        let stats = stage.shared.stats();
        prop_assert_eq!(stats.done + stats.cancelled, model.jobs.len() as u64);
        prop_assert_eq!(stats.queued, [0; 3]);
    }
}
