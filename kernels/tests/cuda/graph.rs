//! Capture of CUDA graphs under concurrent events.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kernels::{
    cuda::{CudaError, DeviceVec, Graph, rows::gather},
    lora::ElementKind,
};

use crate::support::{matrix, stream, unwritten};

#[test]
fn a_stream_runs_what_it_is_given_after_a_record_of_it_failed() {
    let Some(stream) = stream() else { return };
    let from = matrix(&stream, ElementKind::F32, 4, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let order = DeviceVec::from_slice(&stream, &[1u32, 0]).unwrap();
    let mut to = unwritten(&stream, ElementKind::F32, 2, 4);
    let refused = CudaError::Refused { what: "be tested", reason: "no reason".to_owned() };
    let failed = Graph::capture(&stream, || Err(refused.clone()));
    assert_eq!(failed.unwrap_err(), refused);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _ = Graph::capture(&stream, || {
            gather(&stream, &from, &order, 2, &mut to)?;
            panic!("as a launcher does where shapes do not fit")
        });
    }));
    assert!(panicked.is_err());
    gather(&stream, &from, &order, 2, &mut to).unwrap();
    assert_eq!(to.to_vec(&stream).unwrap(), [5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 3.0, 4.0]);
}
