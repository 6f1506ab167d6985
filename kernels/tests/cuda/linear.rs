//! Linear layers: every weight type, and every kernel for it.

use kernels::{
    TensorType,
    cuda::{Blas, CudaStream, DeviceVec, LinearPart, Matrix, Weight, Workspace, linear, linear_transposed},
    lora::ElementKind,
    reference,
};

use crate::{
    support::{KINDS, SeededNumbers, assert_close, epsilon, matrix, rounded, stream, unwritten},
    weight::{TYPES, stored, values},
};

#[derive(Debug, Clone, Copy)]
enum Multiplier {
    Library,
    Ours,
}

const MULTIPLIERS: [Multiplier; 2] = [Multiplier::Library, Multiplier::Ours];

/// A workspace; without the library if it is not installed.
fn workspace(stream: &CudaStream, multiplier: Multiplier) -> Workspace {
    let blas = match multiplier {
        Multiplier::Library => Blas::open(stream.cuda()).inspect_err(|error| eprintln!("{error}")).ok(),
        Multiplier::Ours => None,
    };
    Workspace::new(stream.cuda(), blas)
}

/// A layer on the device, and its host values.
struct Layer {
    weight: Weight,
    bias: DeviceVec<f32>,
    values: Vec<f32>,
    bias_values: Vec<f32>,
}

impl Layer {
    fn new(
        stream: &CudaStream,
        kind: TensorType,
        outputs: usize,
        inputs: usize,
        random: &mut SeededNumbers,
    ) -> Self {
        let bytes = stored(kind, outputs, inputs, random);
        let weight = Weight::upload(stream, kind, &bytes, outputs, inputs).unwrap();
        let bias_values = random.normals(outputs);
        let bias = DeviceVec::from_slice(stream, &bias_values).unwrap();
        Self { weight, bias, values: values(kind, &bytes, outputs * inputs), bias_values }
    }

    fn part(&self, column: usize) -> LinearPart<'_> {
        LinearPart { weight: &self.weight, bias: Some(&self.bias), column }
    }

    /// Outputs of the layer for `x`, in 64 bits.
    fn wanted(&self, x: &[f32]) -> Vec<f32> {
        let (outputs, inputs) = (self.weight.rows(), self.weight.columns());
        let rows = x.len() / inputs;
        let mut out = reference::linear(x, &self.values, rows, outputs, inputs);
        for row in out.chunks_mut(outputs) {
            row.iter_mut().zip(&self.bias_values).for_each(|(out, bias)| *out += bias);
        }
        out
    }
}

/// Maximum error of a product: rounding of outputs, with the library once more at the bias, and of weights
/// that are converted to another type; the latter shows most in sums that nearly cancel.
fn tolerance(weight: TensorType, x: ElementKind, out: ElementKind) -> f32 {
    let kept = match x {
        ElementKind::F32 => true,
        ElementKind::F16 => weight == TensorType::F16,
        ElementKind::Bf16 => weight == TensorType::Bf16,
    };
    2e-5 + 2.0 * epsilon(out) + if kept { 0.0 } else { 4.0 * epsilon(x) }
}

fn check(
    stream: &CudaStream,
    workspace: &mut Workspace,
    layer: &Layer,
    (x_kind, out_kind): (ElementKind, ElementKind),
    rows: usize,
    random: &mut SeededNumbers,
) {
    let (outputs, inputs) = (layer.weight.rows(), layer.weight.columns());
    let x = rounded(x_kind, &random.normals(rows * inputs));
    let on_device = matrix(stream, x_kind, inputs, &x);
    let mut out = unwritten(stream, out_kind, rows, outputs);
    linear(stream, workspace, &on_device, &[layer.part(0)], &mut out).unwrap();
    let kind = layer.weight.kind();
    let what = format!("{kind:?} {outputs}x{inputs}, {rows} rows of {x_kind:?} to {out_kind:?}");
    let tolerance = tolerance(kind, x_kind, out_kind);
    assert_close(&what, &out.to_vec(stream).unwrap(), &layer.wanted(&x), tolerance);
}

/// Inner width of whole blocks, with a remainder after the chunks of 128 if the type allows one.
fn inputs(kind: TensorType) -> usize {
    match kind.block_elements() {
        1 => 200,
        32 => 288,
        _ => 512,
    }
}

