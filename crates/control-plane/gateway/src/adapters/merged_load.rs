//! Leases merged adapters, and frees them with their parts.

use std::sync::Arc;

use super::{
    entry::{AdapterEntry, Lease, MergePart},
    errors::{LeaseError, WeightedMergeError},
    merged::{self, MergeTerm},
    registry::Registry,
};
use crate::caller::Caller;

impl Registry {
    /// Like [`lease`](Self::lease), but `asked` may also name a merged adapter, such as `a+b` or `a:0.7+b`.
    /// An adapter registered under exactly that name takes precedence.
    ///
    /// # Errors
    /// Fails as [`lease`](Self::lease) does, and if the parts cannot be merged.
    pub(crate) fn lease_any(
        self: &Arc<Self>,
        asked: &str,
        caller: &Caller,
    ) -> Result<Option<Lease>, LeaseError> {
        if let Some(lease) = self.lease(asked, caller)? {
            return Ok(Some(lease));
        }
        let Some(named) = merged::read(asked)? else { return Ok(None) };
        let is_alone = named.len() == 1;
        // These leases last until the merged adapter's lease holds the parts, so no part is freed before.
        let mut held = Vec::with_capacity(named.len());
        for MergeTerm { name, weight } in named {
            match self.lease(name, caller)? {
                Some(lease) => held.push((lease, weight)),
                None if is_alone => return Ok(None),
                None => return Err(WeightedMergeError::Unknown(name.to_owned()).into()),
            }
        }
        if is_alone && held[0].1 == 1.0 {
            return Ok(held.pop().map(|(only, _)| only));
        }
        let part =
            |(lease, weight): &(Lease, f32)| MergePart { entry: Arc::clone(&lease.entry), weight: *weight };
        self.lease_sum(merged::sum(held.iter().map(part).collect())?).map(Some)
    }

    fn lease_sum(self: &Arc<Self>, sum: AdapterEntry) -> Result<Lease, LeaseError> {
        let lease = |entry: &Arc<AdapterEntry>| match entry.fault() {
            Some(reason) => Err(WeightedMergeError::Refused { name: entry.record.name.clone(), reason }),
            None => Ok(entry.lease()),
        };
        let (lease, forgotten) = self.sums.get_or_insert(sum, lease)?;
        if let Some(forgotten) = forgotten {
            let registry = Arc::clone(self);
            tokio::spawn(async move { registry.free_everywhere(&forgotten).await });
        }
        Ok(lease?)
    }

    /// Forgets and frees the merged adapters with `part`, which have no leases. Returns the bytes freed.
    pub(super) async fn free_sums_of(&self, part: &Arc<AdapterEntry>) -> u64 {
        let mut freed = 0;
        for sum in self.sums.forget(part) {
            freed += self.free_everywhere(&sum).await;
        }
        freed
    }
}
