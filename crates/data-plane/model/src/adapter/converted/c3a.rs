//! C3A: the change consists of circulant blocks. `c3a_kernel`, `[out / size, in / size, size]`, has the first
//! row of each block, and every row of a block is the one before, moved by one.

use super::{
    super::{
        error::AdapterError,
        limits::MAX_RANK,
        options::{ConfigOptions, as_count, option_error},
        patterns::ByPattern,
        selection::TrainedLayer,
        weight_file::WeightFile,
    },
    ConversionBudget, ConvertedMethod,
    product::LowRankProduct,
};

#[derive(Debug)]
struct C3a {
    size: usize,
    sizes: ByPattern<usize>,
}

pub(super) fn read(options: &mut ConfigOptions<'_>) -> Result<Box<dyn ConvertedMethod>, AdapterError> {
    let size = options.count("block_size")?.unwrap_or(256);
    Ok(Box::new(C3a { size, sizes: options.by_pattern("block_size_pattern", as_count)? }))
}

impl ConvertedMethod for C3a {
    fn history(&self) -> &'static [&'static str] {
        &["init_weights"]
    }

    fn change(
        &self,
        weights: &mut WeightFile<'_>,
        layer: &TrainedLayer,
        budget: &mut ConversionBudget,
    ) -> Result<Option<LowRankProduct>, AdapterError> {
        let Some([kernel]) = weights.take_layer(layer, ["c3a_kernel"])? else { return Ok(None) };
        let shape @ [outputs, inputs] = layer.shape;
        let problem = |problem| option_error(weights.path(), "block_size", problem);
        let size = self.sizes.get(&layer.written, self.size).map_err(problem)?;
        if size == 0 || outputs % size != 0 || inputs % size != 0 {
            return Err(problem(format!("is {size}, but must divide {outputs} and {inputs}")));
        }
        let kernel = weights.numbers(kernel, &[outputs / size, inputs / size, size])?;
        let rank = outputs.min(inputs);
        if rank > MAX_RANK {
            let (path, module) = (weights.path().to_path_buf(), layer.name.clone());
            return Err(AdapterError::Conversion { path, module, rank });
        }
        budget.check(weights.path(), rank, shape)?;
        let value = |row: usize, column: usize| {
            let block = row / size * (inputs / size) + column / size;
            kernel[block * size + (size + column % size - row % size) % size]
        };
        let matrix = (0..outputs).flat_map(|row| (0..inputs).map(move |column| (row, column)));
        let matrix = matrix.map(|(row, column)| value(row, column)).collect();
        #[expect(clippy::cast_precision_loss, reason = "layers are small")]
        Ok(Some(LowRankProduct::of_matrix(matrix, 1.0 / inputs as f32, shape)))
    }
}
