//! Wire format of integer rows, and the sites that accept them.
//!
//! Here an integer is a signed word of 64 bits. On the wire it has only as many lower bytes as the
//! [`Modulus`] has, without gaps. A row is measured in words of 32 bits, as float rows are, and is never
//! interpreted as floats.

use kernels::Modulus;
use shmproto::layer::{SiteOp, SitePath, control};
use zeroize::Zeroize;

use crate::{
    error::CallError,
    session::{Session, calls::modular_range},
};

/// Returns the first `count` values of `buffer`, which grows if necessary. Old content is erased before
/// memory is freed, because it is secret.
pub(super) fn first<T: Copy + Default + Zeroize>(buffer: &mut Vec<T>, count: usize) -> &mut [T] {
    if buffer.len() < count {
        buffer.zeroize();
        buffer.resize(count, T::default());
    }
    &mut buffer[..count]
}

/// Calls a function for the number of bytes of a modulus.
macro_rules! with_bytes {
    ($modulus:expr, $function:ident($($argument:expr),*)) => {
        match $modulus {
            Modulus::Bits48 => $function::<6>($($argument),*),
            Modulus::Bits64 => $function::<8>($($argument),*),
        }
    };
}

pub(super) fn pack(modulus: Modulus, numbers: &[u64], packed: &mut [f32]) {
    with_bytes!(modulus, pack_by(numbers, packed));
}

fn pack_by<const B: usize>(numbers: &[u64], packed: &mut [f32]) {
    packed_mut::<B>(packed).iter_mut().zip(numbers).for_each(|(to, x)| *to = lower(*x));
}

pub(super) fn unpack(modulus: Modulus, packed: &[f32], numbers: &mut [u64]) {
    with_bytes!(modulus, unpack_by(packed, numbers));
}

fn unpack_by<const B: usize>(packed: &[f32], numbers: &mut [u64]) {
    numbers.iter_mut().zip(packed_of::<B>(packed)).for_each(|(to, x)| *to = signed::<B>(to_u64(x)));
}

/// Adds `rows` to `pads`, which are in wire format and hold the covered rows afterwards.
pub(super) fn cover(modulus: Modulus, pads: &mut [f32], rows: &[u64]) {
    with_bytes!(modulus, cover_by(pads, rows));
}

fn cover_by<const B: usize>(pads: &mut [f32], rows: &[u64]) {
    packed_mut::<B>(pads).iter_mut().zip(rows).for_each(|(r, x)| *r = lower(to_u64(r).wrapping_add(*x)));
}

/// Reads an answer, and subtracts the effect of the pads from it; both are in wire format.
pub(super) fn uncover(modulus: Modulus, answer: &[f32], effect: &[f32], numbers: &mut [u64]) {
    with_bytes!(modulus, uncover_by(answer, effect, numbers));
}

fn uncover_by<const B: usize>(answer: &[f32], effect: &[f32], numbers: &mut [u64]) {
    let pairs = packed_of::<B>(answer).iter().zip(packed_of::<B>(effect));
    numbers
        .iter_mut()
        .zip(pairs)
        .for_each(|(to, (y, r))| *to = signed::<B>(to_u64(y).wrapping_sub(to_u64(r))));
}

fn packed_of<const B: usize>(packed: &[f32]) -> &[[u8; B]] {
    bytemuck::cast_slice::<f32, u8>(packed).as_chunks().0
}

fn packed_mut<const B: usize>(packed: &mut [f32]) -> &mut [[u8; B]] {
    bytemuck::cast_slice_mut::<f32, u8>(packed).as_chunks_mut().0
}

/// Returns the integer without sign extension.
fn to_u64<const B: usize>(number: &[u8; B]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..B].copy_from_slice(number);
    u64::from_le_bytes(bytes)
}

/// Sign-extends the lower `B` bytes of a word.
fn signed<const B: usize>(word: u64) -> u64 {
    let above = u64::BITS - 8 * B as u32;
    ((word << above).cast_signed() >> above).cast_unsigned()
}

fn lower<const B: usize>(word: u64) -> [u8; B] {
    let mut bytes = [0; B];
    bytes.copy_from_slice(&word.to_le_bytes()[..B]);
    bytes
}

/// Returns the modular weights data of all sites of a session.
///
/// # Errors
/// Fails if a site has no modular path.
pub(super) fn offers(session: &Session) -> Result<Vec<control::ModularWeights>, CallError> {
    let offer = |(site, number): (&control::Site, u32)| {
        let is_usable =
            [SiteOp::Forward, SiteOp::Backward].iter().all(|&op| modular_range(site, op).is_some());
        let ring = site.ring.filter(|_| is_usable && site.has_path(SitePath::Ring));
        ring.ok_or(CallError::NoRing { site: number })
    };
    session.catalog().sites.iter().zip(0..).map(offer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [i64; 6] = [0, -1, 1, (1 << 46) - 1, -(1 << 46), 0x1234_5678_9abc];

    #[test]
    fn numbers_travel_as_their_lower_bytes_one_behind_the_other() {
        let numbers = NUMBERS.map(i64::cast_unsigned);
        for modulus in Modulus::ALL {
            let mut packed = [0.0; 12];
            let packed = &mut packed[..modulus.words(numbers.len())];
            pack(modulus, &numbers, packed);
            let bytes: Vec<u8> = numbers
                .iter()
                .flat_map(|number| number.to_le_bytes().into_iter().take(modulus.bytes()))
                .collect();
            assert_eq!(bytemuck::cast_slice::<f32, u8>(packed), bytes, "{modulus:?}");
            let mut back = [0; 6];
            unpack(modulus, packed, &mut back);
            assert_eq!(back, numbers, "{modulus:?}");
        }
    }

    #[test]
    fn what_covers_a_row_is_taken_out_of_it_again() {
        let numbers = NUMBERS.map(i64::cast_unsigned);
        let pads = [u64::MAX, 1 << 47, 0x9e37_79b9_7f4a_7c15, 3, 1 << 63, 0x7fff_ffff_ffff];
        for modulus in Modulus::ALL {
            let mut pad = vec![0.0; modulus.words(numbers.len())];
            pack(modulus, &pads, &mut pad);
            let mut covered = pad.clone();
            cover(modulus, &mut covered, &numbers);
            let mut back = [0; 6];
            uncover(modulus, &covered, &pad, &mut back);
            assert_eq!(back, numbers, "{modulus:?}");
        }
    }
}
