//! Low-rank deltas on the device, against sums in 64 bits.

mod blocks;
mod layer;

use kernels::{
    Isa,
    cuda::{
        CudaStream, Graph, Matrix, Replay,
        lora::{LoraPlan, LoraSegment, add_deltas},
    },
    lora::{ElementKind, sum_ranks},
};

use crate::support::{KINDS, SeededNumbers, assert_close, epsilon, matrix, rounded, stream};
use layer::Layer;

/// `out`, rows of `stride`, with the deltas of `segments`, each with its layer.
fn expected(x: &[f32], out: &[f32], stride: usize, segments: &[(&Layer, LoraSegment<'_>)]) -> Vec<f32> {
    let mut want: Vec<f64> = out.iter().map(|value| f64::from(*value)).collect();
    for (layer, segment) in segments {
        let columns = layer.host.columns();
        for row in segment.first_row..segment.first_row + segment.rows {
            let delta = layer.delta(&x[row * columns..][..columns], segment.first_rank);
            for (at, delta) in delta.iter().enumerate() {
                want[row * stride + segment.column + at] += delta;
            }
        }
    }
    want.into_iter().map(|value| value as f32).collect()
}

/// Maximum error of a result: its own rounding, and that of 32-bit sums or of 16-bit parts. Tensor cores
/// truncate sums, so their errors accumulate.
fn tolerance(kind: ElementKind) -> f32 {
    epsilon(kind) + if kind == ElementKind::F32 { 1e-5 } else { 5e-5 }
}

fn plan(stream: &CudaStream, groups: &[Vec<LoraSegment<'_>>]) -> LoraPlan {
    let mut plan = LoraPlan::new(stream.cuda()).unwrap();
    plan.upload(stream, groups).unwrap();
    plan
}

/// Adds the deltas of one group to a copy of `out`.
fn run(
    stream: &CudaStream,
    segments: &[LoraSegment<'_>],
    x: &Matrix,
    kind: ElementKind,
    out: &[f32],
) -> Vec<f32> {
    let plan = plan(stream, &[segments.to_vec()]);
    let mut out = matrix(stream, kind, out.len() / x.rows(), out);
    add_deltas(stream, &plan, 0, x, &mut out).unwrap();
    out.to_vec(stream).unwrap()
}

#[test]
fn mixed_ranks_and_kinds_in_one_batch_are_those_of_the_reference() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(11);
    let (columns, outputs) = (136, 80);
    let ranks = [1, 3, 8, 16, 17, 64, 128];
    let shapes = ranks.iter().flat_map(|&rank| KINDS.map(|kind| (rank, kind)));
    let layers: Vec<Layer> =
        shapes.map(|(rank, kind)| Layer::new(&stream, &mut random, kind, [rank, columns, outputs])).collect();
    // One row before each segment has no adapter.
    let mut first_row = 0;
    let segments: Vec<LoraSegment<'_>> = layers
        .iter()
        .zip([1, 2, 17, 33, 5].into_iter().cycle())
        .map(|(layer, rows)| {
            let segment = layer.segment(first_row + 1, rows, 0);
            first_row += 1 + rows;
            segment
        })
        .collect();
    let rows = first_row + 1;
    for kind in KINDS {
        let x = rounded(kind, &random.normals(rows * columns));
        let out = rounded(kind, &random.normals(rows * outputs));
        let got = run(&stream, &segments, &matrix(&stream, kind, columns, &x), kind, &out);
        let pairs: Vec<_> = layers.iter().zip(segments.iter().copied()).collect();
        for (layer, segment) in &pairs {
            let range = segment.first_row * outputs..(segment.first_row + segment.rows) * outputs;
            let want = expected(&x, &out, outputs, &[(layer, *segment)]);
            let what = format!("{kind:?}, {:?}", layer.host);
            assert_close(&what, &got[range.clone()], &want[range.clone()], tolerance(kind));
            let before = range.start - outputs..range.start;
            assert!(
                got[before.clone()].iter().zip(&out[before]).all(|(got, was)| got.to_bits() == was.to_bits()),
                "a row without an adapter is left alone"
            );
        }
    }
}

#[test]
fn awkward_widths_and_columns_are_those_of_the_reference() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(12);
    for [rank, columns, outputs, column, stride] in [
        [4, 70, 37, 3, 45],
        [16, 1, 1, 0, 1],
        [16, 1100, 52, 4, 60],
        [33, 1500, 50, 2, 52],
        [2, 2050, 1040, 0, 1040],
        [20, 9000, 8, 8, 20],
        [6, 20, 100, 1, 104],
    ] {
        for (kind, factors) in KINDS.into_iter().flat_map(|kind| KINDS.map(|factors| (kind, factors))) {
            let layer = Layer::new(&stream, &mut random, factors, [rank, columns, outputs]);
            let rows = [1, 3, 40][random.below(3)];
            let x = rounded(kind, &random.normals(rows * columns));
            let out = rounded(kind, &random.normals(rows * stride));
            let segment = layer.segment(0, rows, column);
            let got = run(&stream, &[segment], &matrix(&stream, kind, columns, &x), kind, &out);
            let want = expected(&x, &out, stride, &[(&layer, segment)]);
            let what = format!("{kind:?} x, {factors:?} {rank} of {columns} to {outputs} at {column}");
            assert_close(&what, &got, &want, tolerance(kind));
        }
    }
}

#[test]
fn every_first_rank_and_the_heads_sums_give_the_whole() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(13);
    let (columns, outputs, rows) = (96, 48, 3);
    for (rank, factors) in [(8, ElementKind::F16), (40, ElementKind::F32), (64, ElementKind::Bf16)] {
        let layer = Layer::new(&stream, &mut random, factors, [rank, columns, outputs]);
        let x = rounded(ElementKind::Bf16, &random.normals(rows * columns));
        let out = random.normals(rows * outputs);
        let x_there = matrix(&stream, ElementKind::Bf16, columns, &x);
        let whole = expected(&x, &out, outputs, &[(&layer, layer.segment(0, rows, 0))]);
        for first_rank in (0..rank).step_by(16).chain([rank]) {
            let segment = LoraSegment { first_rank, ..layer.segment(0, rows, 0) };
            let mut got = run(&stream, &[segment], &x_there, ElementKind::F32, &out);
            let mut head = vec![0.0; rows * outputs];
            sum_ranks(Isa::best(), &x, &layer.host, 0..first_rank, &mut head);
            got.iter_mut().zip(&head).for_each(|(got, head)| *got += head);
            // Workers round the sums of bf16 adapters.
            let tolerance = if factors == ElementKind::Bf16 { 1e-2 } else { 2e-5 };
            assert_close(&format!("{first_rank} of {rank}"), &got, &whole, tolerance);
            if first_rank == rank {
                assert_eq!(got.len(), out.len());
            }
        }
    }
}

#[test]
fn all_groups_of_a_pass_are_one_upload() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(14);
    let kind = ElementKind::Bf16;
    let mut layer =
        |rank, columns, outputs| Layer::new(&stream, &mut random, ElementKind::F16, [rank, columns, outputs]);
    // q, k and v of two adapters, then an empty group, then the down projection of the second.
    let qkv = [
        [layer(16, 64, 64), layer(8, 64, 32), layer(16, 64, 32)],
        [layer(32, 64, 64), layer(32, 64, 32), layer(4, 64, 32)],
    ];
    let down = layer(16, 128, 64);
    let columns = [0, 64, 96];
    let of = |adapter: usize, first_row: usize, rows: usize| {
        let parts = qkv[adapter].iter().zip(columns);
        parts.map(move |(layer, column)| layer.segment(first_row, rows, column)).collect::<Vec<_>>()
    };
    let first: Vec<LoraSegment<'_>> = of(0, 0, 2).into_iter().chain(of(1, 3, 4)).collect();
    let last = vec![down.segment(3, 4, 0)];
    let plan = plan(&stream, &[first.clone(), vec![], last.clone()]);
    assert_eq!(plan.groups(), 3);
    let layers: Vec<&Layer> = qkv.iter().flatten().collect();
    for (index, width, stride, segments, layers) in
        [(0, 64, 128, &first, layers), (1, 64, 128, &vec![], vec![]), (2, 128, 64, &last, vec![&down])]
    {
        let mut random = SeededNumbers::new(15);
        let x = rounded(kind, &random.normals(7 * width));
        let out = rounded(kind, &random.normals(7 * stride));
        let mut there = matrix(&stream, kind, stride, &out);
        add_deltas(&stream, &plan, index, &matrix(&stream, kind, width, &x), &mut there).unwrap();
        let pairs: Vec<_> = layers.into_iter().zip(segments.iter().copied()).collect();
        let want = expected(&x, &out, stride, &pairs);
        assert_close(&format!("group {index}"), &there.to_vec(&stream).unwrap(), &want, tolerance(kind));
    }
}

