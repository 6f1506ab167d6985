//! Transposes eight by eight lanes.

#![allow(clippy::wildcard_imports, reason = "an instruction set is used whole")]

use std::arch::x86_64::*;

/// Lane `j` of vector `i` becomes lane `i` of vector `j`.
#[inline(always)]
pub(super) fn transpose_eight(v: [__m256; 8]) -> [__m256; 8] {
    // `fours[4 b + j]` holds, in its 128-bit half h, element 4 h + j of the vectors 4 b to 4 b + 3.
    let mut fours = v;
    let mut b = 0;
    while b < 8 {
        cpu!({
            let (low, high) = (_mm256_unpacklo_ps(v[b], v[b + 1]), _mm256_unpackhi_ps(v[b], v[b + 1]));
            let (low2, high2) =
                (_mm256_unpacklo_ps(v[b + 2], v[b + 3]), _mm256_unpackhi_ps(v[b + 2], v[b + 3]));
            let pair = |lower: __m256, upper: __m256| {
                let (lower, upper) = (_mm256_castps_pd(lower), _mm256_castps_pd(upper));
                [_mm256_unpacklo_pd(lower, upper), _mm256_unpackhi_pd(lower, upper)]
                    .map(|v| _mm256_castpd_ps(v))
            };
            [fours[b], fours[b + 1]] = pair(low, low2);
            [fours[b + 2], fours[b + 3]] = pair(high, high2);
        });
        b += 4;
    }
    let mut out = v;
    let mut j = 0;
    while j < 4 {
        cpu!({
            out[j] = _mm256_permute2f128_ps::<0x20>(fours[j], fours[4 + j]);
            out[4 + j] = _mm256_permute2f128_ps::<0x31>(fours[j], fours[4 + j]);
        });
        j += 1;
    }
    out
}
