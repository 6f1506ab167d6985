//! Random LoRA adapters, written for either side: a PEFT directory for ours, a GGUF file for the peer.
//!
//! Both hold the same 16-bit values under each side's names. The peer's converter would also permute the rows
//! of q's and k's B for its rotary embedding; that changes the function of a random adapter, but not its
//! work.

mod gguf;
mod peft;

use std::path::Path;

use anyhow::{Context, Result};
use half::f16;
use model::shape::{config::ModelConfig, layout::linear_shape, source::Target};
use model_files::gguf::GgufFile;
use rand::{Rng, SeedableRng, rngs::StdRng};

pub(crate) use gguf::write_gguf;
pub(crate) use peft::{write_peft, write_peft_config};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Projection {
    Q,
    K,
    V,
    O,
}

impl Projection {
    const EACH: [Self; 4] = [Self::Q, Self::K, Self::V, Self::O];

    fn peft(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
        }
    }

    fn gguf(self) -> &'static str {
        match self {
            Self::Q => "attn_q",
            Self::K => "attn_k",
            Self::V => "attn_v",
            Self::O => "attn_output",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AdapterShape {
    architecture: String,
    layers: usize,
    /// Output and input features of q, k, v, o.
    features: [(usize, usize); 4],
}

impl AdapterShape {
    /// Reads the shape from the base model's file.
    ///
    /// # Errors
    /// If the file is not a transformer in GGUF.
    pub(crate) fn of(model: &Path) -> Result<Self> {
        let file = GgufFile::open(model)?;
        let architecture = file.str("general.architecture")?.unwrap_or_default().to_owned();
        let layers = file.usize(&format!("{architecture}.block_count"))?.unwrap_or_default();
        let mut features = [(0, 0); 4];
        for (projection, features) in Projection::EACH.into_iter().zip(&mut features) {
            let name = format!("blk.0.{}.weight", projection.gguf());
            let tensor = file
                .tensor(&name)
                .with_context(|| format!("{} has no tensor {name}; adapters need it", model.display()))?;
            *features = (tensor.rows(), tensor.cols());
        }
        Ok(Self { architecture, layers, features })
    }

    pub(crate) fn of_config(config: &ModelConfig) -> Self {
        let features = [Target::Q, Target::K, Target::V, Target::O].map(|target| {
            let [rows, columns] = linear_shape(config, target);
            (rows, columns)
        });
        Self { architecture: config.architecture.clone(), layers: config.layers, features }
    }

    /// Number of layers, and the sum of input and output features of a layer's `projections`.
    pub(crate) fn layers_and_sides(&self, projections: &[Projection]) -> (usize, usize) {
        let sides = Projection::EACH.into_iter().zip(self.features);
        let adapted = sides.filter(|(projection, _)| projections.contains(projection));
        (self.layers, adapted.map(|(_, (rows, cols))| rows + cols).sum())
    }
}

/// Matrix in row-major order.
#[derive(Debug, Clone, PartialEq)]
struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f16>,
}

impl Matrix {
    fn random(rows: usize, cols: usize, bound: f32, random: &mut StdRng) -> Self {
        let values = (0..rows * cols).map(|_| f16::from_f32(random.random_range(-bound..bound))).collect();
        Self { rows, cols, values }
    }

    fn bytes(&self) -> Vec<u8> {
        self.values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }
}

#[derive(Debug, Clone, PartialEq)]
struct AdaptedLayer {
    layer: usize,
    projection: Projection,
    /// Shape `[rank, in]`, row-major.
    a: Matrix,
    /// Shape `[out, rank]`, row-major.
    b: Matrix,
}

/// Adapter of some or all of q, k, v and o in every layer, scaled by alpha / rank = 1.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RandomAdapter {
    architecture: String,
    rank: usize,
    modules: Vec<AdaptedLayer>,
}

impl RandomAdapter {
    /// Returns the adapter of `seed`: its values are small, so that the text stays the same, and never zero.
    pub(crate) fn random(shape: &AdapterShape, rank: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let modules = (0..shape.layers)
            .flat_map(|layer| {
                Projection::EACH.into_iter().zip(shape.features).map(move |module| (layer, module))
            })
            .map(|(layer, (projection, (rows, cols)))| AdaptedLayer {
                layer,
                projection,
                a: Matrix::random(rank, cols, 0.05, &mut random),
                b: Matrix::random(rows, rank, 0.01, &mut random),
            })
            .collect();
        Self { architecture: shape.architecture.clone(), rank, modules }
    }

    pub(crate) fn on(mut self, projections: &[Projection]) -> Self {
        self.modules.retain(|module| projections.contains(&module.projection));
        self
    }

    fn adapted(&self) -> impl Iterator<Item = Projection> {
        let has = |projection| self.modules.iter().any(move |module| module.projection == projection);
        Projection::EACH.into_iter().filter(move |&projection| has(projection))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.modules.iter().map(|module| 2 * (module.a.values.len() + module.b.values.len()) as u64).sum()
    }
}

#[cfg(test)]
pub(super) fn sample() -> RandomAdapter {
    let features = [(6, 4), (2, 4), (2, 4), (4, 6)];
    RandomAdapter::random(&AdapterShape { architecture: "llama".to_owned(), layers: 3, features }, 2, 7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_has_four_modules_in_each_layer_and_depends_on_its_seed() {
        let adapter = sample();
        assert_eq!(adapter.modules.len(), 12);
        assert_eq!(adapter.bytes(), 3 * 2 * 2 * (10 + 6 + 6 + 10));
        assert_eq!(adapter, sample());
        let shape = AdapterShape { architecture: "llama".to_owned(), layers: 3, features: [(6, 4); 4] };
        assert_ne!(RandomAdapter::random(&shape, 2, 1).modules, RandomAdapter::random(&shape, 2, 2).modules);
    }
}
