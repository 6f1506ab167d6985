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
//! A step of integer weights is four elements of each row, of bf16 two, of floats one. The activations' element(s)
//! are broadcast, so an output is summed in one lane, over `in` from first to last: its bits depend on its weights
//! and its activations alone, never on the batch, the thread or the shape of the tile that computed it.
//!
//! [`linear`] rounds activations to the weights' precision, as fast as the bytes arrive. [`linear_unrounded`] leaves them
//! as they are and [`linear_transposed`] is its backward pass: both over the same values of the same panels. [`linear_ring`] and
//! [`linear_ring_transposed`] are both once more in whole numbers modulo 2^64 or 2^48.
//!
//! # Layout
//!
//! - `form`: panels, and how they are made. `pack`: matrices of them. `part`: what the products share. `chunk`: what a thread takes.
//! - `packings`: how integer panels lie. `rows`: how activations meet them.
//! - `quantized_activations`: over `tile`s, which `float` and `integer` panels sum, and `amx`, where a matrix unit does. `float_activations`, `transposed`: over `values`.
//! - `modular`: over whole numbers.

mod amx;
mod chunk;
mod float;
mod float_activations;
mod form;
mod integer;
mod modular;
mod pack;
mod packings;
mod part;
mod quantized_activations;
mod rows;
mod tile;
mod transposed;
mod values;

pub use float_activations::linear_unrounded;
pub use form::{PackError, PackedLayout};
pub use modular::{ModularForm, Modulus, linear_ring, linear_ring_by_words, linear_ring_transposed};
pub use pack::PackedMatrix;
pub use part::LinearPart;
pub use quantized_activations::linear;
pub use transposed::{SumFrom, linear_transposed, linear_transposed_rounded};
