//! Reads that come in pieces, are interrupted, or end early.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use super::*;

#[test]
fn a_short_read_is_read_on_from_the_last_whole_page() {
    let bytes: Vec<u8> = (0..5 * PAGE_BYTES).map(|at| (at / 7) as u8).collect();
    for most in [PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES - 1] {
        let mut into = vec![0; bytes.len()];
        let read = |piece: &mut [u8], from: u64| {
            assert!((from as usize).is_multiple_of(PAGE_BYTES));
            let count = piece.len().min(most);
            piece[..count].copy_from_slice(&bytes[from as usize..][..count]);
            Ok(count)
        };
        assert!(fill(&mut into, read).unwrap());
        assert_eq!(into, bytes, "{most} bytes at a time");
    }
}

#[test]
fn a_read_that_was_interrupted_is_repeated_and_an_end_is_told() {
    let mut interruptions = 2;
    let mut into = vec![0; 2 * PAGE_BYTES];
    let whole = fill(&mut into, |piece, from| {
        if interruptions > 0 {
            interruptions -= 1;
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(if from == 0 { PAGE_BYTES } else { piece.len() / 2 })
    });
    assert_eq!((whole.unwrap(), interruptions), (false, 0));
    assert!(fill(&mut into, |_, _| Err(io::ErrorKind::PermissionDenied.into())).is_err());
}
