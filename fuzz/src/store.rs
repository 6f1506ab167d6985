//! Target for KV blocks that an earlier process left in a file.

use kv_cache::store::{BlockStore, StoreContents, StoreError, StoreLayout};

use crate::{
    Outcome,
    targets::{folder, refused},
};

pub(crate) const LAYOUT: StoreLayout =
    StoreLayout { fingerprint: [7; 32], block_bytes: 64, block_tokens: 2, slots: 4 };

/// Opens the file; every listed block can be read or is reported as damaged.
pub(crate) fn file(input: &[u8]) -> Outcome {
    let folder = folder(&[("blocks", input)]);
    let opened = BlockStore::open(&folder.path().join("blocks"), &LAYOUT).map_err(refused)?;
    for (slot, record) in &opened.blocks {
        match opened.store.read(*slot, record, &mut [0; LAYOUT.block_bytes]) {
            Ok(()) | Err(StoreError::Damaged(_)) => {}
            Err(error) => panic!("{slot:?}: {error}"),
        }
    }
    match opened.found {
        StoreContents::Same => Ok(()),
        found => Err(format!("begun anew: {found:?}")),
    }
}
