//! Whole numbers as they travel, and which sites take them.

use model::sites::ring_bits;
use shmproto::layer::{Path, control::Ring as Offer};

use crate::{
    error::CallError,
    session::{Session, calls::has_path},
};

/// Numbers travel as two words of 32 bits, the lower half first, which is how they lie in memory here.
const _: () = assert!(cfg!(target_endian = "little"), "numbers of 64 bits are sent as they lie in memory");

/// Numbers as they travel.
pub(super) fn words(numbers: &[u64]) -> &[f32] {
    bytemuck::cast_slice(numbers)
}

/// Numbers as they travel.
pub(super) fn words_mut(numbers: &mut [u64]) -> &mut [f32] {
    bytemuck::cast_slice_mut(numbers)
}

/// The first `count` numbers of `room`, which is made larger where there are fewer: what it holds is another call's.
pub(super) fn first(room: &mut Vec<u64>, count: usize) -> &mut [u64] {
    if room.len() < count {
        room.resize(count, 0);
    }
    &mut room[..count]
}

/// Covers rows: what was pads is rows plus pads.
pub(super) fn cover(pads: &mut [u64], rows: &[u64]) {
    pads.iter_mut().zip(rows).for_each(|(r, x)| *r = r.wrapping_add(*x));
}

/// Takes what the weights make of pads out of an answer.
pub(super) fn uncover(answer: &mut [u64], effect: &[u64]) {
    answer.iter_mut().zip(effect).for_each(|(y, r)| *y = y.wrapping_sub(*r));
}

/// What a session's sites say of their integers.
///
/// # Errors
/// One has no ring path.
pub(super) fn offers(session: &Session) -> Result<Vec<Offer>, CallError> {
    let offer = |(site, number): (&shmproto::layer::control::Site, u32)| {
        let ring = site.ring.filter(|ring| ring.l1.iter().all(|&l1| ring_bits(l1).is_some()));
        ring.filter(|_| has_path(site, Path::Ring)).ok_or(CallError::NoRing { site: number })
    };
    session.catalog().sites.iter().zip(0..).map(offer).collect()
}
