//! Commands on the wire: a line, followed by its values.

use std::io::{self, BufRead, Read};

use control_protocol::training::session::{MAX_LINE_BYTES, MAX_NUMBERS, TrainingCommand};

/// Reads a command with its values; `None` at the end.
///
/// # Errors
/// Fails if the line is no command or too long, has too many values, or the input ends early.
pub fn read(from: &mut impl BufRead) -> io::Result<Option<(TrainingCommand, Vec<[u8; 4]>)>> {
    let mut line = Vec::new();
    Read::take(&mut *from, MAX_LINE_BYTES as u64 + 1).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.len() > MAX_LINE_BYTES {
        return Err(io::Error::other(format!("a command is longer than {MAX_LINE_BYTES} bytes")));
    }
    let order: TrainingCommand = serde_json::from_slice(&line)?;
    let count = order.numbers();
    let count =
        count.ok_or_else(|| io::Error::other(format!("a command has more than {MAX_NUMBERS} numbers")))?;
    let mut numbers = vec![[0; 4]; count];
    from.read_exact(numbers.as_flattened_mut())?;
    Ok(Some((order, numbers)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"order":"forward_backward","loss":"ppo","options":{},"forward_only":true,"lengths":[1],"inputs":[]}"#;

    #[test]
    fn an_order_is_a_line_and_its_numbers() {
        let bytes = [
            LINE.as_bytes(),
            b"\n",
            &[1, 0, 0, 0, 2, 0, 0, 0],
            b"{\"order\":\"save_state\",\"directory\":\"d\"}\n",
        ]
        .concat();
        let mut from = &bytes[..];
        let (_, numbers) = read(&mut from).unwrap().unwrap();
        assert_eq!(numbers, [[1, 0, 0, 0], [2, 0, 0, 0]]);
        assert_eq!(
            read(&mut from).unwrap(),
            Some((TrainingCommand::SaveState { directory: "d".into() }, vec![]))
        );
        assert_eq!(read(&mut from).unwrap(), None);
    }

    #[test]
    fn what_is_no_order_or_ends_too_early_or_too_late_is_refused() {
        let long = vec![b' '; MAX_LINE_BYTES + 2];
        let short = [LINE.as_bytes(), b"\n", &[1, 0, 0, 0, 2, 0]].concat();
        let large = LINE.replace("[1]", "[100000000]");
        for bytes in [&b"{}\n"[..], b"save", &long, &short, large.as_bytes()] {
            assert!(read(&mut &*bytes).is_err());
        }
    }
}
