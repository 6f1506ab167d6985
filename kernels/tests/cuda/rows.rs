//! Copies of rows, and changes of single columns.

use kernels::{
    cuda::{
        DeviceVec, Matrix,
        rows::{add_weighted, append_rows, cap, gather, place, scale_columns, split_rows},
    },
    lora::ElementKind,
    reference,
};

use crate::support::{KINDS, SeededNumbers, assert_close, matrix, rounded, stream, unwritten};

#[test]
fn gathered_rows_are_those_that_were_named() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(1);
    for kind in KINDS {
        for width in [1, 7, 8, 576, 3000] {
            let values = rounded(kind, &random.normals(20 * width));
            let named: Vec<u32> = (0..31).map(|_| random.below(20) as u32).collect();
            let want: Vec<f32> = named[..30]
                .iter()
                .flat_map(|&row| &values[row as usize * width..][..width])
                .copied()
                .collect();
            let mut got = Matrix::new(stream.cuda(), kind).unwrap();
            let rows = DeviceVec::from_slice(&stream, &named).unwrap();
            gather(&stream, &matrix(&stream, kind, width, &values), &rows, 30, &mut got).unwrap();
            assert_eq!(got.to_vec(&stream).unwrap(), want, "{kind:?} {width}");
        }
    }
}

#[test]
fn a_row_that_does_not_exist_is_gathered_as_nan() {
    let Some(stream) = stream() else { return };
    for kind in KINDS {
        for width in [3, 16] {
            let rows = DeviceVec::from_slice(&stream, &[0, 2, u32::MAX]).unwrap();
            let mut got = unwritten(&stream, kind, 3, width);
            gather(&stream, &matrix(&stream, kind, width, &vec![1.0; 2 * width]), &rows, 3, &mut got)
                .unwrap();
            let got = got.to_vec(&stream).unwrap();
            assert_eq!(got[..width], vec![1.0; width]);
            assert!(got[width..].iter().all(|value| value.is_nan()), "{kind:?} {width}");
        }
    }
}

#[test]
fn rows_are_added_with_their_weights_to_those_they_name() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(5);
    for kind in KINDS {
        for width in [1, 7, 576, 3000] {
            let from = rounded(kind, &random.normals(4 * width));
            let sums = random.normals(6 * width);
            // One of these columns does not exist.
            let (named, weights) = ([4, 0, 9, 5], [0.25, -1.5, 7.0, 0.5]);
            let mut want = sums.clone();
            for (nth, (&row, &weight)) in named.iter().zip(&weights).enumerate().filter(|(nth, _)| *nth != 2)
            {
                for column in 0..width {
                    want[row * width + column] += weight * from[nth * width + column];
                }
            }
            let rows = DeviceVec::from_slice(&stream, &named.map(|row| row as u32)).unwrap();
            let weights = DeviceVec::from_slice(&stream, &weights).unwrap();
            let mut got = matrix(&stream, ElementKind::F32, width, &sums);
            add_weighted(&stream, &matrix(&stream, kind, width, &from), &rows, &weights, &mut got).unwrap();
            assert_close("added", &got.to_vec(&stream).unwrap(), &want, 1e-6);
        }
    }
}

#[test]
fn a_cap_bends_all_numbers_towards_it() {
    let Some(stream) = stream() else { return };
    let values: Vec<f32> = SeededNumbers::new(7).normals(3 * 333).iter().map(|value| 20.0 * value).collect();
    let mut got = matrix(&stream, ElementKind::F32, 333, &values);
    cap(&stream, &mut got, 9.0).unwrap();
    let want: Vec<f32> =
        values.iter().map(|&value| reference::capped(f64::from(value), 9.0) as f32).collect();
    assert_close("capped", &got.to_vec(&stream).unwrap(), &want, 1e-5);
}

#[test]
fn only_the_named_columns_of_the_named_rows_are_scaled() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(2);
    let (rows, width, column, scaled) = (6, 700, 37, 600);
    for kind in KINDS {
        let (values, factors) = (rounded(kind, &random.normals(rows * width)), random.normals(scaled));
        let mut got = matrix(&stream, kind, width, &values);
        let on_device = DeviceVec::from_slice(&stream, &factors).unwrap();
        scale_columns(&stream, &mut got, 2..5, column, &on_device).unwrap();
        let want = |(at, &value): (usize, &f32)| match (at / width, (at % width).checked_sub(column)) {
            (2..5, Some(c)) if c < scaled => value * factors[c],
            _ => value,
        };
        let want: Vec<f32> = values.iter().enumerate().map(want).collect();
        assert_eq!(got.to_vec(&stream).unwrap(), rounded(kind, &want), "{kind:?}");
    }
}

#[test]
fn placed_rows_overwrite_only_their_columns() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(3);
    let (rows, width, column, placed, at) = (5, 300, 11, 280, 77);
    for kind in KINDS {
        let (values, new) = (rounded(kind, &random.normals(rows * width)), random.normals(at + 2 * placed));
        let mut got = matrix(&stream, kind, width, &values);
        let on_device = DeviceVec::from_slice(&stream, &new).unwrap();
        place(&stream, &mut got, 1..3, column, &on_device, at, placed).unwrap();
        let want = |(place, &value): (usize, &f32)| match (place / width, (place % width).checked_sub(column))
        {
            (row @ 1..3, Some(c)) if c < placed => new[at + (row - 1) * placed + c],
            _ => value,
        };
        let want: Vec<f32> = values.iter().enumerate().map(want).collect();
        assert_eq!(got.to_vec(&stream).unwrap(), rounded(kind, &want), "{kind:?}");
    }
}

#[test]
fn rows_of_the_host_stand_behind_a_matrixs_own_and_come_back() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(5);
    for kind in KINDS {
        let (own, new) = (rounded(kind, &random.normals(3 * 40)), random.normals(200 * 40));
        let mut all = matrix(&stream, kind, 40, &own);
        append_rows(&stream, &mut all, &new).unwrap();
        assert_eq!(all.rows(), 203);
        let mut back = vec![f32::NAN; new.len()];
        split_rows(&stream, &mut all, &mut back).unwrap();
        assert_eq!(back, rounded(kind, &new), "{kind:?}");
        assert_eq!(all.to_vec(&stream).unwrap(), own, "{kind:?}");
    }
}
