//! Combinations of LoRAs other than their exact sum, as PEFT's `add_weighted_adapter` makes them, and LoRAs
//! of fewer ranks.

use std::collections::BTreeMap;

use kernels::TensorType;

use super::{
    by_name::{MergeError, NamedLora, NamedModule, merged},
    limits::MAX_RANK,
    method::{Adapter, LoraModule},
    product::LowRankProduct,
    svd::OuterProducts,
    torch_random::TorchGenerator,
};
use crate::{
    shape::{config::ModelConfig, layout::linear_shape},
    sources::{
        fused::Fused,
        hf_names::{fused_module_name, module_name},
    },
};

/// How values of several adapters become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CombinationMethod {
    /// The exact sum: ranks side by side.
    Cat,
    /// The sum of the factors, which is not the sum of their products.
    Linear,
    /// The exact sum, cut to fewer ranks by its singular values.
    Svd,
    /// Sums of the largest values with the majority's sign.
    Ties,
    /// Sums of randomly chosen values.
    DareLinear,
    /// Sums of randomly chosen values with the majority's sign.
    DareTies,
    /// Sums of the largest values.
    MagnitudePrune,
}

impl CombinationMethod {
    /// All methods with PEFT's names.
    pub const NAMED: [(&str, Self); 7] = [
        ("cat", Self::Cat),
        ("linear", Self::Linear),
        ("svd", Self::Svd),
        ("ties", Self::Ties),
        ("dare_linear", Self::DareLinear),
        ("dare_ties", Self::DareTies),
        ("magnitude_prune", Self::MagnitudePrune),
    ];
}

/// How the majority's sign is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MajoritySign {
    /// The sign of the sum of the values.
    Total,
    /// The sign of most values.
    Frequency,
}

impl MajoritySign {
    /// All ways with PEFT's names.
    pub const NAMED: [(&str, Self); 2] = [("total", Self::Total), ("frequency", Self::Frequency)];
}

/// A combination with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Combination {
    /// How values become one.
    pub method: CombinationMethod,
    /// Ranks of [`CombinationMethod::Svd`]; `None` for the largest rank of the parts.
    pub rank: Option<usize>,
    /// Share of the values that pruning keeps.
    pub density: f64,
    /// How the majority's sign is found.
    pub sign: MajoritySign,
    /// Seed of random choices.
    pub seed: u64,
}

/// The largest loss of a conversion to fewer ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct TruncationLoss {
    /// Name of the layer.
    pub module: String,
    /// Norm of the missing part, as a share of the norm of the layer's change.
    pub error: f64,
}

impl NamedLora {
    /// Combines `parts`, each with its weight. The result has the scale 1 in each layer, except for `cat`.
    ///
    /// # Errors
    /// See [`MergeError`].
    pub fn combine(parts: &[(Self, f32)], combination: &Combination) -> Result<Self, MergeError> {
        let mut generator = TorchGenerator::new(combination.seed);
        match combination.method {
            CombinationMethod::Cat => Self::merge(parts),
            CombinationMethod::Svd => Self::merge_modules(parts, &mut |name, parts| {
                let largest = parts.iter().map(|(module, _)| module.rank).max().unwrap_or(1);
                let rank = combination.rank.unwrap_or(largest).clamp(1, MAX_RANK);
                Ok(merged(name, parts)?.truncated(rank).0)
            }),
            _ => {
                Self::merge_modules(parts, &mut |name, parts| mixed(name, parts, combination, &mut generator))
            }
        }
    }

    /// Returns the adapter with at most `rank` ranks in each layer, and the largest loss, if there is one.
    #[must_use]
    pub fn truncated(&self, rank: usize) -> (Self, Option<TruncationLoss>) {
        let mut worst: Option<TruncationLoss> = None;
        let cut = |(name, module): (&String, &NamedModule)| {
            let (cut, error) = module.truncated(rank);
            if error > worst.as_ref().map_or(0.0, |worst| worst.error) {
                worst = Some(TruncationLoss { module: name.clone(), error });
            }
            (name.clone(), cut)
        };
        let modules = self.modules.iter().map(cut).collect();
        (Self::of_modules(self.base_model.clone(), modules), worst)
    }

