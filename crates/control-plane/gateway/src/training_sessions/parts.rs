//! Number of parts of a forward-backward request, counted before decoding: two bytes of protobuf can need a
//! hundred bytes in memory.

/// Maximum number of parts per request. The SDK sends at most 1,024 sequences per batch, about 30,000 parts.
pub(crate) const MAX_PARTS: usize = 1 << 16;

/// Counts the fields of all messages of a `ForwardBackwardRequest`, and each dimension of a tensor's shape.
/// Counting stops at malformed input, which the decoder refuses.
#[must_use]
pub(crate) fn count(request: &[u8]) -> usize {
    sum(request, |field, bytes| match field {
        3 => datum(bytes),
        5 | 7 => sum(bytes, |_, _| 0),
        _ => 0,
    })
}

fn datum(bytes: &[u8]) -> usize {
    sum(bytes, |field, bytes| match field {
        1 => sum(bytes, |_, _| 0),
        2 => sum(bytes, |field, bytes| if field == 2 { tensor(bytes) } else { 0 }),
        _ => 0,
    })
}

/// The dimensions of a shape may be packed into one field, with one byte each.
fn tensor(bytes: &[u8]) -> usize {
    sum(bytes, |field, bytes| if field == 4 { bytes.len() } else { 0 })
}

/// Counts the fields of a message, and for each field the parts that `within` counts inside it.
fn sum(message: &[u8], within: impl Fn(usize, &[u8]) -> usize) -> usize {
    let mut rest = message;
    let fields = std::iter::from_fn(|| field(&mut rest));
    fields.map(|(number, bytes)| 1 + within(number, bytes)).sum()
}

/// Takes a field from `rest`; returns its number and, for a length-delimited field, its bytes.
fn field<'a>(rest: &mut &'a [u8]) -> Option<(usize, &'a [u8])> {
    let key = varint(rest)?;
    let bytes = match key & 7 {
        0 => return varint(rest).map(|_| (key >> 3, &[][..])),
        1 => 8,
        2 => varint(rest)?,
        // Fields of a group are counted as fields of the enclosing message.
        3 | 4 => 0,
        5 => 4,
        _ => return None,
    };
    let (field, behind) = rest.split_at_checked(bytes)?;
    *rest = behind;
    Some((key >> 3, field))
}

fn varint(rest: &mut &[u8]) -> Option<usize> {
    prost::decode_length_delimiter(rest).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use prost::Message as _;

    use super::*;
    use crate::training_sessions::wire::{
        ChunkKind, DType, Datum, EncodedText, ForwardBackwardRequest, ModelInputChunk, TensorData, Values,
    };

    #[test]
    fn the_parts_of_a_batch_are_counted_without_decoding_it() {
        let text = EncodedText { tokens: vec![0; 4096] };
        let tensor = TensorData {
            values: Some(Values::Dense(vec![0; 8192])),
            dtype: DType::Int64.into(),
            shape: vec![1024],
        };
        let datum = Datum {
            model_input: vec![ModelInputChunk { kind: Some(ChunkKind::EncodedText(text)) }],
            loss_fn_inputs: HashMap::from([("target_tokens".to_owned(), tensor)]),
        };
        let request = ForwardBackwardRequest {
            model_id: "model".to_owned(),
            loss_fn: "ppo".to_owned(),
            data: vec![datum; 3],
            ..ForwardBackwardRequest::default()
        };
        // A datum has 3 parts for datum, chunk and text; 6 for input, name, tensor, values, dtype and shape;
        // and 2 for the shape's bytes.
        assert_eq!(count(&request.encode_to_vec()), 2 + 3 * (3 + 6 + 2));
    }

    #[test]
    fn parts_of_few_bytes_are_all_counted() {
        let shape = [&[0x1a, 12, 0x12, 10, 0x12, 8, 0x22, 6][..], &[1; 6]].concat();
        let group = [0x0b, 0x1a, 0x00, 0x0c];
        for (bytes, parts) in
            [(&b"\x1a\x00".repeat(100)[..], 100), (&b"\x2a\x00"[..], 1), (&shape, 4 + 6), (&group, 3)]
        {
            assert_eq!(count(bytes), parts, "{bytes:?}");
        }
        let distinct: Vec<u8> = (0..50u8).flat_map(|key| [0x2a, 3, 0x0a, 1, key]).collect();
        assert_eq!(count(&distinct), 100);
        for broken in [&b"\x1a"[..], b"\x1a\x05\x00", b"\xff", b"\x1f"] {
            assert_eq!(count(broken), 0, "{broken:?}");
        }
    }
}