#[test]
fn every_type_of_weight_gives_the_products_of_its_values_for_few_rows() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(1);
    for kind in TYPES {
        let layer = Layer::new(&stream, kind, 40, inputs(kind), &mut random);
        let mut ours = workspace(&stream, Multiplier::Ours);
        for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 32] {
            let out_kind = if rows % 2 == 0 { ElementKind::Bf16 } else { ElementKind::F32 };
            check(&stream, &mut ours, &layer, (ElementKind::Bf16, out_kind), rows, &mut random);
        }
    }
}

#[test]
fn every_type_of_weight_gives_the_products_of_its_values_for_many_rows() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(2);
    for multiplier in MULTIPLIERS {
        let mut workspace = workspace(&stream, multiplier);
        for kind in TYPES {
            let layer = Layer::new(&stream, kind, 136, inputs(kind), &mut random);
            for rows in [64, 200] {
                let kinds = (ElementKind::Bf16, ElementKind::Bf16);
                check(&stream, &mut workspace, &layer, kinds, rows, &mut random);
            }
        }
    }
}

#[test]
fn activations_of_every_kind_meet_weights_of_every_type() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(3);
    for multiplier in MULTIPLIERS {
        let mut workspace = workspace(&stream, multiplier);
        for kind in TYPES {
            let layer = Layer::new(&stream, kind, 24, inputs(kind), &mut random);
            for x_kind in [ElementKind::F32, ElementKind::F16] {
                for (rows, out_kind) in [(3, x_kind), (11, ElementKind::F32), (40, x_kind)] {
                    check(&stream, &mut workspace, &layer, (x_kind, out_kind), rows, &mut random);
                }
            }
        }
    }
}

#[test]
fn shapes_that_no_tile_divides_are_right() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(4);
    let types = [TensorType::F32, TensorType::F16, TensorType::Bf16];
    for multiplier in MULTIPLIERS {
        let mut workspace = workspace(&stream, multiplier);
        for (kind, x_kind) in types.into_iter().zip(KINDS) {
            for (outputs, inputs, rows) in [
                (1, 1, 1),
                (1, 1, 70),
                (3, 5, 4),
                (17, 33, 2),
                (129, 31, 66),
                (65, 136, 65),
                (7, 1030, 40),
                (33, 1000, 5),
            ] {
                let layer = Layer::new(&stream, kind, outputs, inputs, &mut random);
                check(&stream, &mut workspace, &layer, (x_kind, x_kind), rows, &mut random);
            }
        }
    }
}

/// Products that the library rejects run in our own kernel: correct, but slower.
#[test]
fn the_library_takes_the_products_of_models() {
    let Some(stream) = stream() else { return };
    let mut workspace = workspace(&stream, Multiplier::Library);
    let mut random = SeededNumbers::new(6);
    for (kind, x_kind) in [
        (TensorType::F32, ElementKind::F32),
        (TensorType::F16, ElementKind::F16),
        (TensorType::Bf16, ElementKind::Bf16),
        (TensorType::Q4_1, ElementKind::Bf16),
    ] {
        let layer = Layer::new(&stream, kind, 128, 256, &mut random);
        for out_kind in [x_kind, ElementKind::F32] {
            check(&stream, &mut workspace, &layer, (x_kind, out_kind), 96, &mut random);
        }
        let g = matrix(&stream, x_kind, 128, &random.normals(96 * 128));
        let mut out = unwritten(&stream, ElementKind::F32, 96, 256);
        linear_transposed(&stream, &mut workspace, &g, &[layer.part(0)], &mut out).unwrap();
    }
    let Some(blas) = workspace.blas() else { return };
    assert_eq!(blas.refused(), 0);
    assert!(blas.taken() >= 7, "{}", blas.taken());
}

/// An algorithm with split sums may round each part to the output type, unless it is configured otherwise.
#[test]
fn long_sums_are_kept_in_32_bits_to_their_end() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(5);
    for multiplier in MULTIPLIERS {
        let mut workspace = workspace(&stream, multiplier);
        for (kind, x_kind) in [(TensorType::F16, ElementKind::F16), (TensorType::Bf16, ElementKind::Bf16)] {
            let layer = Layer::new(&stream, kind, 16, 4096, &mut random);
            check(&stream, &mut workspace, &layer, (x_kind, x_kind), 72, &mut random);
        }
    }
}

