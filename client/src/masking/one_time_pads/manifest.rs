//! The manifest of a pool: the weights of its pads, and the journal that belongs to it.
//!
//! ```text
//! magic [u8; 8] | sites u64 | commitment of the weights [u8; 32] | identity of the journal u64 |
//! random [u8; 32] | for each site: columns u32, outputs u32, bytes of a number forward u32 and
//! backward u32 | BLAKE3 of all before [u8; 32]
//! ```

use std::{
    fs::{self, File},
    path::Path,
};

use kernels::Modulus;

use super::shape::PadShape;
use crate::error::PoolError;

/// Magic number of a manifest; the last letter is the version.
const MAGIC: &[u8; 8] = b"HOLOPAD3";

const MAX_SITES: usize = 1 << 16;

/// Bytes of a manifest before the sites, per site, and after them.
const HEAD_BYTES: usize = 8 + 8 + 32 + 8 + 32;
const SITE_BYTES: usize = 4 * 4;
const HASH_BYTES: usize = 32;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) commitment: [u8; 32],
    pub(super) identity: u64,
    /// Random number that distinguishes the pool from all others.
    pub(super) random: [u8; 32],
    pub(super) shapes: Vec<PadShape>,
}

impl Manifest {
    /// Writes the manifest into the directory of a pool, atomically.
    pub(super) fn write(&self, path: &Path) -> Result<(), PoolError> {
        let name = path.join("manifest");
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.shapes.len() as u64).to_le_bytes());
        bytes.extend(self.commitment);
        bytes.extend(self.identity.to_le_bytes());
        bytes.extend(self.random);
        for PadShape { columns, outputs, moduli } in &self.shapes {
            let number_bytes = moduli.map(|modulus| modulus.bits() / 8);
            let words = [*columns, *outputs].into_iter().chain(number_bytes);
            bytes.extend(words.flat_map(u32::to_le_bytes));
        }
        bytes.extend(blake3::hash(&bytes).as_bytes());
        let begun = path.join("manifest.new");
        let written = fs::write(&begun, &bytes).and_then(|()| File::open(&begun)?.sync_all());
        let named = written.and_then(|()| fs::rename(&begun, &name));
        named.and_then(|()| File::open(path)?.sync_all()).map_err(|source| PoolError::io(&name, source))
    }

    pub(super) fn read(path: &Path) -> Result<Self, PoolError> {
        let name = path.join("manifest");
        let failed = |source| PoolError::io(&name, source);
        let most = HEAD_BYTES + SITE_BYTES * MAX_SITES + HASH_BYTES;
        if fs::metadata(&name).map_err(failed)?.len() > most as u64 {
            return Err(PoolError::corrupt(&name, "it is too long"));
        }
        let bytes = fs::read(&name).map_err(failed)?;
        let (name_of_all, version) = MAGIC.split_at(MAGIC.len() - 1);
        if bytes.strip_prefix(name_of_all).is_some_and(|rest| !rest.starts_with(version)) {
            return Err(PoolError::corrupt(&name, "it is of another version"));
        }
        Self::from_bytes(&bytes).ok_or_else(|| PoolError::corrupt(&name, "it does not fit its hash"))
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (body, hash) = bytes.split_last_chunk::<HASH_BYTES>()?;
        if blake3::hash(body).as_bytes() != hash {
            return None;
        }
        let (magic, rest) = body.split_first_chunk::<8>()?;
        let (sites, rest) = rest.split_first_chunk::<8>()?;
        let (&commitment, rest) = rest.split_first_chunk::<32>()?;
        let (identity, rest) = rest.split_first_chunk::<8>()?;
        let (&random, shapes) = rest.split_first_chunk::<32>()?;
        let modulus = |bytes: u32| Modulus::ALL.into_iter().find(|modulus| modulus.bits() == 8 * bytes);
        let shape = |words: &[[u8; 4]; 4]| {
            let [columns, outputs, forward, backward] = words.map(u32::from_le_bytes);
            Some(PadShape { columns, outputs, moduli: [modulus(forward)?, modulus(backward)?] })
        };
        let shapes = shapes.as_chunks::<4>().0.as_chunks::<4>().0.iter().map(shape);
        let shapes: Vec<PadShape> = shapes.collect::<Option<_>>()?;
        let is_whole = magic == MAGIC && u64::from_le_bytes(*sites) == shapes.len() as u64;
        is_whole.then_some(Self { commitment, identity: u64::from_le_bytes(*identity), random, shapes })
    }
}
