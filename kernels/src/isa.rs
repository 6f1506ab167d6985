//! Instruction sets of the kernels, chosen once.
//!
//! A kernel is written once, over the operations of `simd`, as a type that implements [`Kernel`].
//! [`Isa::dispatch`] runs it inside a function compiled for the chosen instructions. Every function that the
//! kernel calls must be `#[inline(always)]`, so that the compiler uses the chosen instructions in it.

use std::sync::OnceLock;

use crate::simd::{Kernel, amx, avx2, avx512, portable};

/// An instruction set that kernels are compiled for, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// AVX-512 like [`Isa::Avx512`], plus the tiles of AMX for sums of bytes and bf16.
    Amx,
    /// AVX-512 F, BW, VL with VNNI and BF16.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// The target's baseline instructions only.
    Portable,
}

/// Matrix unit used beside the vector instructions of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatrixUnit {
    /// No matrix unit is used.
    None,
    /// AMX: eight tile registers of sixteen rows of 64 bytes.
    Amx,
}

impl Isa {
    /// Returns the best set of this CPU, determined once. The first call requests AMX by a system call; a
    /// process that may not make that call uses [`Isa::vectors`].
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        let with_tiles = || Self::vectors() == Self::Avx512 && amx::is_granted();
        *BEST.get_or_init(|| if with_tiles() { Self::Amx } else { Self::vectors() })
    }

    /// Returns the best vector set of this CPU, determined once, for arithmetic without a matrix unit.
    #[must_use]
    pub fn vectors() -> Self {
        static VECTORS: OnceLock<Isa> = OnceLock::new();
        *VECTORS.get_or_init(|| {
            let f16c_and_fma = is_x86_feature_detected!("f16c") && is_x86_feature_detected!("fma");
            let avx2 = is_x86_feature_detected!("avx2") && f16c_and_fma;
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
                && is_x86_feature_detected!("avx512bf16");
            match (avx512, avx2) {
                (true, _) => Self::Avx512,
                (_, true) => Self::Avx2,
                _ => Self::Portable,
            }
        })
    }

    /// Returns every set that this CPU has, best first. The last is always [`Isa::Portable`].
    #[must_use]
    pub fn available() -> Vec<Self> {
        let all = [Self::Amx, Self::Avx512, Self::Avx2, Self::Portable];
        // Each set includes those after it.
        all.into_iter().filter(|&set| set >= Self::best()).collect()
    }

    /// Runs `kernel` compiled for this set.
    ///
    /// # Panics
    /// Panics if this CPU lacks the set.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // Kernels are compiled for vector instructions only.
        let vectors = if self == Self::Amx { Self::Avx512 } else { self };
        assert!(vectors >= Self::vectors(), "this CPU has no {self:?}");
        match vectors {
            // SAFETY: the best set of this CPU includes this one.
            Self::Amx | Self::Avx512 => unsafe { avx512::run(kernel) },
            // SAFETY: the best set of this CPU includes this one.
            Self::Avx2 => unsafe { avx2::run(kernel) },
            Self::Portable => portable::run(kernel),
        }
    }

    /// True if the matrix unit of this set multiplies bf16.
    ///
    /// # Panics
    /// Panics if this CPU lacks the set.
    #[must_use]
    pub fn is_fast_at_bf16(self) -> bool {
        self.matrix_unit() == MatrixUnit::Amx && amx::multiplies_bf16()
    }

    /// Returns the matrix unit of this set.
    ///
    /// # Panics
    /// Panics if this CPU lacks the set.
    pub(crate) fn matrix_unit(self) -> MatrixUnit {
        match self {
            Self::Amx => {
                assert_eq!(self, Self::best(), "this CPU has no {self:?}");
                MatrixUnit::Amx
            }
            _ => MatrixUnit::None,
        }
    }
}