#[test]
fn a_rows_delta_has_the_same_bits_in_any_company() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(16);
    let (columns, outputs) = (1300, 64);
    for kind in KINDS {
        for factors in KINDS {
            let layer = Layer::new(&stream, &mut random, factors, [40, columns, outputs]);
            let other = Layer::new(&stream, &mut random, ElementKind::F16, [128, columns, outputs]);
            let x = rounded(kind, &random.normals(60 * columns));
            let out = rounded(kind, &random.normals(60 * outputs));
            let all = matrix(&stream, kind, columns, &x);
            let busy = [other.segment(0, 7, 0), layer.segment(8, 45, 0), other.segment(53, 7, 0)];
            let busy = run(&stream, &busy, &all, kind, &out);
            for row in [8, 9, 30, 52] {
                let alone = matrix(&stream, kind, columns, &x[row * columns..][..columns]);
                let range = row * outputs..(row + 1) * outputs;
                let got = run(&stream, &[layer.segment(0, 1, 0)], &alone, kind, &out[range.clone()]);
                let same = got.iter().zip(&busy[range]).all(|(one, two)| one.to_bits() == two.to_bits());
                assert!(same, "{kind:?} x, {factors:?}: row {row}");
            }
        }
    }
}

#[test]
fn padding_to_the_largest_rank_changes_work_but_no_bit() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(17);
    let (columns, outputs, kind) = (128, 64, ElementKind::Bf16);
    let ranks = [8, 16, 64, 128];
    let layers =
        ranks.map(|rank| Layer::new(&stream, &mut random, ElementKind::F16, [rank, columns, outputs]));
    let mut segments: Vec<_> =
        layers.iter().zip([0, 1, 3, 20]).map(|(l, row)| l.segment(row, 1, 0)).collect();
    segments[3].rows = 20;
    segments[2].first_rank = 32;
    let x = matrix(&stream, kind, columns, &random.normals(40 * columns));
    let out = rounded(kind, &random.normals(40 * outputs));
    let [exact, padded] = [LoraPlan::new, LoraPlan::padded].map(|empty| {
        let mut plan = empty(stream.cuda()).unwrap();
        plan.upload(&stream, &[segments.clone()]).unwrap();
        let mut out = matrix(&stream, kind, outputs, &out);
        add_deltas(&stream, &plan, 0, &x, &mut out).unwrap();
        (out.to_vec(&stream).unwrap(), plan.shape().clone())
    });
    assert_eq!(exact.0, padded.0);
    assert_ne!(exact.1, padded.1, "padding is more work");
}