#[test]
fn a_rows_outputs_have_the_same_bits_whatever_rows_are_beside_it() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(5);
    let mut workspace = workspace(&stream, Multiplier::Ours);
    for kind in TYPES {
        let x_kind = match kind {
            TensorType::F32 => ElementKind::F32,
            TensorType::F16 => ElementKind::F16,
            _ => ElementKind::Bf16,
        };
        let inputs = if kind.block_elements() == 256 { 2304 } else { 2080 };
        let layer = Layer::new(&stream, kind, 20, inputs, &mut random);
        let most = if kind == TensorType::F32 { 8 } else { 32 };
        let x = random.normals(most * inputs);
        let mut multiplied = |rows: &[f32]| {
            let x = matrix(&stream, x_kind, inputs, rows);
            let mut out = unwritten(&stream, ElementKind::F32, rows.len() / inputs, 20);
            linear(&stream, &mut workspace, &x, &[layer.part(0)], &mut out).unwrap();
            out.to_vec(&stream).unwrap()
        };
        let alone: Vec<f32> = x.chunks(inputs).flat_map(&mut multiplied).collect();
        for rows in [2, 3, 5, 8, 9, 16, 17, 32] {
            let rows = most.min(rows);
            let together = multiplied(&x[(most - rows) * inputs..]);
            assert_eq!(together, alone[(most - rows) * 20..], "{kind:?}, {rows} rows");
        }
    }
}

#[test]
fn parts_lie_side_by_side_and_columns_between_them_stay_as_they_are() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(6);
    let kinds = [TensorType::Bf16, TensorType::Bf16, TensorType::Q4_1, TensorType::Q4_1, TensorType::Q8_0];
    let inputs = 160;
    let layers: Vec<Layer> = kinds
        .iter()
        .zip([40, 8, 24, 17, 5])
        .map(|(&kind, outputs)| Layer::new(&stream, kind, outputs, inputs, &mut random))
        .collect();
    let columns = [0, 40, 56, 80, 99];
    for multiplier in MULTIPLIERS {
        let mut workspace = workspace(&stream, multiplier);
        for rows in [1, 9, 70] {
            let x = rounded(ElementKind::Bf16, &random.normals(rows * inputs));
            let parts: Vec<LinearPart<'_>> =
                layers.iter().zip(columns).map(|(layer, column)| layer.part(column)).collect();
            let mut out = filled(&stream, rows, 104, 7.0);
            linear(
                &stream,
                &mut workspace,
                &matrix(&stream, ElementKind::Bf16, inputs, &x),
                &parts,
                &mut out,
            )
            .unwrap();
            let mut want = vec![7.0; rows * 104];
            for (layer, column) in layers.iter().zip(columns) {
                let outputs = layer.weight.rows();
                for (row, values) in layer.wanted(&x).chunks(outputs).enumerate() {
                    want[row * 104 + column..][..outputs].copy_from_slice(values);
                }
            }
            let what = format!("{multiplier:?}, {rows} rows");
            assert_close(&what, &out.to_vec(&stream).unwrap(), &want, 5.0 * epsilon(ElementKind::Bf16));
        }
    }
}

fn filled(stream: &CudaStream, rows: usize, width: usize, value: f32) -> Matrix {
    matrix(stream, ElementKind::F32, width, &vec![value; rows * width])
}

#[test]
fn gradients_go_back_through_all_parts() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(7);
    for multiplier in MULTIPLIERS {
        let mut workspace = workspace(&stream, multiplier);
        for kind in TYPES {
            let inputs = inputs(kind);
            let first = Layer::new(&stream, kind, 40, inputs, &mut random);
            let second = Layer::new(&stream, kind, 13, inputs, &mut random);
            for (g_kind, rows) in [
                (ElementKind::F32, 1),
                (ElementKind::F32, 66),
                (ElementKind::Bf16, 7),
                (ElementKind::F16, 65),
            ] {
                let g = rounded(g_kind, &random.normals(rows * 64));
                let mut out = unwritten(&stream, ElementKind::F32, rows, inputs);
                let parts = [first.part(0), second.part(48)];
                linear_transposed(
                    &stream,
                    &mut workspace,
                    &matrix(&stream, g_kind, 64, &g),
                    &parts,
                    &mut out,
                )
                .unwrap();
                let want = gradient(&g, &first, 0).zip(gradient(&g, &second, 48)).map(|(a, b)| a + b);
                let what = format!("{multiplier:?} {kind:?}, {rows} rows of {g_kind:?}");
                let tolerance = tolerance(kind, g_kind, ElementKind::F32);
                assert_close(&what, &out.to_vec(&stream).unwrap(), &want.collect::<Vec<f32>>(), tolerance);
            }
        }
    }
}

