//! cuBLASLt, if it is installed.

use kernels::cuda::{Blas, BlasError};

use crate::support::{device, is_stand_in};

#[test]
fn cublaslt_opens_beside_the_stand_in_and_may_be_missing_elsewhere() {
    let Some(cuda) = device() else { return };
    match Blas::open(&cuda) {
        Ok(blas) => assert!(!format!("{blas:?}").is_empty()),
        Err(error) => {
            assert!(!is_stand_in(&cuda), "the stand-in's library was not found: {error}");
            assert_eq!(error, BlasError::NotFound, "what is there works");
            assert!(error.to_string().contains("HOLOBIONT_CUDA_LIBRARIES"), "{error}");
        }
    }
}

#[test]
fn each_part_of_the_program_may_open_cublaslt_for_itself() {
    let Some(cuda) = device() else { return };
    let Ok(first) = Blas::open(&cuda) else { return };
    let second = Blas::open(&cuda).unwrap();
    drop(first);
    assert!(!format!("{second:?}").is_empty());
}
