//! The laboratory: forms that papers compare with. Selectable, measured and tested, and apart from the path that serves.
//!
//! # Layout
//!
//! - `padded`: low-rank deltas at the largest rank of their group.

mod padded;
