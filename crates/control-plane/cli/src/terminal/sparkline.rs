//! Curves in one line of text.

/// Heights of a column.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns a curve of `values` in at most `width` columns, each with the mean of its values. The lowest
/// column is the least mean, and the highest one the greatest.
pub(crate) fn sparkline(values: &[f64], width: usize) -> String {
    let columns = width.min(values.len());
    let mean = |column: usize| {
        let of = &values[column * values.len() / columns..(column + 1) * values.len() / columns];
        of.iter().sum::<f64>() / of.len() as f64
    };
    let means: Vec<f64> = (0..columns).map(mean).collect();
    let least = means.iter().copied().fold(f64::INFINITY, f64::min);
    let range = means.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least;
    means.into_iter().map(|mean| HEIGHTS[height(mean - least, range)]).collect()
}

/// Returns the index of the height of a column that is `above` the least of a range.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the share is from 0 to 1")]
fn height(above: f64, range: f64) -> usize {
    let share = if range > 0.0 { (above / range).clamp(0.0, 1.0) } else { 0.0 };
    (share * (HEIGHTS.len() - 1) as f64).round() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_goes_from_the_least_to_the_greatest_value() {
        assert_eq!(sparkline(&[0.0, 1.0, 0.5], 10), "▁█▅");
        assert_eq!(sparkline(&[2.0, 2.0], 10), "▁▁");
        assert_eq!(sparkline(&[], 10), "");
    }

    #[test]
    fn a_long_curve_shows_means() {
        assert_eq!(sparkline(&[0.0, 2.0, 3.0, 5.0], 2), "▁█");
        assert_eq!(sparkline(&[f64::NAN, 1.0], 2).chars().count(), 2);
    }
}
