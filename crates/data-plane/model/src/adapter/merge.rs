//! Weighted sums of LoRAs.
//!
//! `sum_i w_i s_i B_i A_i` is again a LoRA: the rows of all `A_i` stacked, the columns of all `B_i` side by
//! side, and the ranks added up. Nothing is approximated. If all `w_i s_i` of a layer are equal, they become
//! its scale, so 16-bit factors stay as they are; otherwise each is multiplied into its `A_i`.

use std::{cmp::Ordering, collections::BTreeMap};

use types::AdapterVersion;

use super::{
    kind::AdapterKind,
    limits::MAX_RANK,
    method::{Adapter, AnyAdapter, LoraModule, MethodWeights},
};
use crate::sources::hf_names::module_name;

/// Reasons why adapters cannot be merged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AdapterMergeError {
    /// The list of adapters is empty.
    #[error("no adapter is named")]
    Nothing,
    /// One adapter is no plain LoRA.
    #[error("one of them has the kind {0}, but only LoRAs can be merged; remove it")]
    Kind(AdapterKind),
    /// One adapter is a draft adapter.
    #[error("one of them is a draft adapter, which cannot be merged; remove it")]
    Draft,
    /// The sum of the ranks exceeds the limit.
    #[error(
        "the sum of their ranks at `{module}` is {rank}, and the limit is {MAX_RANK}; name fewer adapters"
    )]
    Rank {
        /// Name of the layer.
        module: String,
        /// Sum of all ranks.
        rank: usize,
    },
    /// A weighted value is infinite or not a number.
    #[error("with these weights, values of `{module}` are too large; choose smaller weights")]
    Overflow {
        /// Name of the layer.
        module: String,
    },
}

/// The change of a linear layer by one LoRA: `scale * B A`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors<'a> {
    /// Number of rows of A.
    pub rank: usize,
    /// Factor of the product `B A`.
    pub scale: f32,
    /// Matrix A, shape `[rank, in]`.
    pub a: &'a [f32],
    /// Matrix B, shape `[out, rank]`.
    pub b: &'a [f32],
}

/// The weighted sum of several [`Factors`], with owned matrices.
#[derive(Debug, Clone, PartialEq)]
pub struct ConcatenatedFactors {
    /// Number of rows of A.
    pub rank: usize,
    /// Factor of the product `B A`.
    pub scale: f32,
    /// Matrix A, shape `[rank, in]`.
    pub a: Vec<f32>,
    /// Matrix B, shape `[out, rank]`.
    pub b: Vec<f32>,
    /// Whether all values equal the stored ones.
    pub is_verbatim: bool,
}

