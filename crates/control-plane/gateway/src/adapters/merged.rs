//! Merged adapters: the weighted sums that requests name as `a:0.7+b:0.3`.
//!
//! A merged adapter is not registered, and its adapter version follows from its parts. The executor loads,
//! evicts and uses it like any other adapter. A merged adapter is freed with the first of its parts
//! ([`super::merged_load`]). Only this process remembers it, and the next request for it builds it again.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

use types::AdapterVersion;

use super::{
    database::{Labels, OwnTemplate, Record},
    entry::{AdapterEntry, MergePart},
    errors::{MAX_PARTS, WeightedMergeError},
    store::ContentId,
};
use crate::{
    clock::{now_us, seconds_since_1970},
    lock::lock,
};

const MAX_SUMS: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct MergedAdapters(Mutex<Vec<Arc<AdapterEntry>>>);

impl MergedAdapters {
    pub(super) fn all(&self) -> Vec<Arc<AdapterEntry>> {
        lock(&self.0).clone()
    }

    /// Calls `take` with the known merged adapter equal to `new`, or with `new`, which is then remembered.
    /// Returns the result, and the merged adapter that was forgotten if there were too many. The lock is held
    /// during `take`, so a merged adapter that `take` leases is not forgotten.
    pub(super) fn get_or_insert<T>(
        &self,
        new: AdapterEntry,
        take: impl FnOnce(&Arc<AdapterEntry>) -> T,
    ) -> Result<(T, Option<Arc<AdapterEntry>>), WeightedMergeError> {
        let mut sums = lock(&self.0);
        if let Some(known) = sums.iter().find(|known| known.is_sum_of(&new)) {
            return Ok((take(known), None));
        }
        let forgotten = if sums.len() < MAX_SUMS {
            None
        } else {
            let idle = sums.iter().enumerate().filter(|(_, sum)| sum.requests() == 0);
            let oldest = idle.min_by_key(|(_, sum)| sum.last_used_us()).map(|(index, _)| index);
            Some(sums.swap_remove(oldest.ok_or(WeightedMergeError::Busy(MAX_SUMS))?))
        };
        let new = Arc::new(new);
        let taken = take(&new);
        sums.push(new);
        Ok((taken, forgotten))
    }

    /// Forgets and returns the merged adapters that contain `part`.
    pub(super) fn forget(&self, part: &Arc<AdapterEntry>) -> Vec<Arc<AdapterEntry>> {
        let is_in =
            |sum: &mut Arc<AdapterEntry>| sum.parts().iter().any(|other| Arc::ptr_eq(&other.entry, part));
        lock(&self.0).extract_if(.., is_in).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MergeTerm<'a> {
    pub(super) name: &'a str,
    pub(super) weight: f32,
}

/// Parses an expression; `None` if it can only be a name, without a `+` and without a number after a colon.
pub(super) fn read(asked: &str) -> Result<Option<Vec<MergeTerm<'_>>>, WeightedMergeError> {
    let parts: Vec<&str> = asked.split('+').collect();
    if parts.len() > MAX_PARTS {
        return Err(WeightedMergeError::TooMany(parts.len()));
    }
    let weighed =
        |part: &&str| part.rsplit_once(':').is_some_and(|(_, weight)| weight.parse::<f32>().is_ok());
    if parts.len() == 1 && !parts.iter().any(weighed) {
        return Ok(None);
    }
    let mut named: Vec<MergeTerm<'_>> = Vec::with_capacity(parts.len());
    for part in parts {
        let one = read_part(part)?;
        if named.iter().any(|other| other.name == one.name) {
            return Err(WeightedMergeError::Twice(one.name.to_owned()));
        }
        named.push(one);
    }
    Ok(Some(named))
}

fn read_part(part: &str) -> Result<MergeTerm<'_>, WeightedMergeError> {
    let (name, weight) = part.rsplit_once(':').unwrap_or((part, "1"));
    if name.is_empty() {
        return Err(WeightedMergeError::NoName);
    }
    match weight.parse::<f32>() {
        // A part with weight 0 would have no effect.
        Ok(weight) if weight.is_normal() => Ok(MergeTerm { name, weight }),
        _ => Err(WeightedMergeError::Weight {
            name: name.to_owned(),
            weight: weight.chars().take(32).collect(),
        }),
    }
}

