//! Memory that another process may write at any moment: bytes as atomics, and copies from and to them.
//!
//! Such memory is never accessed through `&` or `&mut` of plain data, unless this process alone may write it.
//! The bytes are a region's mapping or, in one process, the heap's. Under loom there are no bytes: loom's
//! atomics are objects, and their owner stores them as such.

pub(crate) mod copy;
#[cfg(not(loom))]
mod mapped;
#[cfg(not(loom))]
mod own;

#[cfg(not(loom))]
pub(crate) use mapped::AtomicMemory;
#[cfg(not(loom))]
pub(crate) use own::OwnValues;
