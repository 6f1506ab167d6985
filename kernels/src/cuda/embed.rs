//! The embeddings of tokens. See `embed.cu`.

use super::{
    CudaError, CudaStream, DeviceVec, Matrix, Weight,
    launch::{Arg, LaunchShape, count, launch},
};
use crate::{TensorType, lora::ElementKind};

/// Threads of a block: `THREADS` of `embed.cu`.
const THREADS: u32 = 128;

/// `out[r] = table[tokens[r]]`, in 32 bits. A token that the table does not have gets a row of NaN.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the shapes do not fit together.
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
    // SAFETY: 1. The kernel is declared with these arguments, and reads the table's form. 2. A block writes a row of `out`;
    // tokens beyond the table are not looked up. 3. What it writes is borrowed exclusively.
    unsafe { launch(stream, kernel(table.kind()), LaunchShape::line(out.rows(), THREADS), &arguments) }
}

/// The kernel that reads a table of this type.
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
    }
}
