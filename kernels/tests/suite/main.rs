//! The kernels from outside: against the plain [`kernels::reference`], against files decoded by other
//! implementations, and, where the crate promises batch invariance, against themselves bit by bit.

mod attention;
mod attention_bf16;
mod backward;
mod elementwise;
mod isa;
mod linear;
mod linear_bf16;
mod linear_ring;
mod linear_transposed;
mod linear_unrounded;
mod lora;
mod lora_handover;
mod lora_layout;
mod pieces;
mod pool;
mod quantized;
mod rounding;
mod support;
