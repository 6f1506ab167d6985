//! Layout of the file, byte by byte.
//!
//! ```text
//! file    = header, to 4096 | segments, for 1024 slots each
//! header  = magic "HOLO-KV\n" | version u32 | block_tokens u32 | block_bytes u64 | fingerprint [32]
//!         | key [32]
//! segment = 1024 x entry | 1024 x payload
//! entry   = seal [32] | hash of the payload [32] | parent [32] | sharing [32] | owner [32] | adapter [32]
//!         | used_at_s u64 | has_adapter u32 | block_tokens x u32 | zeroes to a multiple of 64
//! payload = block_bytes | zeroes to a multiple of 4096
//! ```
//!
//! Numbers are little-endian. The offset of a slot does not depend on the number of slots. So a file grows
//! and shrinks in place, and opening reads long runs of entries.
//!
//! The key is a hash of the preceding header. An entry's seal is a keyed hash of the slot's number and of the
//! rest of the entry. So an entry that was torn, damaged, moved, or left by a file of another fingerprint has
//! no valid seal. A seal of zeros, as in a hole of the file, marks an empty slot.

use blake3::Hash;
use types::{AdapterId, TenantId};

use super::{StoreLayout, StoreSlot, record::BlockRecord};
use crate::namespace::{Chain, Namespace};

pub(super) const MAGIC: [u8; 8] = *b"HOLO-KV\n";
pub(super) const VERSION: u32 = 1;

/// Alignment of payloads in bytes: a page, and a block of all common file systems.
const PAGE_BYTES: usize = 4096;
const ENTRY_ALIGN_BYTES: usize = 64;
/// Number of slots whose entries are adjacent: 320 KiB of entries with 16 tokens each.
pub(super) const SEGMENT_SLOTS: u32 = 1024;

const HASH_BYTES: usize = 32;
pub(super) const NO_SEAL: [u8; HASH_BYTES] = [0; HASH_BYTES];
/// Size of an entry without its tokens, in bytes.
const ENTRY_FRONT_BYTES: usize = 6 * HASH_BYTES + 8 + 4;
/// Size of the header without the rest of its page, in bytes.
pub(super) const HEADER_BYTES: usize = 8 + 4 + 4 + 8 + 2 * HASH_BYTES;

#[derive(Debug, PartialEq)]
pub(super) enum StoreEntry {
    /// The slot holds no block.
    Empty,
    /// The entry was not written to this slot.
    Damaged,
    /// Block in the slot, and the hash of its payload.
    Block(BlockRecord, Hash),
}

fn key(fields: &[u8]) -> [u8; HASH_BYTES] {
    blake3::derive_key("holobiont 2026 kv store v1", fields)
}

#[derive(Debug)]
pub(super) struct StoreFormat {
    pub(super) block_bytes: usize,
    pub(super) block_tokens: usize,
    header: [u8; HEADER_BYTES],
    key: [u8; HASH_BYTES],
}

