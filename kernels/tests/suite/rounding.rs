//! Effect of a second byte of activations, and the choice of groups that get one.

use kernels::{Isa, TensorType, reference};

use crate::{
    linear::{GAP, ROUNDINGS, SharedInputLayers},
    support::{floats, pool, random},
};

/// Rows with some elements that are far larger than the others.
pub(crate) fn with_outliers(mut x: Vec<f32>) -> Vec<f32> {
    for at in (0..x.len()).step_by(193) {
        x[at] *= 40.0;
    }
    x
}

#[test]
fn sets_agree_about_what_is_wide_and_about_every_number() {
    for rounding in 0..ROUNDINGS.len() {
        let layers = SharedInputLayers::random(&[(TensorType::Q4_1, 64), (TensorType::Q8_0, 16)], 256, 3)
            .rounding(rounding);
        let x = with_outliers(floats(&mut random(5), 37 * layers.width));
        let wanted = layers.run(&mut pool(1), Isa::Portable, &x);
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
            let got = layers.run(&mut pool(2), isa, &x);
            for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                assert!((got - wanted).abs() <= 1e-4 * (1.0 + wanted.abs()), "{isa:?}, {at}: {got} {wanted}");
            }
        }
    }
}

#[test]
fn a_second_byte_where_it_matters_takes_most_of_the_error_away() {
    let layers = |rounding| SharedInputLayers::random(&[(TensorType::Q8_0, 64)], 1024, 9).rounding(rounding);
    let x = with_outliers(floats(&mut random(6), 8 * 1024));
    let exact = reference::linear(&x, &layers(0).parts[0].weights, 8, 64, 1024);
    let error = |rounding| {
        let layers = layers(rounding);
        let out = layers.run(&mut pool(1), Isa::best(), &x);
        let rows = out.chunks(layers.stride).zip(exact.chunks(64));
        rows.flat_map(|(got, wanted)| {
            let bias = layers.parts[0].bias.as_ref().expect("the first part has one");
            let got = got[GAP..].iter().zip(bias).map(|(got, bias)| got - bias);
            got.zip(wanted).map(|(got, wanted)| f64::from(got - wanted).powi(2)).collect::<Vec<_>>()
        })
        .sum::<f64>()
    };
    let [int8, some, few, int15] = [0, 1, 2, 3].map(error);
    assert!(
        some < int8 / 20.0 && few < int8 / 10.0,
        "{int8:e} of 8 bits, {some:e} and {few:e} with a second byte"
    );
    assert!(int15 < some / 10.0, "{some:e} with a second byte for some, {int15:e} for all");
}
