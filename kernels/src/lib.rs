//! Arithmetic on the CPU.

pub mod tensor_type;
pub use tensor_type::TensorType;
