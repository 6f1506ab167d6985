use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use super::*;

/// Bytes of the tier.
const LIMIT: u64 = 100;

/// How far a copy of these tests is.
#[derive(Debug, Default)]
struct Progress {
    is_complete: Cell<bool>,
    is_over: Cell<bool>,
    is_discarded: Cell<bool>,
}

#[derive(Debug, Clone)]
struct Copy(Rc<Progress>);

impl Transit for Copy {
    fn missing_bytes(&self) -> u64 {
        u64::from(!self.is_complete())
    }

    fn is_complete(&self) -> bool {
        self.0.is_complete.get()
    }

    fn is_over(&self) -> bool {
        self.0.is_over.get()
    }

    fn raise(&self, _: Class) {}

    fn discard(self) {
        assert!(!self.0.is_discarded.replace(true), "once");
    }
}

/// Adapters by number, and the copies that were sent.
#[derive(Default)]
struct Bench {
    residency: Option<Residency<usize, usize, Copy>>,
    sent: RefCell<Vec<Rc<Progress>>>,
    refuses: Option<Unsent>,
}

impl Bench {
    fn new() -> Self {
        Self { residency: Some(Residency::new(LIMIT)), ..Self::default() }
    }

    fn all(&mut self) -> &mut Residency<usize, usize, Copy> {
        self.residency.as_mut().unwrap()
    }

    fn bring(&mut self, key: usize, bytes: u64) -> Way {
        let Self { residency, sent, refuses } = self;
        residency.as_mut().unwrap().bring(key, bytes, Class::Demand, || match refuses {
            Some(unsent) => Err(*unsent),
            None => {
                let progress = Rc::new(Progress::default());
                sent.borrow_mut().push(Rc::clone(&progress));
                Ok(Copy(progress))
            }
        })
    }

    /// The copy that was sent last comes to this end.
    fn ends(&self, is_complete: bool) {
        let sent = self.sent.borrow();
        let last = sent.last().unwrap();
        last.is_complete.set(is_complete);
        last.is_over.set(true);
    }
}

#[test]
fn who_found_the_queue_full_sets_out_when_it_is_asked_again() {
    let mut bench = Bench { refuses: Some(Unsent::QueueFull), ..Bench::new() };
    assert_eq!(bench.bring(1, 10), Way::NoRoom);
    assert!(bench.all().can_wait_for_room(1), "there will be room");
    assert_eq!(bench.all().tier().held_bytes(), 0);
    bench.refuses = None;
    assert_eq!(bench.bring(1, 10), Way::Missing { bytes: 1 });
}

#[test]
fn who_found_no_memory_does_not_wait_for_it_and_tries_again() {
    let mut bench = Bench { refuses: Some(Unsent::NoMemory), ..Bench::new() };
    assert_eq!(bench.bring(1, 10), Way::NoRoom);
    assert!(!bench.all().can_wait_for_room(1) && bench.all().is_short(1));
    bench.all().leave_out(1, &1);
    bench.all().hold(1);
    assert_eq!(bench.all().left_out(), [(1, 1)]);
    bench.refuses = None;
    assert_eq!(bench.bring(1, 10), Way::Missing { bytes: 1 });
    assert!(bench.all().left_out().is_empty() && !bench.all().is_short(1));
    assert_eq!(bench.all().tier().pinned_bytes(), 10, "its user keeps it there");
}

#[test]
fn who_failed_is_not_sent_again_until_it_was_unloaded() {
    let mut bench = Bench::new();
    assert_eq!(bench.bring(1, 10), Way::Missing { bytes: 1 });
    bench.all().await_arrival(1);
    bench.all().arrived(1);
    assert_eq!(bench.all().tier().pinned_bytes(), 10, "that was news of another copy");
    bench.ends(false);
    bench.all().arrived(1);
    assert!(bench.all().has_failed(1));
    assert_eq!((bench.all().tier().pinned_bytes(), bench.bring(1, 10)), (0, Way::NoRoom));
    // What had arrived gives way to another.
    assert_eq!(bench.bring(2, 95), Way::Missing { bytes: 1 });
    assert!(bench.sent.borrow()[0].is_discarded.get() && bench.all().has_failed(1));
    bench.all().remove(1);
    bench.all().remove(2);
    assert_eq!(bench.bring(1, 10), Way::Missing { bytes: 1 });
}

#[test]
fn any_order_of_asking_holding_and_unloading_keeps_the_books() {
    const SIZES: [u64; 6] = [30, 60, 30, 90, 110, 10];
    let (mut bench, mut users, mut state) = (Bench::new(), [0u32; 6], 1u64);
    for _ in 0..20_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (key, action) = ((state >> 33) as usize % 6, (state >> 40) % 10);
        bench.refuses =
            [None, None, Some(Unsent::NoMemory), Some(Unsent::QueueFull)][(state >> 50) as usize % 4];
        match action {
            0..3 => match bench.bring(key, SIZES[key]) {
                Way::Missing { .. } if state >> 60 == 0 => bench.all().await_arrival(key),
                way => {
                    if way == Way::NoRoom {
                        bench.all().leave_out(key, &key);
                    }
                    bench.all().hold(key);
                    users[key] += 1;
                }
            },
            3..6 if users[key] > 0 => {
                bench.all().release(key);
                users[key] -= 1;
            }
            6 if users[key] == 0 => bench.all().remove(key),
            7..9 if !bench.sent.borrow().is_empty() => {
                bench.ends(state >> 61 != 0);
                bench.all().arrived(key);
            }
            _ => {
                for (key, _) in bench.all().left_out() {
                    bench.bring(key, SIZES[key]);
                }
            }
        }
        check(bench.all(), &users);
    }
    (0..6).for_each(|key| (0..users[key]).for_each(|_| _ = bench.all().release(key)));
    (0..6).for_each(|key| bench.all().remove(key));
    assert_eq!((bench.all().tier().held_bytes(), bench.all().adapters.len()), (0, 0));
    assert!(bench.sent.borrow().iter().all(|copy| copy.is_discarded.get()), "no copy is forgotten");
}

/// Who has a place has a copy; users, and those who wait, keep it and nobody else.
fn check(residency: &Residency<usize, usize, Copy>, users: &[u32]) {
    let mut held = 0;
    for place in residency.tier.iter() {
        held += place.bytes;
        let entry = &residency.adapters[&place.key];
        assert!(entry.copy().is_some());
        let is_awaited = matches!(entry.state, State::Placed { is_awaited: true, .. });
        assert_eq!(place.pins, u32::from(users[place.key] > 0) + u32::from(is_awaited));
    }
    assert_eq!(held, residency.tier.held_bytes());
    let copies = residency.adapters.values().filter(|entry| entry.copy().is_some()).count();
    assert_eq!(copies, residency.tier.iter().count());
}
