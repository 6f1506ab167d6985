//! Token embeddings; the kernel is in `embed.cu`.

use super::{
    CudaError, CudaStream, DeviceVec, Matrix, Weight,
    launch::{Arg, LaunchShape, count, launch},
};
use crate::{TensorType, lora::ElementKind};

/// Threads per block: `THREADS` of `embed.cu`.
const THREADS: u32 = 128;

/// Computes `out[r] = table[tokens[r]]` in 32 bits. A token outside the table yields a row of NaN.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the shapes do not match.
pub fn embed(
    stream: &CudaStream,
    table: &Weight,
    tokens: &DeviceVec<u32>,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    assert_eq!(out.kind(), ElementKind::F32, "the residual stream is of 32 bits");
    assert_eq!(out.width(), table.columns(), "rows of the table");
    assert!(tokens.len() >= out.rows(), "a token a row");
    let arguments = [
        Arg::Ptr(table.address()),
        Arg::U32(count(table.rows())),
        Arg::U32(count(table.columns())),
        Arg::Ptr(tokens.address()),
        Arg::Ptr(out.address()),
    ];
    // SAFETY: 1. The kernel is declared with these arguments, and reads the table's type. 2. A block writes a row of
    // `out`; tokens outside the table are not looked up. 3. The output is borrowed exclusively.
    unsafe { launch(stream, kernel(table.kind()), LaunchShape::line(out.rows(), THREADS), &arguments) }
}

fn kernel(table: TensorType) -> &'static str {
    match table {
        TensorType::F32 => "embed_f32",
        TensorType::F16 => "embed_f16",
        TensorType::Bf16 => "embed_bf16",
        TensorType::Q4_0 => "embed_q4_0",
        TensorType::Q4_1 => "embed_q4_1",
        TensorType::Q5_0 => "embed_q5_0",
        TensorType::Q5_1 => "embed_q5_1",
        TensorType::Q8_0 => "embed_q8_0",
        TensorType::Q4K => "embed_q4_k",
        TensorType::Q5K => "embed_q5_k",
        TensorType::Q6K => "embed_q6_k",
        TensorType::Mxfp4 => unreachable!("MXFP4 is not uploaded to a GPU"),
    }
}
