//! Numbers that only look random, so that a failure can be repeated from its seed.

use std::ops::Range;

/// SplitMix64.
pub(crate) fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The seeds in `CUDA_CLUSTER_SEEDS` (`3..60`), otherwise the usual ones.
pub(crate) fn seeds(usual: Range<u64>) -> Range<u64> {
    let range = std::env::var("CUDA_CLUSTER_SEEDS").ok().map(|range| {
        let (first, last) = range.split_once("..").expect("like 3..60");
        first.parse().expect("a number")..last.parse().expect("a number")
    });
    range.unwrap_or(usual)
}
