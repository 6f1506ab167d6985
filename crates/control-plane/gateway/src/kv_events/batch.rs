//! Encodes events as vLLM does: arrays in MessagePack, each event with its type in front.

use serde::Serialize;
use shmproto::message::BlockTier;

use super::prefix_index::{PrefixEvent, StoredPrefix};

/// `[time in seconds, events, data-parallel rank]`.
#[derive(Debug, Serialize)]
struct EventBatch<'a>(f64, Vec<EventArray<'a>>, u32);

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum EventArray<'a> {
    /// `["BlockStored", hashes, parent, tokens, block size, LoRA id, medium, LoRA name]`
    Stored(
        &'static str,
        &'a [u64],
        Option<u64>,
        &'a [u32],
        usize,
        Option<u32>,
        &'static str,
        Option<&'a str>,
    ),
    /// `["BlockRemoved", hashes, medium]`
    Removed(&'static str, &'a [u64], &'static str),
    /// `["AllBlocksCleared"]`
    Cleared((&'static str,)),
}

/// Returns a batch of events at `seconds` since 1970.
pub(crate) fn encode(seconds: f64, events: &[PrefixEvent]) -> Vec<u8> {
    let events = events.iter().map(array).collect();
    // Writing to memory fails only for a sequence of unknown length, and every length is known.
    rmp_serde::to_vec(&EventBatch(seconds, events, 0)).unwrap_or_default()
}

fn array(event: &PrefixEvent) -> EventArray<'_> {
    match event {
        PrefixEvent::Stored(StoredPrefix { hashes, parent, tokens, adapter, tier }) => EventArray::Stored(
            "BlockStored",
            hashes,
            *parent,
            tokens,
            tokens.len() / hashes.len().max(1),
            None,
            medium(*tier),
            adapter.as_deref(),
        ),
        PrefixEvent::Removed { hashes, tier } => EventArray::Removed("BlockRemoved", hashes, medium(*tier)),
        PrefixEvent::Cleared => EventArray::Cleared(("AllBlocksCleared",)),
    }
}

/// Returns the name of a tier. Routers prefer `GPU`, so memory of the computing device has that name also if
/// the device is a CPU.
fn medium(tier: BlockTier) -> &'static str {
    match tier {
        BlockTier::Device => "GPU",
        BlockTier::Host => "CPU",
        BlockTier::Disk => "DISK",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_batch_is_arrays_as_vllm_writes_them() {
        let stored = StoredPrefix {
            hashes: vec![u64::MAX, 1 << 63],
            parent: Some(1 << 63 | 7),
            tokens: vec![1, 2, 3, 4],
            adapter: Some("pirate".into()),
            tier: BlockTier::Device,
        };
        let base = StoredPrefix { parent: None, adapter: None, tier: BlockTier::Host, ..stored.clone() };
        let removed = PrefixEvent::Removed { hashes: vec![1 << 63], tier: BlockTier::Disk };
        let events = [PrefixEvent::Stored(stored), PrefixEvent::Stored(base), removed, PrefixEvent::Cleared];
        let decoded: Value = rmp_serde::from_slice(&encode(1.5, &events)).unwrap();
        let hashes = json!([u64::MAX, 1_u64 << 63]);
        let expected = json!([
            1.5,
            [
                ["BlockStored", hashes, 1_u64 << 63 | 7, [1, 2, 3, 4], 2, null, "GPU", "pirate"],
                ["BlockStored", hashes, null, [1, 2, 3, 4], 2, null, "CPU", null],
                ["BlockRemoved", [1_u64 << 63], "DISK"],
                ["AllBlocksCleared"],
            ],
            0,
        ]);
        assert_eq!(decoded, expected);
    }
}
