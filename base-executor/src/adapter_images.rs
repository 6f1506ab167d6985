//! Adapters as sealed images, which the executor and its workers map.

mod registry;

pub use registry::ImageRegistry;

use std::sync::Arc;

use kernels::lora::{LayoutError, SharedBytes};
use model::{
    deltas::{
        matrices::{ImageNumber, ModuleLayout},
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    shape::{config::ModelConfig, layout::BLOCK_TARGETS, source::Target},
};
use shmproto::image::{Image, ImageEntry, ImageError};

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The adapter's scale is not finite.
    #[error("the adapter's values are too large to compute with")]
    Overflow(#[source] LayoutError),
    /// Memory or file descriptors are exhausted.
    #[error("cannot make the adapter's image")]
    Image(#[from] ImageError),
    #[error("the adapter's image differs from what was written")]
    Layout(#[from] LayoutError),
}

/// Moves an adapter into an image and offers the image to workers. An adapter without matrices gets no image,
/// because workers have nothing to compute for it.
///
/// # Errors
/// If memory or descriptors are exhausted, or the scale is not finite.
pub fn publish(
    mut encoded: EncodedAdapter,
    config: &ModelConfig,
    library: &ImageRegistry,
) -> Result<Arc<PreparedAdapter>, PublishError> {
    if let Some(scale) = encoded.scales().find(|scale| !scale.is_finite()) {
        return Err(PublishError::Overflow(LayoutError::Scale(scale)));
    }
    if encoded.modules.is_empty() {
        let nothing: SharedBytes = Arc::new(Vec::new());
        return Ok(Arc::new(PreparedAdapter::over(&encoded, config, ImageNumber::NONE, &nothing)?));
    }
    let entries: Vec<ImageEntry> = encoded.modules.iter().map(entry).collect();
    let image = Image::build(&entries, &encoded.bytes)?;
    encoded.bytes = Vec::new();
    // In the image, the values follow the header and the table.
    for (module, entry) in encoded.modules.iter_mut().zip(image.entries()) {
        module.matrix.a.offset = place(entry.a_offset);
        module.matrix.b.offset = place(entry.b_offset);
    }
    let (number, bytes) = library.publish(&image);
    Ok(Arc::new(PreparedAdapter::over(&encoded, config, number, &bytes)?))
}

/// Returns a linear layer's number in images and on the board: layer times 8 plus index in a block, or 7 for
/// the head. Images and the board have no layers of experts.
#[must_use]
pub(crate) fn module(layer: usize, target: Target) -> u32 {
    let index = target.index_in_block().unwrap_or(BLOCK_TARGETS.len());
    u32::try_from(layer * 8 + index).unwrap_or(u32::MAX)
}

fn entry(module_layout: &ModuleLayout) -> ImageEntry {
    let ModuleLayout { layer, target, matrix } = *module_layout;
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    ImageEntry {
        module: module(layer, target),
        rank: word(matrix.rank),
        columns: word(matrix.columns),
        rows: word(matrix.rows),
        scale: matrix.scale,
        a_kind: matrix.a.kind as u8,
        b_kind: matrix.b.kind as u8,
        a_offset: matrix.a.offset as u64,
        b_offset: matrix.b.offset as u64,
    }
}

/// Converts an offset in a mapped image, which fits the address space.
fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use kernels::lora::LoraPrecision;
    use model::adapter::{Adapter, MethodWeights, Prefix};
    use types::AdapterVersion;

    use super::*;
    use crate::fixtures::square_model;

    #[test]
    fn an_adapter_without_matrices_is_not_offered_to_workers() {
        let config = square_model(64, 1);
        let prefix = Prefix { tokens: 3, layers: 1, width: 64, values: vec![1.0; 3 * 2 * 64] };
        let method = MethodWeights::Prefix(Arc::new(prefix));
        let generation = AdapterVersion([0; 32]);
        let adapter = Adapter { generation, method, base_model: None, stored_in_16_bits: false };
        let library = ImageRegistry::new().unwrap();
        let encoded = EncodedAdapter::new(&adapter, &config, LoraPrecision::Compact);
        let prepared = publish(encoded, &config, &library).unwrap();
        assert!(library.images().is_empty());
        assert_eq!((prepared.virtual_tokens(), prepared.bytes(), prepared.device_bytes()), (3, 1536, 0));
    }
}