/// Builds the merged adapter of `parts`, in an order that does not depend on the order of the request.
pub(super) fn sum(mut parts: Vec<MergePart>) -> Result<AdapterEntry, WeightedMergeError> {
    if let Some(other) = parts.iter().find(|part| part.entry.record.rank == 0) {
        return Err(WeightedMergeError::NoRank(other.entry.record.name.clone()));
    }
    parts.sort_by(|a, b| key(a).cmp(&key(b)));
    let mut owners = parts.iter().filter_map(|part| part.entry.record.tenant.clone());
    let tenant = owners.next();
    if owners.any(|owner| Some(owner) != tenant) {
        return Err(WeightedMergeError::Owners);
    }
    let names: Vec<String> = parts.iter().map(name).collect();
    let each = |figure: fn(&Record) -> u64| parts.iter().map(move |part| figure(&part.entry.record));
    let total = |field: fn(&Record) -> u64| each(field).fold(0, u64::saturating_add);
    let generations = parts.iter().map(|part| (part.entry.record.weights(), part.weight.to_bits()));
    let weights = AdapterVersion::of_sum(generations.collect());
    let (generation, template) = OwnTemplate::over(weights, template(&parts)?);
    let record = Record {
        name: names.join("+"),
        tenant,
        // A merged adapter has no files of its own.
        content: ContentId(generation.0),
        generation,
        template,
        rank: u32::try_from(total(|record| record.rank.into())).unwrap_or(u32::MAX),
        bytes: total(|record| record.bytes),
        modules: parts.iter().map(|part| part.entry.record.modules).max().unwrap_or(0),
        draft_layers: 0,
        labels: Labels::default(),
        source: PathBuf::new(),
        loaded_at: seconds_since_1970(),
        last_used_us: now_us(),
        pinned: false,
        version: 0,
        made_by: None,
        expires_at: None,
    };
    Ok(AdapterEntry::new(record).with_parts(parts))
}

/// Returns the chat template that all parts share; `None` if all use the base's.
fn template(parts: &[MergePart]) -> Result<Option<Arc<str>>, WeightedMergeError> {
    let own =
        |part: &MergePart| part.entry.record.template.as_ref().map(|template| Arc::clone(&template.source));
    let first = parts.first().and_then(own);
    if parts.iter().all(|part| own(part) == first) { Ok(first) } else { Err(WeightedMergeError::Templates) }
}

/// Sort key of parts. The name is last, so that equal adapters have a fixed order too.
fn key(part: &MergePart) -> (AdapterVersion, u32, &str) {
    (part.entry.record.weights(), part.weight.to_bits(), &part.entry.record.name)
}

fn name(part: &MergePart) -> String {
    let name = &part.entry.record.name;
    if part.weight == 1.0 { name.clone() } else { format!("{name}:{}", part.weight) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(asked: &str) -> Option<Vec<(&str, f32)>> {
        let named = read(asked).unwrap()?;
        Some(named.into_iter().map(|MergeTerm { name, weight }| (name, weight)).collect())
    }

    #[test]
    fn adapters_are_named_with_their_weights() {
        assert_eq!(named("a+b"), Some(vec![("a", 1.0), ("b", 1.0)]));
        assert_eq!(named("org/a:0.7+b:-.5"), Some(vec![("org/a", 0.7), ("b", -0.5)]));
        assert_eq!(named("a:2"), Some(vec![("a", 2.0)]));
    }

    #[test]
    fn what_can_only_be_a_name_is_no_sum() {
        for name in ["a", "llama3:latest", "other:a", "", ":", "a:b:c"] {
            assert_eq!(read(name), Ok(None), "{name}");
        }
    }

    #[test]
    fn what_is_no_sum_is_refused_in_words() {
        for (asked, says) in [
            ("a+", "no name"),
            ("+a", "no name"),
            (":0.5+b", "no name"),
            ("a:x+b", "'x'"),
            ("a:0+b", "'0'"),
            ("a:nan+b", "'nan'"),
            ("a:inf", "'inf'"),
            ("a:1e+3", "'1e'"),
            ("a+b+a:2", "'a' twice"),
            ("a+b+c+d+e+f+g+h+i", "9 adapters"),
        ] {
            let error = read(asked).unwrap_err().to_string();
            assert!(error.contains(says), "{asked}: {error}");
        }
    }
}
