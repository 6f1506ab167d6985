//! KV block files: valid, truncated, of other versions, and with a damaged header.

use std::{error::Error, fs};

use kv_cache::{
    Chain, Namespace,
    store::{BlockRecord, BlockStore, MAX_BLOCK_BYTES, StoreLayout, StoreSlot},
};
use types::TenantId;

use super::{
    Maker, Seed,
    gguf::OFFSETS,
    wire::{COUNTS, FORMAT},
};
use crate::store::LAYOUT;

/// Offset of the first slots' entries and length of each; `cache/src/store/format.rs` draws them.
const ENTRIES: usize = 4096;
const ENTRY_BYTES: usize = 192;

/// Builds a file with a block in each of the first `blocks` slots.
fn image(layout: &StoreLayout, blocks: u32) -> Vec<u8> {
    let make = || -> Result<Vec<u8>, Box<dyn Error>> {
        let folder = crate::targets::folder(&[]);
        let path = folder.path().join("blocks");
        let store = BlockStore::open(&path, layout)?.store;
        let namespace = Namespace { adapter: None, sharing: [1; 32], owner: TenantId::EVERYBODY };
        for slot in 0..blocks {
            let tokens = (slot..).take(layout.block_tokens).collect();
            let record = BlockRecord { namespace, parent: Chain::root(&namespace), tokens, used_at_s: 1 };
            store.write(StoreSlot(slot), &record, &vec![1; layout.block_bytes])?;
        }
        Ok(fs::read(path)?)
    };
    make().unwrap_or_else(|error| panic!("a valid file could not be made: {error}"))
}

pub(super) fn files() -> Vec<Seed> {
    let mut make = Maker::new("kv_store");
    let valid = image(&LAYOUT, 4);
    let entries = &valid[..ENTRIES + 4 * ENTRY_BYTES];
    let with = |at: usize, bytes: &[u8]| {
        let mut image = entries.to_vec();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        image
    };
    make.valid("four blocks", valid.clone());
    make.valid("entries whose bytes are cut off", entries.to_vec());
    make.valid(
        "an entry in another's place",
        with(ENTRIES + ENTRY_BYTES, &entries[ENTRIES..][..ENTRY_BYTES]),
    );
    make.valid("an entry with a flipped bit", with(ENTRIES + 40, &[entries[ENTRIES + 40] ^ 1]));
    make.valid("an entry cut in the middle", entries[..ENTRIES + 20].to_vec());
    let large = StoreLayout { block_bytes: MAX_BLOCK_BYTES, ..LAYOUT };
    make.refused("blocks of a gibibyte", COUNTS, image(&large, 0), "Other");
    make.refused("2^64 - 1 bytes a block", COUNTS, with(16, &[255; 8]), "Damaged");
    make.refused("2^32 - 1 tokens a block", OFFSETS, with(12, &[255; 4]), "Damaged");
    let foreign = StoreLayout { fingerprint: [8; 32], ..LAYOUT };
    make.refused("blocks of another model", FORMAT, image(&foreign, 4), "Other");
    make.refused("another version", FORMAT, with(8, &[9]), "OtherVersion { version: 9 }");
    make.refused("another file", FORMAT, with(0, b"GGUF"), "is not a file of KV blocks");
    make.refused("a beginning cut in the middle", FORMAT, entries[..50].to_vec(), "Damaged");
    make.refused("zeroes", FORMAT, vec![0; 8192], "Nothing");
    make.refused("nothing", FORMAT, Vec::new(), "Nothing");
    make.seeds
}
