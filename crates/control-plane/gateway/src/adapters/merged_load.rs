//! Sums of adapters leased, and freed with what they are made of.

use std::sync::Arc;

use super::{
    entry::{AdapterEntry, Lease, MergePart},
    errors::{LeaseError, WeightedMergeError},
    merged::{self, MergeTerm},
    registry::Registry,
};
use crate::caller::Caller;

impl Registry {
    /// As [`lease`](Self::lease), where `asked` may also name a sum of adapters: `a+b`, each with a colon and a weight behind it if
    /// that is not 1. What is registered under that very name comes first.
    ///
    /// # Errors
    /// As there, and if they do not add up.
    pub fn lease_any(self: &Arc<Self>, asked: &str, caller: &Caller) -> Result<Option<Lease>, LeaseError> {
        if let Some(lease) = self.lease(asked, caller)? {
            return Ok(Some(lease));
        }
        let Some(named) = merged::read(asked)? else { return Ok(None) };
        let is_alone = named.len() == 1;
        // Held until the sum's own lease holds them: so none of them goes in between.
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

    /// Forgets the sums that `part` is in, which nobody leases any more, and frees them; returns the bytes freed.
    pub(super) async fn free_sums_of(&self, part: &Arc<AdapterEntry>) -> u64 {
        let mut freed = 0;
        for sum in self.sums.forget(part) {
            freed += self.free_everywhere(&sum).await;
        }
        freed
    }
}
