//! Statistical bounds: deviations of a result from pure chance.
//!
//! Bounds lie five standard deviations from the mean: one run in two million is outside.

use crate::{
    algebra::{dot, norm, to_f64},
    executor::{FloatRows, IntegerRows},
};

const SIGMAS: f64 = 5.0;

/// Mean cosine of `found` to their own rows minus that to the next rows, in standard deviations of the mean:
/// common components of all rows cancel.
pub(crate) fn likeness(found: &FloatRows, truth: &FloatRows) -> f64 {
    assert_eq!((found.width, found.count()), (truth.width, truth.count()));
    let cosine = |found: &[f32], truth: &[f32]| {
        let (found, truth) = (to_f64(found), to_f64(truth));
        // Zero rows have similarity zero.
        dot(&found, &truth) / (norm(&found) * norm(&truth)).max(f64::MIN_POSITIVE)
    };
    let count = found.count();
    let more = |at: usize| {
        let found = found.row(at);
        cosine(found, truth.row(at)) - cosine(found, truth.row((at + 1) % count))
    };
    let more: Vec<f64> = (0..count).map(more).collect();
    let mean = more.iter().sum::<f64>() / count as f64;
    let variance = more.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
    mean / (variance / count as f64).sqrt().max(f64::MIN_POSITIVE)
}

pub(crate) fn assert_unlike(what: &str, found: &FloatRows, truth: &FloatRows) {
    let likeness = likeness(found, truth);
    println!("  {what}: {likeness:+.2} standard deviations from unrelated rows");
    assert!(likeness.abs() <= SIGMAS, "{what}: {likeness}");
}

/// Fails unless the bytes of `rows` are uniformly distributed and uncorrelated with their successors.
pub(crate) fn assert_uniform(what: &str, rows: &IntegerRows) {
    let bytes = rows.bytes();
    let (count, mut counts) = (bytes.len() as f64, [0_u64; 256]);
    bytes.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    let expected = count / 256.0;
    let chi_squared: f64 = counts.iter().map(|&seen| (seen as f64 - expected).powi(2) / expected).sum();
    // 255 degrees of freedom.
    let surprise = (chi_squared - 255.0) / 510_f64.sqrt();
    let centred = |byte: u8| (f64::from(byte) - 127.5) / (65_535.0_f64 / 12.0).sqrt();
    let products: f64 = bytes.windows(2).map(|pair| centred(pair[0]) * centred(pair[1])).sum();
    let serial = products / count.sqrt();
    println!(
        "  {what}: {count} bytes, chi-squared {surprise:+.2}, serial correlation {serial:+.2} standard deviations"
    );
    assert!(surprise.abs() <= SIGMAS && serial.abs() <= SIGMAS, "{what}");
}

/// Number of `rows` whose most similar row of `others` has the same number.
pub(crate) fn paired(rows: &FloatRows, others: &FloatRows) -> usize {
    let others: Vec<Vec<f64>> = others.iter().map(to_f64).collect();
    let nearest = |row: &[f32]| {
        let row = to_f64(row);
        let likeness: Vec<f64> = others.iter().map(|other| dot(&row, other).abs()).collect();
        (0..likeness.len()).max_by(|&a, &b| likeness[a].total_cmp(&likeness[b])).unwrap()
    };
    rows.iter().enumerate().filter(|(index, row)| nearest(row) == *index).count()
}

/// Fails if `hits` of `tries` exceed chance, where `likely` hits are expected.
pub(crate) fn assert_rare(what: &str, hits: usize, tries: usize, likely: f64) {
    // Chance exceeds this bound one time in a million.
    let most = likely + SIGMAS * likely.sqrt() + SIGMAS;
    println!(
        "  {what}: {hits} of {tries} ({:.2} %), where chance makes up to {likely:.1}",
        100.0 * hits as f64 / tries as f64
    );
    assert!(hits as f64 <= most, "{what}: {hits} of {tries}");
}
