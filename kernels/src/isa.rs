//! Which instructions the arithmetic uses, chosen once.
//!
//! A kernel is written once, over the vocabulary of `simd`, as a type that implements [`Kernel`].
//! [`Isa::dispatch`] runs it inside a function that is compiled for the chosen instructions; everything the
//! kernel calls must be `#[inline(always)]`, so that it is compiled for them too.

use std::sync::OnceLock;

use crate::simd::{Kernel, amx, avx2, avx512, portable};

/// An instruction set the kernels are compiled for, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// AVX-512 as below, and the tiles of AMX for sums of bytes.
    Amx,
    /// AVX-512 F, BW, VL with VNNI and BF16.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Nothing beyond the target's baseline.
    Portable,
}

/// What multiplies matrices beside the vectors of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatrixUnit {
    /// Nothing.
    None,
    /// AMX, with its tiles of bytes.
    Amx,
}

impl Isa {
    /// The best set this CPU has. Looked up once, by a system call that asks for AMX: whoever gives such calls up takes
    /// [`Isa::vectors`].
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        let with_tiles = || Self::vectors() == Self::Avx512 && amx::is_granted();
        *BEST.get_or_init(|| if with_tiles() { Self::Amx } else { Self::vectors() })
    }

    /// The best set of vectors this CPU has, for arithmetic that no matrix unit helps with. Looked up once.
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

    /// Every set this CPU has, best first. The last is always [`Isa::Portable`].
    #[must_use]
    pub fn available() -> Vec<Self> {
        let all = [Self::Amx, Self::Avx512, Self::Avx2, Self::Portable];
        // Each set includes those after it.
        all.into_iter().filter(|&set| set >= Self::best()).collect()
    }

    /// Runs `kernel` compiled for this set.
    ///
    /// # Panics
    ///
    /// If this CPU does not have it.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // Kernels are compiled for vectors.
        let vectors = if self == Self::Amx { Self::Avx512 } else { self };
        assert!(vectors >= Self::vectors(), "this CPU has no {self:?}");
        match vectors {
            // SAFETY: the best set of this CPU includes this one.
            Self::Amx | Self::Avx512 => unsafe { avx512::run(kernel) },
            // SAFETY: as above.
            Self::Avx2 => unsafe { avx2::run(kernel) },
            Self::Portable => portable::run(kernel),
        }
    }

    /// What multiplies matrices beside it.
    ///
    /// # Panics
    ///
    /// If this CPU does not have it.
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