/// Adds up the weighted changes of the layer `module`; `parts` must not be empty. Order changes no bit.
///
/// # Errors
/// See [`AdapterMergeError`].
pub fn join(
    module: &str,
    mut parts: Vec<(Factors<'_>, f32)>,
) -> Result<ConcatenatedFactors, AdapterMergeError> {
    parts.sort_by(in_order);
    let rank = parts.iter().map(|(factors, _)| factors.rank).sum();
    if rank > MAX_RANK {
        return Err(AdapterMergeError::Rank { module: module.to_owned(), rank });
    }
    let shares: Vec<f32> = parts.iter().map(|(factors, weight)| factors.scale * weight).collect();
    let is_verbatim = shares.iter().all(|share| share == &shares[0]);
    let scale = if is_verbatim { shares[0] } else { 1.0 };
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for ((factors, _), share) in parts.iter().zip(&shares) {
        let times = if is_verbatim { 1.0 } else { *share };
        a.extend(factors.a.iter().map(|number| number * times));
    }
    let rows = parts.first().map_or(0, |(first, _)| first.b.len() / first.rank);
    for row in 0..rows {
        for (factors, _) in &parts {
            b.extend(&factors.b[row * factors.rank..][..factors.rank]);
        }
    }
    if scale.is_finite() && a.iter().all(|number| number.is_finite()) {
        return Ok(ConcatenatedFactors { rank, scale, a, b, is_verbatim });
    }
    Err(AdapterMergeError::Overflow { module: module.to_owned() })
}

/// Total order of parts by their contents, so that the order of arguments does not matter.
fn in_order((one, its): &(Factors<'_>, f32), (other, others): &(Factors<'_>, f32)) -> Ordering {
    let first = (one.rank, its.to_bits(), one.scale.to_bits()).cmp(&(
        other.rank,
        others.to_bits(),
        other.scale.to_bits(),
    ));
    first.then_with(|| bits(one.a).cmp(bits(other.a))).then_with(|| bits(one.b).cmp(bits(other.b)))
}

fn bits(numbers: &[f32]) -> impl Iterator<Item = u32> {
    numbers.iter().map(|number| number.to_bits())
}

/// Adds up adapters of one base, each times its weight. The order of `parts` changes no bit of the result.
///
/// # Errors
/// See [`AdapterMergeError`].
pub fn sum(parts: Vec<(AnyAdapter, f32)>) -> Result<Adapter, AdapterMergeError> {
    if parts.is_empty() {
        return Err(AdapterMergeError::Nothing);
    }
    let (mut named, mut adapters) = (Vec::new(), Vec::new());
    let mut stored_in_16_bits = true;
    for (part, weight) in parts {
        let adapter = match part {
            AnyAdapter::Drafts(_) => return Err(AdapterMergeError::Draft),
            AnyAdapter::Answers(adapter) => adapter,
            other => return Err(AdapterMergeError::Kind(other.kind())),
        };
        let MethodWeights::Lora(modules) = adapter.method else {
            return Err(AdapterMergeError::Kind(adapter.method.kind()));
        };
        named.push((adapter.generation, weight.to_bits()));
        stored_in_16_bits &= adapter.stored_in_16_bits;
        adapters.push((modules, weight));
    }
    let mut places: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (modules, weight) in &adapters {
        for module in modules {
            places.entry((module.layer, module.target)).or_default().push((factors(module), *weight));
        }
    }
    let mut modules = Vec::with_capacity(places.len());
    for ((layer, target), parts) in places {
        let ConcatenatedFactors { rank, scale, a, b, is_verbatim } =
            join(&module_name(layer, target), parts)?;
        stored_in_16_bits &= is_verbatim;
        modules.push(LoraModule { layer, target, rank, scale, a, b });
    }
    let generation = AdapterVersion::of_sum(named);
    Ok(Adapter { generation, method: MethodWeights::Lora(modules), base_model: None, stored_in_16_bits })
}

fn factors(module: &LoraModule) -> Factors<'_> {
    Factors { rank: module.rank, scale: module.scale, a: &module.a, b: &module.b }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `scale * B A`, shape `[out, in]`, in 64 bits.
    fn product(factors: Factors<'_>) -> Vec<f64> {
        let Factors { rank, scale, a, b } = factors;
        let inputs = a.len() / rank;
        let element = |row: usize, column: usize| {
            (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * inputs + column])).sum::<f64>()
        };
        let all = (0..b.len() / rank).flat_map(|row| (0..inputs).map(move |column| (row, column)));
        all.map(|(row, column)| f64::from(scale) * element(row, column)).collect()
    }

    fn numbers(count: usize, salt: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + salt * 11) % 19) as f32 / 8.0 - 1.0).collect()
    }

    #[test]
    fn a_sum_of_factors_is_the_sum_of_their_products() {
        let (a1, b1, a2, b2) = (numbers(2 * 5, 1), numbers(3 * 2, 2), numbers(4 * 5, 3), numbers(3 * 4, 4));
        let one = Factors { rank: 2, scale: 0.5, a: &a1, b: &b1 };
        let two = Factors { rank: 4, scale: 2.0, a: &a2, b: &b2 };
        for (weights, is_verbatim) in [([0.75, -0.25], false), ([4.0, 1.0], true)] {
            let joined = join("m", vec![(one, weights[0]), (two, weights[1])]).unwrap();
            assert_eq!(join("m", vec![(two, weights[1]), (one, weights[0])]).as_ref(), Ok(&joined));
            assert_eq!((joined.rank, joined.is_verbatim), (6, is_verbatim));
            let ConcatenatedFactors { rank, scale, a, b, .. } = &joined;
            let sum = product(Factors { rank: *rank, scale: *scale, a, b });
            let expected = product(one).into_iter().zip(product(two));
            let expected = expected.map(|(x, y)| x * f64::from(weights[0]) + y * f64::from(weights[1]));
            // The values have few bits, so no result is rounded.
            assert_eq!(sum, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_too_much_together_is_refused_by_the_layers_name() {
        let (a, b) = (vec![1.0; 600], vec![1.0; 600]);
        let half = Factors { rank: 600, scale: 1.0, a: &a, b: &b };
        assert_eq!(
            join("m", vec![(half, 1.0), (half, 1.0)]),
            Err(AdapterMergeError::Rank { module: "m".to_owned(), rank: 1200 })
        );
        let large = Factors { scale: f32::MAX, ..half };
        assert_eq!(
            join("m", vec![(large, 2.0)]),
            Err(AdapterMergeError::Overflow { module: "m".to_owned() })
        );
    }
}
