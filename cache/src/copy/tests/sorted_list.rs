//! The courier against a model that is nothing but a list, sorted by who is first.

use std::{
    num::NonZeroU64,
    sync::{Arc, Mutex},
};

use proptest::prelude::*;

use super::{Stage, class};
use crate::copy::{
    BytesPerSecond, Class, End, Ticket,
    courier::{Courier, Step},
};

/// What happens between two steps, or in the middle of one.
#[derive(Debug, Clone)]
enum Happening {
    Submit(Class, Vec<usize>),
    Raise(usize, Class),
    Cancel(usize),
}

#[derive(Debug, Clone)]
enum Act {
    Between(Happening),
    /// A step; if it waits for the link, this happens meanwhile, and right after it otherwise.
    During(Happening),
    Step,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        3 => (class(), prop::collection::vec(1_usize..100, 0..5)).prop_map(|(c, s)| Happening::Submit(c, s)),
        2 => (any::<prop::sample::Index>(), class()).prop_map(|(i, c)| Happening::Raise(i.index(40), c)),
        2 => any::<prop::sample::Index>().prop_map(|i| Happening::Cancel(i.index(40))),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![3 => happening().prop_map(Act::Between), 2 => happening().prop_map(Act::During), 5 => Just(Act::Step)]
}

/// A job as the model knows it.
#[derive(Debug, Clone)]
struct Known {
    place: (Class, usize),
    pieces: usize,
    copied: usize,
    end: Option<End>,
}

/// The plain list that the engine is compared with.
#[derive(Default)]
struct Model {
    jobs: Vec<Known>,
    /// Which piece of which job was copied, in that order.
    pieces: Vec<(usize, usize)>,
    arrivals: usize,
    untold: usize,
}

impl Model {
    fn first(&self) -> Option<usize> {
        let living = self.jobs.iter().enumerate().filter(|(_, job)| job.end.is_none());
        living.min_by_key(|(_, job)| job.place).map(|(name, _)| name)
    }

    fn happen(&mut self, happening: &Happening) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        match *happening {
            Happening::Submit(class, ref sizes) => {
                self.jobs.push(Known { place: (class, arrival), pieces: sizes.len(), copied: 0, end: None });
            }
            Happening::Raise(name, class) => {
                if let Some(job) = self.jobs.get_mut(name).filter(|job| class < job.place.0) {
                    job.place = (class, arrival);
                }
            }
            Happening::Cancel(name) => self.end(name, End::Cancelled),
        }
    }

    fn end(&mut self, name: usize, end: End) {
        if let Some(job) = self.jobs.get_mut(name).filter(|job| job.end.is_none()) {
            job.end = Some(end);
            self.untold += 1;
        }
    }

    /// One step; `meanwhile` happens before a piece is copied, if one is.
    fn step(&mut self, meanwhile: Option<&Happening>) {
        let first = if self.untold > 0 { None } else { self.first() };
        self.untold = self.untold.saturating_sub(1);
        let Some(name) = first else {
            return meanwhile.into_iter().for_each(|happening| self.happen(happening));
        };
        if self.jobs[name].pieces == 0 {
            self.end(name, End::Done);
            return meanwhile.into_iter().for_each(|happening| self.happen(happening));
        }
        meanwhile.into_iter().for_each(|happening| self.happen(happening));
        let job = &mut self.jobs[name];
        if job.end.is_none() {
            self.pieces.push((name, job.copied));
            job.copied += 1;
            if job.copied == job.pieces {
                self.end(name, End::Done);
            }
        }
    }
}

/// The engine and the tickets of all jobs ever submitted, for happenings on either side of a step.
#[derive(Clone)]
struct Actor {
    stage: Arc<Stage>,
    tickets: Arc<Mutex<Vec<Ticket>>>,
}

impl Actor {
    fn happen(&self, happening: &Happening) {
        let mut tickets = self.tickets.lock().unwrap();
        match *happening {
            Happening::Submit(class, ref sizes) => {
                let ticket = self.stage.submit(tickets.len(), class, sizes).unwrap();
                tickets.push(ticket);
            }
            Happening::Raise(name, class) => tickets.get(name).into_iter().for_each(|t| t.raise(class)),
            Happening::Cancel(name) => tickets.get(name).into_iter().for_each(Ticket::cancel),
        }
    }
}

proptest! {
    #[test]
    fn the_engine_does_what_a_sorted_list_says_whatever_happens_in_the_middle_of_a_piece(
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let stage = Arc::new(Stage::new(None, acts.len()));
        let link = NonZeroU64::new(1_000).map(BytesPerSecond);
        let mut courier = Courier::new(Arc::clone(&stage.shared), link);
        let actor = Actor { stage: Arc::clone(&stage), tickets: Arc::default() };
        let mut model = Model::default();
        for act in &acts {
            match act {
                Act::Between(happening) => {
                    actor.happen(happening);
                    model.happen(happening);
                }
                Act::Step => {
                    courier.step();
                    model.step(None);
                }
                Act::During(happening) => {
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
        while courier.step() == Step::Worked {
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
