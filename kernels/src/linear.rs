//! Linear layers: `out = x · Wᵀ (+ bias)` with packed weights.
//!
//! ```text
//! W is [out, in]; sixteen rows of it make a panel, and a lane of a vector is a row of the panel:
//!
//!            lane 0           lane 1               lane 15
//! step 0   w[0][0..4]       w[1][0..4]     ...   w[15][0..4]      one vector = 16 rows x 4 bytes
//! step 1   w[0][4..8]       w[1][4..8]     ...   w[15][4..8]
//! ```
//!
//! A step of integer weights is four elements of each row, of bf16 two, of floats one. The elements of the
//! activations are broadcast, so each output is summed in one lane, over `in` from first to last. An output's
//! bits depend on its weights and activations alone, never on the batch, the thread or the shape of the tile.
//!
//! [`linear`] rounds activations to the weights' precision and runs at memory speed. [`linear_unrounded`]
//! does not round them, and [`linear_transposed`] is its backward pass; both decode the same values from the
//! same panels. [`linear_bf16`] and [`linear_transposed_bf16`] round both sides to bf16, for matrix units.
//! [`linear_ring`] and [`linear_ring_transposed`] compute both products modulo 2^64 or 2^48.
//!
//! # Layout
//!
//! - `form`: panels and their construction. `pack`: packed matrices. `part`: code shared by all products.
//!   `chunk`: the work of one thread. `out_panels`: the outputs.
//! - `packings`: layouts of integer panels. `rows`: activations as integer panels read them.
//! - `quantized_activations`: the quantized product over `tile`s, summed by `float` and `integer` panels, or
//!   by `amx` on a matrix unit.
//! - `bf16`: the products in bf16, on the matrix unit or by vectors.
//! - `float_activations`, `transposed`: the float products over `values`.
//! - `modular`: the exact products over integers.

mod amx;
mod bf16;
mod chunk;
mod float;
mod float_activations;
mod form;
mod integer;
mod modular;
mod out_panels;
mod pack;
mod packings;
mod part;
mod quantized_activations;
mod rows;
mod tile;
mod transposed;
mod values;

pub(crate) use bf16::{MatrixProduct, PairFactor, PairTiles, RowTiles};
pub use bf16::{linear_bf16, linear_transposed_bf16};
pub use float_activations::linear_unrounded;
pub use form::{PackError, PackedLayout};
pub use modular::{ModularForm, Modulus, linear_ring, linear_ring_by_words, linear_ring_transposed};
pub use pack::PackedMatrix;
pub use part::LinearPart;
pub use quantized_activations::linear;
pub use transposed::{SumFrom, linear_transposed, linear_transposed_rounded};