#[test]
fn a_record_is_good_for_every_plan_of_its_shape() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(18);
    let (columns, outputs, kind) = (64, 32, ElementKind::F32);
    let layers = [16, 16, 12, 16]
        .map(|rank| Layer::new(&stream, &mut random, ElementKind::F16, [rank, columns, outputs]));
    let x = random.normals(6 * columns);
    let (x_there, zeroes) = (matrix(&stream, kind, columns, &x), vec![0.0; 6 * outputs]);
    let mut out = matrix(&stream, kind, outputs, &zeroes);
    let batch = |choice: [usize; 3]| {
        let rows = choice.iter().enumerate();
        vec![rows.map(|(at, &which)| layers[which].segment(2 * at, 1, 0)).collect::<Vec<_>>()]
    };
    let mut plan = plan(&stream, &batch([0, 1, 2]));
    let shape = plan.shape().clone();
    add_deltas(&stream, &plan, 0, &x_there, &mut out).unwrap();
    let mut graph = Graph::capture(&stream, || add_deltas(&stream, &plan, 0, &x_there, &mut out)).unwrap();
    for choice in [[2, 0, 3], [3, 3, 1], [3, 3, 1], [0, 1, 2]] {
        let groups = batch(choice);
        plan.upload(&stream, &groups).unwrap();
        assert_eq!(plan.shape(), &shape);
        out.upload(&stream, 0, &zeroes).unwrap();
        // Other tests may free memory meanwhile.
        while graph.launch(&stream).unwrap() == Replay::Stale {
            graph = Graph::capture(&stream, || add_deltas(&stream, &plan, 0, &x_there, &mut out)).unwrap();
        }
        let pairs: Vec<_> =
            choice.iter().map(|&which| &layers[which]).zip(groups[0].iter().copied()).collect();
        let want = expected(&x, &zeroes, outputs, &pairs);
        assert_close(&format!("{choice:?}"), &out.to_vec(&stream).unwrap(), &want, 1e-5);
    }
}
