//! The items of a JSON array as lines, so that a file with one array is read like a file of lines.

use std::io::{self, BufRead, Read};

/// Reads an array item by item. The reader looks at brackets and quotes only, and leaves faults to the parser
/// of the lines.
pub(super) struct JsonArray<R> {
    text: R,
    /// Number of open brackets; the array's own is the first.
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl<R: BufRead> JsonArray<R> {
    pub(super) fn new(text: R) -> Self {
        Self { text, depth: 0, is_in_string: false, is_escaped: false }
    }

    /// Returns the byte of the lines that stands for `byte` of the array; `None` if there is none.
    fn byte(&mut self, byte: u8) -> Option<u8> {
        if self.is_in_string {
            (self.is_escaped, self.is_in_string) =
                (!self.is_escaped && byte == b'\\', self.is_escaped || byte != b'"');
            return Some(byte);
        }
        match byte {
            b'[' | b'{' => {
                self.depth += 1;
                (self.depth > 1).then_some(byte)
            }
            b']' | b'}' => {
                self.depth = self.depth.saturating_sub(1);
                (self.depth > 0).then_some(byte)
            }
            b',' if self.depth == 1 => Some(b'\n'),
            // White space between tokens means nothing, and a line end would end the line.
            b'\n' | b'\r' | b'\t' => Some(b' '),
            b'"' => {
                self.is_in_string = true;
                Some(byte)
            }
            _ => Some(byte),
        }
    }
}

impl<R: BufRead> Read for JsonArray<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut written = 0;
        while written == 0 && !into.is_empty() {
            let bytes = self.text.fill_buf()?;
            let taken = bytes.len().min(into.len());
            if taken == 0 {
                return Ok(0);
            }
            // The state changes with each byte, so the bytes are copied out of the borrowed buffer first.
            into[..taken].copy_from_slice(&bytes[..taken]);
            self.text.consume(taken);
            for at in 0..taken {
                if let Some(byte) = self.byte(into[at]) {
                    into[written] = byte;
                    written += 1;
                }
            }
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn lines(text: &str) -> String {
        let mut lines = String::new();
        JsonArray::new(text.as_bytes()).read_to_string(&mut lines).unwrap();
        lines
    }

    #[test]
    fn each_item_is_a_line() {
        let pretty = "\u{feff}[\n  {\"a\": [1,\n 2], \"b\": \"x, [\\\"y\\\\\"},\n  {},\n  7\n]\n";
        assert_eq!(lines(pretty), "\u{feff}   {\"a\": [1,  2], \"b\": \"x, [\\\"y\\\\\"}\n   {}\n   7  ");
        assert_eq!(lines("[]"), "");
        assert_eq!(lines("[1] 2"), "1 2");
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf =
            prop_oneof![".*".prop_map(Value::from), any::<i64>().prop_map(Value::from), Just(Value::Null)];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map(".*", inner, 0..4).prop_map(|map| json!(map)),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_array_has_its_items_as_lines(items in proptest::collection::vec(value(), 1..6)) {
            let text = serde_json::to_string_pretty(&items).unwrap();
            let read: Vec<Value> = lines(&text).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            prop_assert_eq!(read, items);
        }
    }
}
