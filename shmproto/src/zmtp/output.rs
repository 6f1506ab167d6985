//! Encodes frames as bytes.

/// Flags of a frame, except the flag for lengths of 64 bits.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(super) enum Flags {
    Last = 0,
    More = 1,
    Command = 4,
}

fn put_head(out: &mut Vec<u8>, flags: Flags, bytes: usize) {
    match u8::try_from(bytes) {
        Ok(bytes) => out.extend_from_slice(&[flags as u8, bytes]),
        Err(_) => {
            out.push(flags as u8 | 2);
            out.extend_from_slice(&(bytes as u64).to_be_bytes());
        }
    }
}

pub(super) fn put_frame(out: &mut Vec<u8>, flags: Flags, body: &[u8]) {
    put_head(out, flags, body.len());
    out.extend_from_slice(body);
}

/// Appends a message of these frames.
///
/// # Panics
/// Panics if `frames` is empty, because every message has a frame.
pub fn put_message(out: &mut Vec<u8>, frames: &[&[u8]]) {
    let (last, before) = frames.split_last().expect("a message has a frame");
    before.iter().for_each(|frame| put_frame(out, Flags::More, frame));
    put_frame(out, Flags::Last, last);
}

/// Appends a message of two frames without the second's bytes, which the caller sends uncopied.
pub fn put_two_frames_head(out: &mut Vec<u8>, first: &[u8], second_bytes: usize) {
    put_frame(out, Flags::More, first);
    put_head(out, Flags::Last, second_bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: usize = u8::MAX as usize;

    #[test]
    fn a_frame_of_255_bytes_is_short_and_of_256_long() {
        let mut out = Vec::new();
        put_message(&mut out, &[&[7; SHORT], &[8; SHORT + 1]]);
        assert_eq!(out[..2], [1, 255]);
        assert_eq!(out[257..266], [2, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(out.len(), 2 + 255 + 9 + 256);
    }

    #[test]
    fn the_head_of_two_frames_and_the_second_are_the_message() {
        for length in [0, 1, 255, 256, 70_000] {
            let second = vec![3; length];
            let (mut whole, mut head) = (Vec::new(), Vec::new());
            put_message(&mut whole, &[b"header", &second]);
            put_two_frames_head(&mut head, b"header", length);
            assert_eq!([head, second].concat(), whole);
        }
    }
}
