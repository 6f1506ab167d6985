//! The linear layers of a model in memory, by site, for bases of any architecture.

use std::sync::Arc;

use kernels::{
    ActivationForms, Activations, LinearPart, PackedMatrix, Rounding, SumFrom, linear, linear_bf16,
    linear_transposed, linear_transposed_bf16, linear_transposed_rounded, linear_unrounded,
};

use crate::{
    cpu::Compute,
    linear_sites::{Arithmetic, Site, SiteCall, SiteId, SiteOp, SitePart, SitePath},
    precision::{BaseNumerics, Precision},
    shape::{
        config::ModelConfig,
        layout::{LinearGroup, model_groups},
    },
    weights::modular,
};

#[derive(Debug, Clone)]
pub(crate) struct Linear {
    pub(crate) name: String,
    /// Matrix of shape `[out, in]`, shared if two layers have the same weights.
    pub(crate) matrix: Arc<PackedMatrix>,
    /// Bias of shape `[out]`.
    pub(crate) bias: Option<Vec<f32>>,
}

/// All sites of a model, with their weights.
#[derive(Debug)]
pub struct SiteWeights {
    sites: Vec<Site>,
    layers: Vec<Vec<Linear>>,
    /// Linear groups of the sites; empty for unknown architectures.
    groups: Vec<LinearGroup>,
}

impl SiteWeights {
    /// Takes the linear layers of each site; layers of one site have the same input. For a known
    /// architecture, `config` names the sites' linear groups.
    pub(crate) fn new(layers: Vec<Vec<Linear>>, config: Option<&ModelConfig>) -> Self {
        let groups: Vec<LinearGroup> =
            config.into_iter().flat_map(model_groups).map(|(_, group)| group).collect();
        let mut sites: Vec<_> = layers.iter().map(|layers| site(layers)).collect();
        Precision::default().apply(&mut sites, &groups);
        Self { sites, layers, groups }
    }

    pub(crate) fn set_precision(&mut self, precision: Precision) {
        precision.apply(&mut self.sites, &self.groups);
    }

    /// Reads and hashes all weights, and gives every eligible site a modular path with a commitment to its
    /// weights. Only executors that serve split clients need this.
    pub fn commit(&mut self, compute: &mut Compute) {
        let sites = self.layers.iter().map(|site| site.iter().map(|linear| &*linear.matrix).collect());
        let rings = modular::ring_sites(compute, &sites.collect::<Vec<_>>());
        for (site, ring) in self.sites.iter_mut().zip(rings) {
            site.ring = ring;
        }
    }

    /// Returns all sites, in order.
    #[must_use]
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    pub(crate) fn of(&self, site: SiteId) -> &[Linear] {
        &self.layers[site.0 as usize]
    }

    /// Returns the bytes of memory; shared weights count once for each layer.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layers.iter().flatten().map(|linear| linear.matrix.bytes()).sum()
    }

    /// Returns the rounding of the layers, which decides the data types of adapters and KV cache.
    #[must_use]
    pub fn numerics(&self) -> BaseNumerics {
        BaseNumerics::of(&self.sites)
    }

    /// Evaluates `call` for all rows of `x` and writes the results to `out`.
    ///
    /// # Panics
    /// If the shapes do not match the site, or a modular call has a bias or meets a site without that path.
    pub fn evaluate(&self, compute: &mut Compute, call: SiteCall, x: &mut Activations, out: &mut [f32]) {
        let site = &self.sites[call.site.0 as usize];
        evaluate(compute, site, call, x, &self.parts(call), SumFrom::Zero, out);
    }

    /// Returns the layers of `call`, each with the first column of its outputs.
    fn parts(&self, call: SiteCall) -> Vec<LinearPart<'_>> {
        let layers = &self.layers[call.site.0 as usize];
        let layers = match call.part {
            None => &layers[..],
            Some(part) => std::slice::from_ref(&layers[usize::from(part)]),
        };
        let mut parts = Vec::with_capacity(layers.len());
        let mut column = 0;
        for linear in layers {
            let bias = linear.bias.as_deref().filter(|_| call.op == SiteOp::Forward);
            parts.push(LinearPart { matrix: &linear.matrix, bias, column });
            column += linear.matrix.rows();
        }
        parts
    }
}

/// Returns whether a call multiplies its rows as tiles of bf16, so that it needs no other form of them.
pub(crate) fn multiplies_tiles(site: &Site, call: SiteCall) -> bool {
    site.arithmetic == Arithmetic::Bf16 && call.path == SitePath::Fast && call.op != SiteOp::Backward
}

/// Evaluates `call` at `site` for all rows of `x` with `parts` of the site, and writes the results to `out`.
/// If the site's weights come in several pieces, gradients continue `from` the sums so far.
///
/// # Panics
/// For the reasons of [`SiteWeights::evaluate`].
pub(crate) fn evaluate(
    compute: &mut Compute,
    site: &Site,
    call: SiteCall,
    x: &mut Activations,
    parts: &[LinearPart<'_>],
    from: SumFrom,
    out: &mut [f32],
) {
    let (inputs, outputs) = site.words(call).expect("the site has the part");
    assert_eq!(x.width(), inputs, "rows are as wide as what goes in");
    let rows = x.rows();
    let out = &mut out[..rows * outputs];
    if call.path == SitePath::Ring {
        return modular::evaluate(compute, site, call, x.values(), parts, from, out);
    }
    let Compute { pool, isa } = compute;
    match call {
        SiteCall { op: SiteOp::Backward, path: SitePath::Fast, .. }
            if site.arithmetic == Arithmetic::Bf16 =>
        {
            linear_transposed_bf16(pool, *isa, x, parts, from, out);
        }
        SiteCall { op: SiteOp::Backward, path: SitePath::Fast, .. } if !site.fast_is_linear => {
            linear_transposed_rounded(pool, *isa, x.values(), rows, inputs, parts, from, out);
        }
        SiteCall { op: SiteOp::Backward, .. } => {
            linear_transposed(pool, *isa, x.values(), rows, inputs, parts, from, out);
        }
        _ => {
            let forms =
                parts.iter().fold(ActivationForms::default(), |forms, part| forms.and(part.matrix.forms()));
            match site.arithmetic {
                Arithmetic::Bf16 if multiplies_tiles(site, call) => {
                    x.prepare(pool, *isa, ActivationForms::BF16_TILES, Rounding::INT8);
                    return linear_bf16(pool, *isa, x, parts, out, outputs);
                }
                Arithmetic::Quantized(rounding) if call.path == SitePath::Fast => {
                    x.prepare(pool, *isa, forms, rounding);
                }
                // Without rounding both ways give the same bits, and this one is faster.
                _ if forms != ActivationForms::default() => {
                    return linear_unrounded(pool, *isa, x, parts, out, outputs);
                }
                _ => {}
            }
            linear(pool, *isa, x, parts, out, outputs);
        }
    }
}

fn site(layers: &[Linear]) -> Site {
    let part = |linear: &Linear| SitePart {
        name: linear.name.clone(),
        rows: linear.matrix.rows(),
        has_bias: linear.bias.is_some(),
    };
    Site {
        columns: layers.first().map_or(0, |linear| linear.matrix.columns()),
        parts: layers.iter().map(part).collect(),
        fast_is_linear: layers.iter().all(|linear| linear.matrix.is_exact()),
        arithmetic: Arithmetic::Unrounded,
        ring: None,
    }
}
