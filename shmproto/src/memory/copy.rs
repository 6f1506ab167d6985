//! Copies between private values and values that another process may write or read meanwhile.
//!
//! A copy during a race is any mixture; a state word tells the caller that there was no race. The copy itself
//! must be sound, so it uses atomics, or instructions that the compiler does not look into.
//!
//! A string instruction can take over a cache line from another core without reading it first. Measured
//! between two cores, 256 KiB there and back: 13 us for close cores and 27 us for distant ones, against 28
//! and 99 us through 8-byte atomics and 21 and 87 us through AVX2 registers.

use crate::atomic::{AtomicU64, Ordering::Relaxed};

/// Copies `values` into `shared`, from element `start` on, which must be even.
///
/// # Panics
/// Panics if the values do not fit: a mistake of the caller, because both ends check a peer's sizes first.
pub(crate) fn write(shared: &[AtomicU64], start: usize, values: &[f32]) {
    assert!(start.is_multiple_of(2), "numbers are written in pairs");
    let pairs = &shared[start / 2..][..values.len().div_ceil(2)];
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    if strings::are_fast() {
        return strings::write(pairs, values);
    }
    write_pairs(pairs, values);
}

/// Copies elements out of `shared`, from element `start` on.
///
/// # Panics
/// Panics if `shared` ends before `values` is full: a mistake of the caller, as for [`write`].
pub(crate) fn read(shared: &[AtomicU64], start: usize, values: &mut [f32]) {
    let skipped = start % 2;
    let pairs = &shared[start / 2..][..(skipped + values.len()).div_ceil(2)];
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    if strings::are_fast() {
        return strings::read(pairs, skipped, values);
    }
    read_pairs(pairs, skipped, values);
}

/// Writes pairs of values, so that every access has the same size; pads an incomplete pair with zero.
fn write_pairs(pairs: &[AtomicU64], values: &[f32]) {
    let pack = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
    let (whole, rest) = values.as_chunks::<2>();
    for (to, &[low, high]) in pairs.iter().zip(whole) {
        to.store(pack(low, high), Relaxed);
    }
    if let (&[low], [.., last]) = (rest, pairs) {
        last.store(pack(low, 0.0), Relaxed);
    }
}

/// Reads pairs of values, without the first `skipped` values, none or one.
fn read_pairs(pairs: &[AtomicU64], skipped: usize, values: &mut [f32]) {
    #[allow(clippy::cast_possible_truncation, reason = "the halves are what is wanted")]
    let unpack = |pair: u64| [f32::from_bits(pair as u32), f32::from_bits((pair >> 32) as u32)];
    let (odd, values) = values.split_at_mut(values.len().min(skipped));
    if let ([value], [first, ..]) = (&mut *odd, pairs) {
        *value = unpack(first.load(Relaxed))[1];
    }
    let pairs = &pairs[odd.len()..];
    let (whole, rest) = values.as_chunks_mut::<2>();
    for (to, from) in whole.iter_mut().zip(pairs) {
        *to = unpack(from.load(Relaxed));
    }
    if let ([value], [.., last]) = (rest, pairs) {
        *value = unpack(last.load(Relaxed))[0];
    }
}

/// Copies by `rep movsb`.
#[cfg(all(target_arch = "x86_64", not(loom)))]
mod strings {
    use std::arch::{asm, x86_64::__cpuid_count};
    use std::sync::atomic::AtomicU8;

    use super::{AtomicU64, Relaxed};

    /// Whether the processor reports that these instructions are its fastest copy (ERMS).
    pub(super) fn are_fast() -> bool {
        const UNKNOWN: u8 = 0;
        const SLOW: u8 = 1;
        const FAST: u8 = 2;
        static SPEED: AtomicU8 = AtomicU8::new(UNKNOWN);
        // The query costs a microsecond in a virtual machine. All threads get the same answer without a lock.
        if SPEED.load(Relaxed) == UNKNOWN {
            let erms = __cpuid_count(7, 0).ebx & 1 << 9 != 0;
            SPEED.store(if erms { FAST } else { SLOW }, Relaxed);
        }
        SPEED.load(Relaxed) == FAST
    }

    pub(super) fn write(pairs: &[AtomicU64], values: &[f32]) {
        let bytes = size_of_val(values);
        assert!(bytes <= size_of_val(pairs));
        // SAFETY: 1. and 2. of `copy`: asserted. 3. `pairs` is atomics, `values` is borrowed.
        unsafe { copy(values.as_ptr().cast(), pairs.as_ptr().cast_mut().cast(), bytes) }
    }

    pub(super) fn read(pairs: &[AtomicU64], skipped: usize, values: &mut [f32]) {
        let bytes = size_of_val(values);
        let skipped = skipped * size_of::<f32>();
        assert!(skipped + bytes <= size_of_val(pairs));
        // SAFETY: 1. and 2. of `copy`: asserted. 3. `pairs` is atomics, `values` is borrowed exclusively.
        unsafe { copy(pairs.as_ptr().cast::<u8>().add(skipped), values.as_mut_ptr().cast(), bytes) }
    }

    /// # Safety
    /// 1. `from` can be read, and 2. `to` written, for `bytes`; the two do not overlap. 3. Each is private to
    ///    the caller, or atomics.
    unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's three conditions. To the compiler this acts like byte-wise relaxed atomics: it
        // assumes nothing about the values, and concurrent accesses are no race of plain memory. The
        // direction flag is clear on entry, and the instruction changes no flag.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") bytes => _,
                inout("rsi") from => _,
                inout("rdi") to => _,
                options(nostack, preserves_flags)
            );
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn shared() -> Vec<AtomicU64> {
        (0..8).map(|_| AtomicU64::new(u64::MAX)).collect()
    }

    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|number| number as f32 + 0.5).collect()
    }

    /// Checks every start and length that fits into 16 values.
    fn check(write: impl Fn(&[AtomicU64], usize, &[f32]), read: impl Fn(&[AtomicU64], usize, &mut [f32])) {
        for (start, count) in (0..16).flat_map(|start| (0..=16 - start).map(move |count| (start, count))) {
            let memory = shared();
            let wanted = numbers(16);
            write(&memory, 0, &wanted);
            let mut found = vec![0.0; count];
            read(&memory, start, &mut found);
            assert_eq!(found, wanted[start..start + count], "{count} from {start}");

            let start = start & !1;
            let memory = shared();
            write(&memory, start, &wanted[..count]);
            read(&memory, start, &mut found);
            assert_eq!(found, wanted[..count], "{count} at {start}");
            let untouched = |pair: &AtomicU64| pair.load(Relaxed) == u64::MAX;
            assert!(memory[..start / 2].iter().all(untouched), "{count} at {start}: written before");
            assert!(
                memory[(start + count).div_ceil(2)..].iter().all(untouched),
                "{count} at {start}: written after"
            );
        }
    }

    #[test]
    fn what_is_written_is_read_and_no_neighbour_is_touched() {
        check(write, read);
    }

    #[test]
    fn pairs_copy_what_strings_copy() {
        let write = |to: &[AtomicU64], start: usize, values: &[f32]| {
            write_pairs(&to[start / 2..][..values.len().div_ceil(2)], values);
        };
        let read = |from: &[AtomicU64], start: usize, values: &mut [f32]| {
            read_pairs(&from[start / 2..][..(start % 2 + values.len()).div_ceil(2)], start % 2, values);
        };
        check(write, read);
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn nothing_is_written_past_the_end() {
        write(&shared(), 14, &[0.0; 3]);
    }
}