impl StoreFormat {
    pub(super) fn new(layout: &StoreLayout) -> Self {
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&(layout.block_tokens as u32).to_le_bytes());
        header.extend_from_slice(&(layout.block_bytes as u64).to_le_bytes());
        header.extend_from_slice(&layout.fingerprint);
        let key = key(&header);
        header.extend_from_slice(&key);
        let header = header.try_into().expect("the fields are as long as the header");
        Self { block_bytes: layout.block_bytes, block_tokens: layout.block_tokens, header, key }
    }

    pub(super) fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    /// True if `bytes` are an intact header of this version, with any layout.
    pub(super) fn is_header(bytes: &[u8; HEADER_BYTES]) -> bool {
        bytes.split_last_chunk().is_some_and(|(fields, last)| key(fields) == *last)
    }

    pub(super) fn entry_bytes(&self) -> usize {
        (ENTRY_FRONT_BYTES + self.block_tokens * size_of::<u32>()).next_multiple_of(ENTRY_ALIGN_BYTES)
    }

    fn stride(&self) -> u64 {
        self.block_bytes.next_multiple_of(PAGE_BYTES) as u64
    }

    fn table_bytes(&self) -> u64 {
        u64::from(SEGMENT_SLOTS) * self.entry_bytes() as u64
    }

    /// Returns the offset of the entries of a slot's segment.
    fn segment_at(&self, slot: StoreSlot) -> u64 {
        let segment_bytes = self.table_bytes() + u64::from(SEGMENT_SLOTS) * self.stride();
        PAGE_BYTES as u64 + u64::from(slot.0 / SEGMENT_SLOTS) * segment_bytes
    }

    pub(super) fn entry_at(&self, slot: StoreSlot) -> u64 {
        self.segment_at(slot) + u64::from(slot.0 % SEGMENT_SLOTS) * self.entry_bytes() as u64
    }

    pub(super) fn payload_at(&self, slot: StoreSlot) -> u64 {
        self.segment_at(slot) + self.table_bytes() + u64::from(slot.0 % SEGMENT_SLOTS) * self.stride()
    }

    /// Returns the maximum size of a file with `slots` slots.
    pub(super) fn end(&self, slots: u32) -> u64 {
        slots
            .checked_sub(1)
            .map_or(PAGE_BYTES as u64, |last| self.payload_at(StoreSlot(last)) + self.stride())
    }

    /// Encodes a slot's entry for a block.
    pub(super) fn seal(&self, slot: StoreSlot, record: &BlockRecord, payload: &Hash) -> Vec<u8> {
        let mut entry = Vec::with_capacity(self.entry_bytes());
        entry.extend_from_slice(&NO_SEAL);
        entry.extend_from_slice(payload.as_bytes());
        entry.extend_from_slice(&record.parent.0);
        entry.extend_from_slice(&record.namespace.sharing);
        entry.extend_from_slice(&record.namespace.owner.0);
        entry.extend_from_slice(&record.namespace.adapter.map_or([0; HASH_BYTES], |adapter| adapter.0));
        entry.extend_from_slice(&record.used_at_s.to_le_bytes());
        entry.extend_from_slice(&u32::from(record.namespace.adapter.is_some()).to_le_bytes());
        entry.extend(record.tokens.iter().flat_map(|token| token.to_le_bytes()));
        entry.resize(self.entry_bytes(), 0);
        let seal = self.seal_of(slot, &entry[HASH_BYTES..]);
        entry[..HASH_BYTES].copy_from_slice(seal.as_bytes());
        entry
    }

    /// Decodes a slot's entry from arbitrary bytes.
    pub(super) fn unseal(&self, slot: StoreSlot, entry: &[u8]) -> StoreEntry {
        match entry.split_first_chunk::<HASH_BYTES>() {
            Some((seal, _)) if *seal == NO_SEAL => StoreEntry::Empty,
            Some((seal, rest)) if self.seal_of(slot, rest) == *seal => self
                .parse(rest)
                .map_or(StoreEntry::Damaged, |(record, payload)| StoreEntry::Block(record, payload)),
            _ => StoreEntry::Damaged,
        }
    }

    fn seal_of(&self, slot: StoreSlot, rest: &[u8]) -> Hash {
        blake3::Hasher::new_keyed(&self.key).update(&slot.0.to_le_bytes()).update(rest).finalize()
    }

    fn parse(&self, rest: &[u8]) -> Option<(BlockRecord, Hash)> {
        let (payload, rest) = rest.split_first_chunk::<HASH_BYTES>()?;
        let (parent, rest) = rest.split_first_chunk::<HASH_BYTES>()?;
        let (sharing, rest) = rest.split_first_chunk::<HASH_BYTES>()?;
        let (owner, rest) = rest.split_first_chunk::<HASH_BYTES>()?;
        let (adapter, rest) = rest.split_first_chunk::<HASH_BYTES>()?;
        let (used_at_s, rest) = rest.split_first_chunk()?;
        let (has_adapter, rest) = rest.split_first_chunk()?;
        let adapter = match u32::from_le_bytes(*has_adapter) {
            0 => None,
            1 => Some(AdapterId(*adapter)),
            _ => return None,
        };
        let (tokens, _) = rest.as_chunks().0.split_at_checked(self.block_tokens)?;
        let record = BlockRecord {
            namespace: Namespace { adapter, sharing: *sharing, owner: TenantId(*owner) },
            parent: Chain(*parent),
            tokens: tokens.iter().map(|token| u32::from_le_bytes(*token)).collect(),
            used_at_s: u64::from_le_bytes(*used_at_s),
        };
        Some((record, Hash::from_bytes(*payload)))
    }
}
