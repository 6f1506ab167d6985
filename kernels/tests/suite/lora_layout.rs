//! Layouts that do not fit their memory are rejected.

use std::sync::Arc;

use kernels::lora::{
    ElementKind, LayoutError, LoraMatrix, LoraPrecision, MAX_RANK, MatrixLayout, SharedBytes,
};
use proptest::prelude::*;

use crate::support::{floats, random};

const RANK: usize = 19;
const COLUMNS: usize = 45;
const ROWS: usize = 33;

fn appended(precision: LoraPrecision) -> (SharedBytes, MatrixLayout) {
    let (a, b) = (floats(&mut random(1), RANK * COLUMNS), floats(&mut random(2), ROWS * RANK));
    // Previous bytes are kept, and the factors start after them.
    let mut bytes = vec![7; 5];
    let layout = MatrixLayout::append(&mut bytes, RANK, COLUMNS, ROWS, 1.0, &a, &b, precision);
    assert!(bytes.starts_with(&[7; 5]));
    (Arc::new(bytes), layout)
}

const PRECISIONS: [LoraPrecision; 3] = [LoraPrecision::Exact, LoraPrecision::Compact, LoraPrecision::Bf16];

#[test]
fn a_layout_fits_the_bytes_it_was_appended_to_and_none_fewer() {
    for precision in PRECISIONS {
        let (bytes, layout) = appended(precision);
        let matrix = LoraMatrix::over(&bytes, layout).unwrap();
        assert_eq!((matrix.rank(), matrix.columns(), matrix.rows()), (RANK, COLUMNS, ROWS));
        let all = (*bytes).as_ref();
        let short: SharedBytes = Arc::new(all[..all.len() - 1].to_vec());
        let refused = LoraMatrix::over(&short, layout).unwrap_err();
        assert_eq!(refused, LayoutError::Bounds { offset: layout.b.offset, available: all.len() - 1 });
    }
}

#[test]
fn hostile_layouts_are_refused_each_with_its_own_error() {
    let (bytes, good) = appended(LoraPrecision::Exact);
    let refused = |change: fn(&mut MatrixLayout)| {
        let mut layout = good;
        change(&mut layout);
        LoraMatrix::over(&bytes, layout).unwrap_err()
    };
    assert_eq!(refused(|m| m.rank = 0), LayoutError::Rank(0));
    assert_eq!(refused(|m| m.rank = MAX_RANK + 1), LayoutError::Rank(MAX_RANK + 1));
    assert_eq!(refused(|m| m.rank = usize::MAX), LayoutError::Rank(usize::MAX));
    assert_eq!(refused(|m| m.columns = 0), LayoutError::Shape { columns: 0, rows: ROWS });
    assert_eq!(refused(|m| m.rows = 0), LayoutError::Shape { columns: COLUMNS, rows: 0 });
    assert!(matches!(refused(|m| m.scale = f32::NAN), LayoutError::Scale(_)));
    assert!(matches!(refused(|m| m.scale = f32::INFINITY), LayoutError::Scale(_)));
    assert!(matches!(refused(|m| m.a.offset += 1), LayoutError::Alignment(_)));
    assert!(matches!(refused(|m| m.b.offset += 32), LayoutError::Alignment(_)));
    assert!(matches!(refused(|m| m.a.offset = usize::MAX - 63), LayoutError::Bounds { .. }));
    assert!(matches!(refused(|m| m.b.offset += 64), LayoutError::Bounds { .. }));
    assert!(matches!(refused(|m| m.columns = usize::MAX), LayoutError::Bounds { .. }));
    assert!(matches!(refused(|m| m.columns = usize::MAX / RANK), LayoutError::Bounds { .. }));
    assert!(matches!(refused(|m| m.rows = usize::MAX / 4 + 1), LayoutError::Bounds { .. }));
    assert!(matches!(refused(|m| m.rank += 1), LayoutError::Bounds { .. }));
}

#[test]
fn a_code_is_a_kind_or_none() {
    for kind in [ElementKind::F32, ElementKind::F16, ElementKind::Bf16] {
        assert_eq!(ElementKind::from_code(kind as u8), Some(kind));
    }
    assert!((3..=u8::MAX).all(|code| ElementKind::from_code(code).is_none()));
}

proptest! {
    #[test]
    fn no_layout_makes_the_check_overflow_or_accepts_more_than_there_is(
        numbers in prop::array::uniform5(prop_oneof![0..2000usize, any::<usize>()]),
        kinds in prop::array::uniform2(0..3u8),
        available in prop_oneof![0..1_000_000usize, any::<usize>()],
    ) {
        let [rank, columns, rows, a, b] = numbers;
        let factor = |code, offset| kernels::lora::FactorLayout {
            kind: ElementKind::from_code(code).unwrap(),
            offset: offset / 64 * 64,
        };
        let layout = MatrixLayout { rank, columns, rows, scale: 1.0, a: factor(kinds[0], a), b: factor(kinds[1], b) };
        if layout.check(available).is_ok() {
            let bytes = |kind: ElementKind, numbers: u128| numbers * kind.bytes() as u128;
            let a_end = layout.a.offset as u128 + bytes(layout.a.kind, rank as u128 * columns as u128);
            let b_end = layout.b.offset as u128 + bytes(layout.b.kind, rank as u128 * rows as u128);
            prop_assert!(a_end.max(b_end) <= available as u128);
        }
    }
}
