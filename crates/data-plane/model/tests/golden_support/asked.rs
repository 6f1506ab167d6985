//! Golden adapters of every method, prepared for a pass: also several at once, and methods that need the
//! base's weights.

use std::path::Path;

use kernels::lora::LoraPrecision;
use model::{
    adapter::{Adapter, AnyAdapter, Scales, VocabularyChanges, merge::sum},
    deltas::prepared::{EncodedAdapter, PreparedAdapter},
    resident::LoadedWeights,
    shape::config::ModelConfig,
    sources::open::open,
};

pub(crate) struct GoldenAdapter {
    pub(crate) adapter: Adapter,
    /// Scales of the base's outputs, for a DoRA, or biases.
    pub(crate) scales: Option<Scales>,
    pub(crate) vocabulary: Option<VocabularyChanges>,
}

impl From<Adapter> for GoldenAdapter {
    fn from(adapter: Adapter) -> Self {
        Self { adapter, scales: None, vocabulary: None }
    }
}

impl GoldenAdapter {
    pub(crate) fn of(model: &Path, adapter: AnyAdapter) -> Self {
        match adapter {
            AnyAdapter::Answers(adapter) => adapter.into(),
            AnyAdapter::Classifies(it) => it.adapter.into(),
            AnyAdapter::Vocabulary(it) => Self { vocabulary: Some(it.changes), ..it.adapter.into() },
            AnyAdapter::Biased(it) => Self { scales: Some(it.biases), ..it.adapter.into() },
            AnyAdapter::Decomposed(dora) => {
                let source = open(model).unwrap();
                let base = LoadedWeights::open(&*source, None, 1, &|_| {}).unwrap().shared();
                let layer = |layer, target| base.linear_layer(layer, target);
                let (adapter, scales) = dora.over(base.config(), layer).unwrap();
                Self { scales: Some(scales), ..adapter.into() }
            }
            AnyAdapter::Drafts(_) => panic!("a draft answers nobody"),
        }
    }

    pub(crate) fn prepared(self, config: &ModelConfig, precision: LoraPrecision) -> PreparedAdapter {
        let encoded = EncodedAdapter::new(&self.adapter, config, precision);
        let encoded = match (self.scales, self.vocabulary) {
            (Some(scales), _) => encoded.with_scales(scales),
            (None, Some(changes)) => encoded.with_vocabulary(changes),
            (None, None) => encoded,
        };
        PreparedAdapter::of(encoded, config).unwrap()
    }
}

/// Sum of golden adapters in the folder `adapters` that `asked` names.
pub(crate) fn summed(adapters: &Path, asked: &str, config: &ModelConfig) -> Adapter {
    let part = |part: &str| {
        let (name, weight) = part.split_once(':').unwrap_or((part, "1"));
        (AnyAdapter::read(&adapters.join(name), config).unwrap(), weight.parse().unwrap())
    };
    sum(asked.split('+').map(part).collect()).unwrap()
}
