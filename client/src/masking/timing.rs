//! Tests that operations on secrets take constant time (dudect: Reparaz, Balasch, Verbauwhede, 2017).
//!
//! Two classes of inputs, a fixed one and random ones, are measured in random order. Times beyond the 90th
//! percentile are dropped, because interruptions of the process do not depend on secrets. Welch's t compares
//! the rest. The tests depend on timing, so they run only on request, on an idle machine:
//!
//! ```text
//! cargo test -p client --lib timing -- --ignored --nocapture --test-threads 1
//! ```

use std::{hint::black_box, time::Instant};

use kernels::Modulus;
use shmproto::layer::seeded_rows::{KEY_BYTES, Key, SeededRows};

use super::{
    fixed_point::{from_whole, to_whole},
    modular_rows::{cover, pack, uncover},
    verify::product,
};

const MEASUREMENTS: usize = 200_000;
/// Elements of a row, as in SmolLM2.
const WIDTH: usize = 576;
/// Limit of t above which dudect calls the classes different; below 4.5 it has found nothing.
const MAX_T: f64 = 10.0;

struct SeededRandom(SeededRows);

impl SeededRandom {
    fn new() -> Self {
        Self(SeededRows { key: Key::new(&[3; KEY_BYTES]), first: 0 })
    }

    fn numbers(&mut self, count: usize) -> Vec<u64> {
        let mut numbers = vec![0; count];
        self.0.fill(0, 2 * count, bytemuck::cast_slice_mut(&mut numbers));
        self.0.first += 1;
        numbers
    }

    /// Returns values between -1 and 1.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "any numbers will do")]
    fn floats(&mut self, count: usize) -> Vec<f32> {
        self.numbers(count).into_iter().map(|x| (x.cast_signed() as f64 / i64::MAX as f64) as f32).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "few enough")]
fn moments(times: &[u64]) -> (f64, f64, f64) {
    let count = times.len() as f64;
    let mean = times.iter().map(|&time| time as f64).sum::<f64>() / count;
    let square = times.iter().map(|&time| (time as f64 - mean).powi(2)).sum::<f64>();
    (mean, square / (count - 1.0), count)
}

/// Returns Welch's t of two lists of times, without the slowest tenth of all.
fn welch(classes: &[Vec<u64>; 2]) -> f64 {
    let mut all = classes.concat();
    all.sort_unstable();
    let most = all[all.len() * 9 / 10];
    let [fixed, random] = classes
        .each_ref()
        .map(|times| moments(&times.iter().copied().filter(|&time| time <= most).collect::<Vec<_>>()));
    (fixed.0 - random.0) / (fixed.1 / fixed.2 + random.1 / random.2).sqrt()
}

