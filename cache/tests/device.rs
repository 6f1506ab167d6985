//! The device tier against a plain list in order of use.

use cache::device::{DeviceTier, Place, Placement, Removal};
use proptest::prelude::*;

const LIMIT_BYTES: u64 = 100;

#[derive(Debug, Clone)]
enum Act {
    Place(u8, u64),
    Pin(u8),
    Unpin(u8),
    Touch(u8),
    Remove(u8),
}

fn act() -> impl Strategy<Value = Act> {
    let key = 0..12_u8;
    prop_oneof![
        6 => (key.clone(), 0..130_u64).prop_map(|(key, bytes)| Act::Place(key, bytes % 60 + bytes / 110 * 50)),
        3 => key.clone().prop_map(Act::Pin),
        3 => key.clone().prop_map(Act::Unpin),
        2 => key.clone().prop_map(Act::Touch),
        1 => key.prop_map(Act::Remove),
    ]
}

/// All places, the least recently used first.
#[derive(Debug, Default)]
struct Plain(Vec<Place<u8>>);

impl Plain {
    fn at(&self, key: u8) -> Option<usize> {
        self.0.iter().position(|place| place.key == key)
    }

    fn used(&mut self, key: u8) -> Option<&mut Place<u8>> {
        let place = self.0.remove(self.at(key)?);
        self.0.push(place);
        self.0.last_mut()
    }

    fn held(&self) -> u64 {
        self.0.iter().map(|place| place.bytes).sum()
    }

    fn pinned(&self) -> u64 {
        self.0.iter().filter(|place| place.pins > 0).map(|place| place.bytes).sum()
    }

    /// The shortest beginning of the unpinned, least recently used first, that makes room for `bytes`.
    fn victims(&self, bytes: u64) -> Vec<u8> {
        let mut free = LIMIT_BYTES - self.held();
        let unpinned = self.0.iter().filter(|place| place.pins == 0);
        let needed = unpinned.take_while(|place| {
            let lacks = free < bytes;
            free += place.bytes;
            lacks
        });
        needed.map(|place| place.key).collect()
    }

    fn place(&mut self, key: u8, bytes: u64) -> Placement<u8> {
        if self.used(key).is_some() {
            return Placement::AlreadyThere;
        }
        if bytes > LIMIT_BYTES {
            return Placement::TooLarge;
        }
        if self.pinned() + bytes > LIMIT_BYTES {
            return Placement::NoRoom;
        }
        let evicted = self.victims(bytes);
        self.0.retain(|place| !evicted.contains(&place.key));
        self.0.push(Place { key, bytes, pins: 0 });
        Placement::Placed { evicted }
    }

    fn remove(&mut self, key: u8) -> Removal {
        match self.at(key) {
            None => Removal::Absent,
            Some(at) if self.0[at].pins > 0 => Removal::Pinned,
            Some(at) => Removal::Removed { bytes: self.0.remove(at).bytes },
        }
    }
}

proptest! {
    #[test]
    fn the_tier_does_what_a_list_in_order_of_use_says(acts in prop::collection::vec(act(), 1..200)) {
        let (mut tier, mut plain) = (DeviceTier::new(LIMIT_BYTES), Plain::default());
        for act in acts {
            let pinned: Vec<u8> = plain.0.iter().filter(|place| place.pins > 0).map(|place| place.key).collect();
            match act {
                Act::Place(key, bytes) => {
                    let placed = tier.place(key, bytes);
                    prop_assert_eq!(&placed, &plain.place(key, bytes));
                    if let Placement::Placed { evicted } = placed {
                        prop_assert!(evicted.iter().all(|key| !pinned.contains(key)), "a pinned one was evicted");
                    }
                }
                Act::Pin(key) => {
                    let pinned = plain.used(key).map(|place| place.pins += 1);
                    prop_assert_eq!(tier.pin(key), pinned.is_some());
                }
                Act::Unpin(key) => {
                    if let Some(at) = plain.at(key).filter(|&at| plain.0[at].pins > 0) {
                        plain.0[at].pins -= 1;
                        tier.unpin(key);
                    }
                }
                Act::Touch(key) => prop_assert_eq!(tier.touch(key), plain.used(key).is_some()),
                Act::Remove(key) => prop_assert_eq!(tier.remove(key), plain.remove(key)),
            }
            prop_assert!(tier.held_bytes() <= tier.limit_bytes());
            prop_assert_eq!(tier.held_bytes(), plain.held());
            prop_assert_eq!(tier.pinned_bytes(), plain.pinned());
            let mut places: Vec<_> = tier.iter().collect();
            places.sort_unstable_by_key(|place| place.key);
            plain.0.iter().for_each(|place| assert!(places.contains(place)));
            prop_assert_eq!(places.len(), plain.0.len());
        }
    }
}

#[test]
fn what_is_pinned_leaves_no_room_and_nothing_is_evicted_in_vain() {
    let mut tier = DeviceTier::new(LIMIT_BYTES);
    tier.place('a', 60);
    tier.place('b', 30);
    assert!(tier.pin('a'));
    assert_eq!(tier.place('c', 50), Placement::NoRoom);
    assert!(tier.contains('b'));
    assert_eq!(tier.place('c', 101), Placement::TooLarge);
    tier.unpin('a');
    // `a` was used after `b`, when it was pinned.
    assert_eq!(tier.place('c', 40), Placement::Placed { evicted: vec!['b'] });
    assert_eq!(tier.place('d', 40), Placement::Placed { evicted: vec!['a'] });
}

#[test]
fn the_largest_size_there_is_overflows_nothing() {
    let mut tier = DeviceTier::new(u64::MAX);
    assert_eq!(tier.place('a', u64::MAX), Placement::Placed { evicted: vec![] });
    assert!(tier.pin('a'));
    assert_eq!(tier.place('b', u64::MAX), Placement::NoRoom);
    assert_eq!(tier.place('b', 0), Placement::Placed { evicted: vec![] });
    tier.unpin('a');
    assert_eq!(tier.place('c', u64::MAX), Placement::Placed { evicted: vec!['a'] });
}

#[test]
#[should_panic(expected = "unpinned more often")]
fn unpinning_twice_is_a_fault_of_the_caller() {
    let mut tier = DeviceTier::new(LIMIT_BYTES);
    tier.place('a', 1);
    assert!(tier.pin('a'));
    tier.unpin('a');
    tier.unpin('a');
}
