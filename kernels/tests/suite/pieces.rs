//! Matrices over memory that is refilled repeatedly, whole and in pieces: the same bits as a matrix packed in
//! place.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;

use kernels::{
    Isa, LinearPart, PackedLayout, PackedMatrix, PageSlab, SumFrom, TensorType, linear, linear_transposed,
    linear_transposed_rounded, linear_unrounded,
};

use crate::{
    linear_transposed::transposed_bf16,
    support::{self, TYPES, activations, bits, floats, pool, random},
};

const ROWS: usize = 200;
const WIDTH: usize = 256;

fn stored(kind: TensorType) -> (Vec<u8>, PackedMatrix) {
    let data = support::stored(kind, ROWS, WIDTH, &mut random(7));
    let matrix = PackedMatrix::pack(kind, &data, ROWS, WIDTH).unwrap();
    (data, matrix)
}

/// The matrix in pieces of at most `rows` rows, each packed separately, side by side in a slab; and the start
/// of each.
fn pieces(kind: TensorType, data: &[u8], rows: usize) -> (PageSlab, Vec<(usize, PackedMatrix)>) {
    let form = PackedLayout::of(kind, data, ROWS, WIDTH).unwrap();
    let known = PackedLayout::known(kind, ROWS, WIDTH, form.unit()).unwrap();
    let row_bytes = data.len() / ROWS;
    let mut slab = PageSlab::new(known.bytes()).unwrap();
    let cuts: Vec<_> = (0..ROWS).step_by(rows).map(|first| first..ROWS.min(first + rows)).collect();
    for rows in &cuts {
        let panels = &mut slab.as_mut_slice().unwrap()[known.offset(rows.start)..known.offset(rows.end)];
        panels.fill(0xA5);
        known.of_rows(rows).pack(&data[rows.start * row_bytes..rows.end * row_bytes], panels);
    }
    let matrix = |rows: &Range<usize>| {
        let at = known.offset(rows.start);
        (rows.start, PackedMatrix::within(&slab, at, known.of_rows(rows)).unwrap())
    };
    let matrices = cuts.iter().map(matrix).collect();
    (slab, matrices)
}

fn part(matrix: &PackedMatrix, column: usize) -> LinearPart<'_> {
    LinearPart { matrix, bias: None, column }
}

#[test]
fn pieces_that_were_packed_apart_give_the_bits_of_the_whole() {
    let (isa, pool) = (Isa::best(), &mut pool(2));
    for (kind, rows) in TYPES.into_iter().flat_map(|kind| [64, 128, ROWS].map(|rows| (kind, rows))) {
        let (data, whole) = stored(kind);
        let (_slab, pieces) = pieces(kind, &data, rows);
        let x = activations(pool, isa, &floats(&mut random(1), 3 * WIDTH), 3, whole.forms());
        for product in [linear, linear_unrounded] {
            let (mut wanted, mut out) = (vec![0.0; 3 * ROWS], vec![0.0; 3 * ROWS]);
            product(pool, isa, &x, &[part(&whole, 0)], &mut wanted, ROWS);
            for (first, piece) in &pieces {
                product(pool, isa, &x, &[part(piece, *first)], &mut out, ROWS);
            }
            assert_eq!(bits(&out), bits(&wanted), "{kind:?}, {rows} rows");
        }
        let g = floats(&mut random(2), 3 * ROWS);
        for product in [linear_transposed, linear_transposed_rounded, transposed_bf16] {
            let (mut wanted, mut out) = (vec![9.0; 3 * WIDTH], vec![9.0; 3 * WIDTH]);
            product(pool, isa, &g, 3, ROWS, &[part(&whole, 0)], SumFrom::Zero, &mut wanted);
            for (first, piece) in &pieces {
                let from = if *first == 0 { SumFrom::Zero } else { SumFrom::Out };
                product(pool, isa, &g, 3, ROWS, &[part(piece, *first)], from, &mut out);
            }
            assert_eq!(bits(&out), bits(&wanted), "{kind:?}, {rows} rows, backward");
        }
    }
}

#[test]
fn memory_is_not_filled_again_while_a_matrix_lies_in_it() {
    let kind = TensorType::Q4_1;
    let (data, whole) = stored(kind);
    let (mut slab, mut pieces) = pieces(kind, &data, ROWS);
    assert!(slab.as_mut_slice().is_none());
    let mut rows = [vec![0.0; whole.columns()], vec![0.0; whole.columns()]];
    whole.read_row(17, &mut rows[0]);
    pieces[0].1.read_row(17, &mut rows[1]);
    assert_eq!(rows[0], rows[1]);
    pieces.clear();
    assert!(slab.as_mut_slice().is_some());
}

#[test]
fn a_matrix_that_reaches_beyond_its_memory_is_none() {
    let form = PackedLayout::known(TensorType::F32, 64, 64, 1.0).unwrap();
    let slab = PageSlab::new(form.bytes()).unwrap();
    assert_eq!(slab.bytes(), PageSlab::memory_bytes(form.bytes()));
    assert!(PackedMatrix::within(&slab, 0, form).is_some());
    assert!(PackedMatrix::within(&slab, 64, form).is_none());
    assert!(PackedMatrix::within(&slab, usize::MAX, form).is_none());
    assert!(PackedLayout::known(TensorType::Q4_1, 64, 33, 1.0).is_none(), "rows of whole blocks");
}

#[test]
fn rows_that_are_gathered_give_the_bits_that_they_give_in_place() {
    let (isa, pool) = (Isa::best(), &mut pool(2));
    // Unordered, with repetitions, and none of a multiple of sixteen.
    let rows: Vec<usize> = (0..37).map(|at| (at * 71 + 5) % ROWS).chain([3, 3]).collect();
    for kind in TYPES {
        let (data, whole) = stored(kind);
        let (_slab, pieces) = pieces(kind, &data, 64);
        let of = |at: usize| (&pieces[rows[at] / 64].1, rows[at] % 64);
        let gathered = PackedMatrix::gathered(rows.len(), of).unwrap();
        let x = activations(pool, isa, &floats(&mut random(1), 3 * WIDTH), 3, whole.forms());
        for product in [linear, linear_unrounded] {
            let (mut all, mut out) = (vec![0.0; 3 * ROWS], vec![0.0; 3 * rows.len()]);
            product(pool, isa, &x, &[part(&whole, 0)], &mut all, ROWS);
            product(pool, isa, &x, &[part(&gathered, 0)], &mut out, rows.len());
            let wanted: Vec<f32> =
                all.chunks_exact(ROWS).flat_map(|all| rows.iter().map(|&row| all[row])).collect();
            assert_eq!(bits(&out), bits(&wanted), "{kind:?}");
        }
    }
}