/// Times `work` on `fixed` or on a value of `draw`; prints and returns t.
fn compare<T: Clone>(
    what: &str,
    fixed: &T,
    mut draw: impl FnMut(&mut SeededRandom) -> T,
    mut work: impl FnMut(&T),
) -> f64 {
    let (mut random, mut classes) = (SeededRandom::new(), [Vec::new(), Vec::new()]);
    let order = random.numbers(MEASUREMENTS);
    for class in order.into_iter().map(|number| usize::from(number % 2 == 1)) {
        // Both inputs are made each time, whichever is taken.
        let (drawn, same) = (draw(&mut random), fixed.clone());
        let input = black_box(if class == 1 { drawn } else { same });
        let begun = Instant::now();
        work(&input);
        classes[class].push(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    let (t, mean) = (welch(&classes), moments(&classes[1]).0);
    println!("{what}: t = {t:.1}, {mean:.0} ns");
    t
}

fn assert_alike(what: &str, t: f64) {
    assert!(t.abs() < MAX_T, "{what}: how long it takes depends on what is secret, t = {t}");
}

#[test]
#[ignore = "how long something took is for a machine that is left alone"]
fn pads_are_made_added_and_removed_in_the_same_time_whatever_they_are() {
    let (modulus, mut out) = (Modulus::Bits48, vec![0.0; Modulus::Bits48.words(WIDTH)]);
    let key = |random: &mut SeededRandom| {
        let numbers = random.numbers(KEY_BYTES / 8);
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Key::new(bytes[..].try_into().expect("so many bytes"))
    };
    let t = compare("making a pad", &Key::new(&[0; KEY_BYTES]), key, |key| {
        SeededRows { key: key.clone(), first: 0 }.fill(0, out.len(), &mut out);
    });
    assert_alike("making", t);
    let numbers = |random: &mut SeededRandom| random.numbers(WIDTH);
    let packed = |numbers: &[u64]| {
        let mut packed = vec![0.0; modulus.words(WIDTH)];
        pack(modulus, numbers, &mut packed);
        packed
    };
    let mut work = packed(&SeededRandom::new().numbers(WIDTH));
    let t = compare("covering a row", &vec![0; WIDTH], numbers, |x| {
        cover(modulus, black_box(&mut work), x);
    });
    assert_alike("covering", t);
    let (zeros, mut answer) = (packed(&[0; WIDTH]), vec![0; WIDTH]);
    let effect = |random: &mut SeededRandom| packed(&random.numbers(WIDTH));
    let t = compare("uncovering an answer", &zeros, effect, |r| {
        uncover(modulus, &work, r, black_box(&mut answer));
    });
    assert_alike("uncovering", t);
}

#[test]
#[ignore = "how long something took is for a machine that is left alone"]
fn answers_are_checked_in_the_same_time_whatever_the_secrets_are() {
    let y = SeededRandom::new().numbers(WIDTH);
    let secret = |random: &mut SeededRandom| -> Vec<u32> {
        random.numbers(WIDTH).into_iter().map(|number| number as u32 & ((1 << 30) - 1)).collect()
    };
    for (name, fixed) in [("zeros", 0), ("ones", (1 << 30) - 1)] {
        let what = format!("checking, {name}");
        let t = compare(&what, &vec![fixed; WIDTH], secret, |s| {
            black_box(product(black_box(&y), s));
        });
        assert_alike(&what, t);
    }
}

#[test]
#[ignore = "how long something took is for a machine that is left alone"]
fn rows_become_whole_numbers_in_the_same_time_whatever_they_are() {
    let (mut whole, mut back) = (vec![0; WIDTH], vec![0.0; WIDTH]);
    let floats = |random: &mut SeededRandom| random.floats(WIDTH);
    // Rows of zeros differ by some nanoseconds, as docs/performance/split.md says.
    for (name, fixed) in [("ones", 1.0), ("the largest", f32::MAX)] {
        let what = format!("a row as whole numbers, {name}");
        let t = compare(&what, &vec![fixed; WIDTH], floats, |row| {
            black_box(to_whole(row, 30, black_box(&mut whole)));
        });
        assert_alike(&what, t);
    }
    let answers = |random: &mut SeededRandom| -> Vec<u64> {
        random.numbers(WIDTH).into_iter().map(|number| (number.cast_signed() >> 2).cast_unsigned()).collect()
    };
    let t = compare("whole numbers as a row, zeros", &vec![0; WIDTH], answers, |y| {
        from_whole(Modulus::Bits64, y, -40, black_box(&mut back));
    });
    assert_alike("an answer", t);
}

/// Shows that the method detects an operation that depends on its input.
#[test]
#[ignore = "how long something took is for a machine that is left alone"]
fn what_ends_early_is_seen() {
    let zeros = vec![0_u64; WIDTH];
    let numbers = |random: &mut SeededRandom| random.numbers(WIDTH);
    let t = compare("a comparison that ends early", &zeros, numbers, |x| {
        black_box(x.iter().zip(&zeros).all(|(a, b)| black_box(a) == b));
    });
    assert!(t.abs() > MAX_T, "{t}");
}