/// A single chain of additions over these outputs is 3e-6 off.
#[test]
fn gradients_over_a_large_vocabulary_keep_their_digits() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(9);
    let (outputs, inputs) = (32_768, 32);
    let layer = Layer::new(&stream, TensorType::F32, outputs, inputs, &mut random);
    let g = random.normals(outputs);
    let mut wanted = vec![0.0; inputs];
    for (row, &g) in layer.values.chunks_exact(inputs).zip(&g) {
        wanted.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(g) * f64::from(w));
    }
    let length = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    for multiplier in MULTIPLIERS {
        let mut workspace = workspace(&stream, multiplier);
        let mut out = unwritten(&stream, ElementKind::F32, 1, inputs);
        let g = matrix(&stream, ElementKind::F32, outputs, &g);
        linear_transposed(&stream, &mut workspace, &g, &[layer.part(0)], &mut out).unwrap();
        let out = out.to_vec(&stream).unwrap();
        let apart: Vec<f64> = out.iter().zip(&wanted).map(|(&got, wanted)| f64::from(got) - wanted).collect();
        let off = length(&apart) / length(&wanted);
        assert!(off <= 1.5e-6, "{multiplier:?}: {off:e} off");
    }
}

/// Contribution of one layer to the gradient: g has rows of 64.
fn gradient(g: &[f32], layer: &Layer, column: usize) -> impl Iterator<Item = f32> {
    let (outputs, inputs) = (layer.weight.rows(), layer.weight.columns());
    let own: Vec<f32> = g.chunks(64).flat_map(|row| row[column..column + outputs].to_vec()).collect();
    reference::linear_transposed(&own, &layer.values, g.len() / 64, outputs, inputs).into_iter()
}

#[test]
fn a_layer_of_32_bit_activations_is_linear() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(8);
    let mut workspace = workspace(&stream, Multiplier::Library);
    for kind in [TensorType::Bf16, TensorType::Q4_1, TensorType::Q6K] {
        let (rows, inputs) = (5, 512);
        let layer = Layer::new(&stream, kind, 32, inputs, &mut random);
        let part = LinearPart { weight: &layer.weight, bias: None, column: 0 };
        let (x, mask) = (random.normals(rows * inputs), random.normals(rows * inputs));
        let masked: Vec<f32> = x.iter().zip(&mask).map(|(x, mask)| x + 100.0 * mask).collect();
        let mut apply = |x: &[f32]| {
            let mut out = unwritten(&stream, ElementKind::F32, rows, 32);
            let x = matrix(&stream, ElementKind::F32, inputs, x);
            linear(&stream, &mut workspace, &x, &[part], &mut out).unwrap();
            out.to_vec(&stream).unwrap()
        };
        let (plain, of_mask, of_masked) = (apply(&x), apply(&mask), apply(&masked));
        let unmasked: Vec<f32> = of_masked.iter().zip(&of_mask).map(|(a, b)| a - 100.0 * b).collect();
        assert_close(&format!("{kind:?}"), &unmasked, &plain, 2e-4);
    }
}

#[test]
fn no_rows_are_no_work() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(9);
    let layer = Layer::new(&stream, TensorType::Bf16, 8, 16, &mut random);
    let mut workspace = workspace(&stream, Multiplier::Ours);
    let x = matrix(&stream, ElementKind::Bf16, 16, &[]);
    let mut out = unwritten(&stream, ElementKind::Bf16, 0, 8);
    linear(&stream, &mut workspace, &x, &[layer.part(0)], &mut out).unwrap();
    assert!(out.to_vec(&stream).unwrap().is_empty());
}
