//! Files of an adapter that arrive in one piece and are hashed on arrival, so that they need no copy.

use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use types::TenantId;

use super::{
    AdapterStore, Incoming, StoreError, Temporary, content::ContentHasher, copy::incoming_below, failed, sync,
};
use crate::{
    adapters::jail::{CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHT_FILE},
    tenant_memory::Reservation,
};

/// Whether an adapter outlives its gateway.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// On disk and in the registry before the load is answered.
    #[default]
    Durable,
    /// In memory alone, until the gateway ends.
    Ephemeral,
}

/// The weights received so far; dropping them removes them.
#[derive(Debug)]
pub(crate) struct PushedWeights {
    owner: TenantId,
    directory: Temporary,
    file: File,
    path: PathBuf,
    hasher: blake3::Hasher,
    bytes: u64,
    limit_bytes: u64,
    /// Memory of an ephemeral adapter; `None` for a durable one.
    reserved: Option<Reservation>,
}

impl AdapterStore {
    /// Begins the weights of an adapter of `tenant`, of about `expected_bytes`.
    ///
    /// # Errors
    /// If the tenant has no memory left for them, or the system refuses.
    pub(crate) fn begin_push(
        &self,
        tenant: Option<&str>,
        durability: Durability,
        expected_bytes: u64,
    ) -> Result<PushedWeights, StoreError> {
        let limit_bytes = self.max_file_bytes;
        if expected_bytes > limit_bytes {
            return Err(StoreError::TooLarge { name: WEIGHT_FILE, limit_bytes });
        }
        let (below, reserved) = match durability {
            Durability::Durable => (&*self.directory, None),
            Durability::Ephemeral => {
                let (below, reserved) = self.ephemeral.begin(tenant, expected_bytes)?;
                (below, Some(reserved))
            }
        };
        let directory = incoming_below(below)?;
        let path = directory.0.join(WEIGHT_FILE);
        let (owner, hasher) = (TenantId::of(tenant), blake3::Hasher::new());
        Ok(PushedWeights {
            owner,
            file: create(&path)?,
            directory,
            path,
            hasher,
            bytes: 0,
            limit_bytes,
            reserved,
        })
    }

    /// Adds the next bytes of the weights. May block.
    ///
    /// # Errors
    /// If the weights exceed a limit, or the system refuses.
    pub(crate) fn extend(&self, weights: &mut PushedWeights, bytes: &[u8]) -> Result<(), StoreError> {
        weights.bytes = weights.bytes.saturating_add(bytes.len() as u64);
        let limit_bytes = weights.limit_bytes;
        if weights.bytes > limit_bytes {
            return Err(StoreError::TooLarge { name: WEIGHT_FILE, limit_bytes });
        }
        self.reserve(weights, 0)?;
        weights.hasher.update(bytes);
        weights.file.write_all(bytes).map_err(failed("writing", &weights.path))
    }

    /// Grows the reservation of ephemeral weights to their bytes and `more`.
    fn reserve(&self, weights: &mut PushedWeights, more: u64) -> Result<(), StoreError> {
        let needed = usize::try_from(weights.bytes.saturating_add(more)).unwrap_or(usize::MAX);
        match &mut weights.reserved {
            Some(reserved) if reserved.bytes() < needed => {
                reserved.resize(needed).map_err(|full| self.ephemeral.refused(full))
            }
            _ => Ok(()),
        }
    }

    /// Ends the weights, and adds the configuration. A durable adapter is on disk when this returns. May
    /// block.
    ///
    /// # Errors
    /// If the configuration exceeds a limit, or the system refuses.
    pub(crate) fn end_push(&self, mut weights: PushedWeights, config: &[u8]) -> Result<Incoming, StoreError> {
        if config.len() as u64 > MAX_CONFIG_BYTES {
            return Err(StoreError::TooLarge { name: CONFIG_FILE, limit_bytes: MAX_CONFIG_BYTES });
        }
        self.reserve(&mut weights, config.len() as u64)?;
        let path = weights.directory.0.join(CONFIG_FILE);
        let mut file = create(&path)?;
        file.write_all(config).map_err(failed("writing", &path))?;
        let mut hasher = match weights.reserved {
            None => ContentHasher::new(weights.owner, 2),
            Some(_) => ContentHasher::ephemeral(weights.owner, 2),
        };
        hasher.add(CONFIG_FILE, config.len() as u64, &blake3::hash(config));
        hasher.add(WEIGHT_FILE, weights.bytes, &weights.hasher.finalize());
        if weights.reserved.is_none() {
            file.sync_all().map_err(failed("syncing", &path))?;
            weights.file.sync_all().map_err(failed("syncing", &weights.path))?;
            sync(&weights.directory.0)?;
        }
        Ok(Incoming {
            content: hasher.finish(),
            bytes: weights.bytes.saturating_add(config.len() as u64),
            directory: weights.directory,
            reserved: weights.reserved.map(Arc::new),
        })
    }
}

fn create(path: &Path) -> Result<File, StoreError> {
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    created.map_err(failed("creating", path))
}
