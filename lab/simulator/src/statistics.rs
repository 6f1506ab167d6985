//! Means, quantiles, intervals and ranks.

/// Returns the mean; 0 for no values.
#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Returns the quantile `q` (nearest rank); 0 for no values.
#[must_use]
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
}

/// Two-sided 97.5 % points of Student's t for 1 to 30 degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// Returns half the width of the 95 % interval of the mean; 0 for fewer than two values.
#[must_use]
pub fn half_interval(values: &[f64]) -> f64 {
    let n = values.len();
    if n < 2 {
        return 0.0;
    }
    let mean = mean(values);
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1) as f64;
    STUDENT.get(n - 2).copied().unwrap_or(1.96) * (variance / n as f64).sqrt()
}

/// Returns Spearman's rank correlation; ties share their mean rank. 0 if one side is constant.
#[must_use]
pub fn spearman(one: &[f64], other: &[f64]) -> f64 {
    let (one, other) = (ranks(one), ranks(other));
    let (mean_one, mean_other) = (mean(&one), mean(&other));
    let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        one.iter().zip(&other).map(|(a, b)| f(a - mean_one, b - mean_other)).sum()
    };
    let (both, first, second) = (sum(&|a, b| a * b), sum(&|a, _| a * a), sum(&|_, b| b * b));
    if first * second > 0.0 { both / (first * second).sqrt() } else { 0.0 }
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    for tied in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let first = tied.first().and_then(|at| order.iter().position(|other| other == at)).unwrap_or(0);
        let rank = first as f64 + (tied.len() - 1) as f64 / 2.0;
        tied.iter().for_each(|&at| ranks[at] = rank);
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_there() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.95, 0.99, 1.0].map(|q| quantile(&values, q)), [50.0, 95.0, 99.0, 100.0]);
        assert_eq!((quantile(&[], 0.5), quantile(&[3.0], 0.99), mean(&values)), (0.0, 3.0, 50.5));
    }

    #[test]
    fn the_interval_is_that_of_student() {
        // scipy.stats.t.interval(0.95, 4, 3, sem([1, 2, 3, 4, 5])): 3 +- 1.9632.
        assert!((half_interval(&[1.0, 2.0, 3.0, 4.0, 5.0]) - 1.9632).abs() < 1e-3);
        assert_eq!(half_interval(&[1.0]), 0.0);
    }

    #[test]
    fn ranks_agree_disagree_or_share_ties() {
        assert_eq!(spearman(&[1.0, 2.0, 3.0], &[10.0, 100.0, 1000.0]), 1.0);
        assert_eq!(spearman(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]), -1.0);
        // scipy.stats.spearmanr([1, 2, 2, 3], [1, 3, 2, 4]): 0.9487.
        assert!((spearman(&[1.0, 2.0, 2.0, 3.0], &[1.0, 3.0, 2.0, 4.0]) - 0.9487).abs() < 1e-4);
        assert_eq!(spearman(&[1.0, 1.0], &[1.0, 2.0]), 0.0);
    }
}
