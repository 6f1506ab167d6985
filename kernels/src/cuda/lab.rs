//! Laboratory: variants that papers compare with. Selectable and tested, but not part of the serving path.
//!
//! # Layout
//!
//! - `padded`: low-rank deltas at the largest rank of their group.

mod padded;