    /// Names the layers of an adapter of a base with the shape `config` as PEFT does. Layers that the base's
    /// files fuse become one layer again if the adapter changes all of them by the same inputs.
    #[must_use]
    pub fn of(adapter: &Adapter, config: &ModelConfig) -> Self {
        let mut modules: BTreeMap<String, NamedModule> = BTreeMap::new();
        for module in adapter.modules() {
            let fused = Fused::of(config, module.target).filter(|_| is_one(adapter, config, module));
            let name = match fused {
                Some(fused) => fused_module_name(module.layer, fused.group),
                None => module_name(module.layer, module.target),
            };
            let [outputs, inputs] = linear_shape(config, module.target);
            // Modules are sorted, so the rows of fused layers follow in their order.
            let named = modules.entry(name).or_insert_with(|| NamedModule {
                rank: module.rank,
                scale: module.scale,
                inputs,
                outputs: 0,
                a: module.a.clone(),
                b: Vec::new(),
                magnitude: None,
                kind: TensorType::F32,
            });
            named.outputs += outputs;
            named.b.extend(&module.b);
        }
        Self::of_modules(adapter.base_model.clone(), modules)
    }
}

/// Whether `module` and the other parts of its fused layer have the same inputs.
fn is_one(adapter: &Adapter, config: &ModelConfig, module: &LoraModule) -> bool {
    let Some(fused) = Fused::of(config, module.target) else { return false };
    let group = |other: &&LoraModule| {
        other.layer == module.layer
            && Fused::of(config, other.target).is_some_and(|it| it.group == fused.group)
    };
    let rows: usize =
        adapter.modules().iter().filter(group).map(|it| linear_shape(config, it.target)[0]).sum();
    let same = |other: &LoraModule| other.scale == module.scale && other.a == module.a;
    rows == fused.all_rows && adapter.modules().iter().filter(group).all(same)
}

impl NamedModule {
    /// Returns the nearest change of at most `rank` ranks, and the norm of the rest as a share of the whole.
    fn truncated(&self, rank: usize) -> (Self, f64) {
        if self.rank <= rank {
            return (self.clone(), 0.0);
        }
        let (products, error) = OuterProducts::of(self.rank, &self.a, &self.b).decompose().truncated(rank);
        let LowRankProduct { rank, scale, a, b, .. } = LowRankProduct::of_products(&products, self.scale);
        (Self { rank, scale, a, b, kind: TensorType::F32, ..self.clone() }, error)
    }
}

/// Combines the factors of a layer: the square root of each weight is given to each factor, with the sign at
/// A.
fn mixed(
    name: &str,
    parts: &[(&NamedModule, f32)],
    combination: &Combination,
    generator: &mut TorchGenerator,
) -> Result<NamedModule, MergeError> {
    let (first, _) = parts[0];
    if let Some((other, _)) = parts.iter().find(|(module, _)| module.rank != first.rank) {
        return Err(MergeError::Ranks { module: name.to_owned(), one: first.rank, other: other.rank });
    }
    let root = |module: &NamedModule, weight: f32| f64::from(module.scale * weight).abs().sqrt();
    let sign = |module: &NamedModule, weight: f32| if module.scale * weight < 0.0 { -1.0 } else { 1.0 };
    let of_a =
        parts.iter().map(|(module, weight)| (&module.a[..], sign(module, *weight) * root(module, *weight)));
    let a = mix(&of_a.collect::<Vec<_>>(), combination, generator);
    let of_b = parts.iter().map(|(module, weight)| (&module.b[..], root(module, *weight)));
    let b = mix(&of_b.collect::<Vec<_>>(), combination, generator);
    Ok(NamedModule { scale: 1.0, a, b, kind: TensorType::F32, ..first.clone() })
}

