//! Which instructions the arithmetic uses, chosen once.
//!
//! A kernel is written once, over the vocabulary of `simd`, as a type that implements [`Kernel`].
//! [`Isa::dispatch`] runs it inside a function that is compiled for the chosen instructions; everything the
//! kernel calls must be `#[inline(always)]`, so that it is compiled for them too.

use std::sync::OnceLock;

use crate::simd::{Kernel, avx2, avx512, portable};

/// An instruction set the kernels are compiled for, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// AVX-512 F, BW, VL with VNNI and BF16.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Nothing beyond the target's baseline.
    Portable,
}

impl Isa {
    /// The best set this CPU has. Looked up once.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }

    /// Every set this CPU has, best first. The last is always [`Isa::Portable`].
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut found = Vec::with_capacity(3);
        let f16c_and_fma = is_x86_feature_detected!("f16c") && is_x86_feature_detected!("fma");
        let avx2 = is_x86_feature_detected!("avx2") && f16c_and_fma;
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx512bf16");
        if avx512 {
            found.push(Self::Avx512);
        }
        if avx2 {
            found.push(Self::Avx2);
        }
        found.push(Self::Portable);
        found
    }

    /// Runs `kernel` compiled for this set.
    ///
    /// # Panics
    ///
    /// If this CPU does not have it.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // Each set includes those after it.
        assert!(self >= Self::best(), "this CPU has no {self:?}");
        match self {
            // SAFETY: the best set of this CPU includes this one.
            Self::Avx512 => unsafe { avx512::run(kernel) },
            // SAFETY: as above.
            Self::Avx2 => unsafe { avx2::run(kernel) },
            Self::Portable => portable::run(kernel),
        }
    }
}
