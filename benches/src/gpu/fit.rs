//! Least-squares line through measurements.

use anyhow::{Result, ensure};

/// R² of `y = slope * x + start` for `points`: 1 is a perfect fit, 0 explains nothing.
///
/// # Errors
/// If all points are equal, or one is not finite.
pub(super) fn r_squared(points: &[(f64, f64)]) -> Result<f64> {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x_mean, y_mean) = (mean(|point| point.0), mean(|point| point.1));
    let sum =
        |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|&(x, y)| of(x - x_mean, y - y_mean)).sum::<f64>();
    let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
    ensure!(xx > 0.0 && yy > 0.0, "{} points that do not differ determine no line", points.len());
    let share = xy * xy / (xx * yy);
    ensure!(share.is_finite(), "a point is not finite; measure again");
    Ok(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_on_a_line_are_explained_and_a_parabola_around_its_top_is_not() {
        let line: Vec<_> = (0..20).map(|x| (f64::from(x), 3.0 - 0.5 * f64::from(x))).collect();
        assert!((r_squared(&line).unwrap() - 1.0).abs() < 1e-12);
        let parabola: Vec<_> = (-5..=5).map(|x| (f64::from(x), f64::from(x * x))).collect();
        assert!(r_squared(&parabola).unwrap().abs() < 1e-12);
        // By hand: means 2 and 3, xx = 2, xy = 3, yy = 6.
        assert!((r_squared(&[(1.0, 1.0), (2.0, 4.0), (3.0, 4.0)]).unwrap() - 0.75).abs() < 1e-12);
    }

    #[test]
    fn what_determines_no_line_is_refused() {
        assert!(r_squared(&[]).is_err());
        assert!(r_squared(&[(1.0, 2.0), (1.0, 3.0)]).is_err());
        assert!(r_squared(&[(1.0, 2.0), (2.0, f64::NAN)]).is_err());
    }
}