/// Combines tensors of one shape, each with its weight.
fn mix(tensors: &[(&[f32], f64)], combination: &Combination, generator: &mut TorchGenerator) -> Vec<f32> {
    let method = combination.method;
    let pruned: Vec<Vec<f64>> = tensors
        .iter()
        .map(|(values, _)| match method {
            CombinationMethod::Ties | CombinationMethod::MagnitudePrune => {
                largest(values, combination.density)
            }
            CombinationMethod::DareLinear | CombinationMethod::DareTies => {
                chosen(values, combination.density, generator)
            }
            _ => values.iter().copied().map(f64::from).collect(),
        })
        .collect();
    let elects = matches!(method, CombinationMethod::Ties | CombinationMethod::DareTies);
    let weights: Vec<f64> = tensors.iter().map(|(_, weight)| *weight).collect();
    let element = |at: usize| {
        let values: Vec<f64> = pruned.iter().map(|values| values[at]).collect();
        if elects { elected(&values, &weights, combination.sign) } else { weighted(&values, &weights) }
    };
    (0..tensors[0].0.len()).map(element).map(super::product::rounded).collect()
}

fn weighted(values: &[f64], weights: &[f64]) -> f64 {
    values.iter().zip(weights).map(|(value, weight)| value * weight).sum()
}

/// Returns the mean of the weighted values with the majority's sign.
fn elected(values: &[f64], weights: &[f64], sign: MajoritySign) -> f64 {
    let signs = |value: &f64| if *value == 0.0 { 0.0 } else { value.signum() };
    let sum: f64 = match sign {
        MajoritySign::Total => values.iter().sum(),
        MajoritySign::Frequency => values.iter().map(signs).sum(),
    };
    let majority = if sum >= 0.0 { 1.0 } else { -1.0 };
    let agreeing = values.iter().zip(weights).filter(|(value, _)| signs(value) == majority);
    let products: Vec<f64> = agreeing.map(|(value, weight)| value * weight).collect();
    products.iter().sum::<f64>() / (products.len().max(1)) as f64
}

/// Returns the values with the largest magnitudes, and zeros in the place of the others.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "so does PEFT round the number")]
fn largest(values: &[f32], density: f64) -> Vec<f64> {
    let kept = (density * values.len() as f64) as usize;
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&one, &other| values[other].abs().total_cmp(&values[one].abs()));
    let mut pruned = vec![0.0; values.len()];
    order.into_iter().take(kept).for_each(|at| pruned[at] = values[at].into());
    pruned
}

/// Returns randomly chosen values, divided by the probability of the choice, and zeros in the place of the
/// others.
fn chosen(values: &[f32], density: f64, generator: &mut TorchGenerator) -> Vec<f64> {
    if density >= 1.0 {
        return values.iter().copied().map(f64::from).collect();
    }
    let chances = generator.chances(values.len());
    let kept = |(value, chance): (&f32, f32)| {
        if f64::from(chance) < density { f64::from(*value) / density } else { 0.0 }
    };
    values.iter().zip(chances).map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combination(method: CombinationMethod, density: f64) -> Combination {
        Combination { method, rank: None, density, sign: MajoritySign::Total, seed: 7 }
    }

    #[test]
    fn ties_keep_the_largest_values_of_the_majoritys_sign() {
        let (one, two) = ([4.0, -1.0, 3.0, 0.5], [2.0, -5.0, -4.0, 0.1]);
        let mut generator = TorchGenerator::new(0);
        let mut mix = |method| mix(&[(&one, 1.0), (&two, 3.0)], &combination(method, 0.75), &mut generator);
        assert_eq!(mix(CombinationMethod::Ties), [5.0, -8.0, -12.0, 0.0]);
        assert_eq!(mix(CombinationMethod::MagnitudePrune), [10.0, -16.0, -9.0, 0.0]);
        assert_eq!(mix(CombinationMethod::Linear), [10.0, -16.0, -9.0, 0.8]);
    }

    #[test]
    fn random_choices_depend_on_the_seed_and_keep_the_mean() {
        let values = vec![1.0f32; 40_000];
        let draw = |seed| chosen(&values, 0.25, &mut TorchGenerator::new(seed));
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        let mean = draw(3).iter().sum::<f64>() / values.len() as f64;
        assert!((mean - 1.0).abs() < 0.05, "{mean}");
        assert!(draw(3).iter().all(|&value| value == 0.0 || value == 4.0));
        assert_eq!(chosen(&values, 1.0, &mut TorchGenerator::new(3)), vec![1.0; 40_000]);
    }
}
