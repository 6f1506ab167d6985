//! The base-executor on a GPU or its stand-in (`scripts/cuda-on-cpu`). Without either these tests are skipped
//! with a message, unless `HOLOBIONT_REQUIRE_CUDA=1`.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is what is wanted")]

mod bridge;
#[path = "../suite/worker.rs"]
#[allow(dead_code, reason = "a part of it is about passes on the CPU")]
mod worker;

use std::sync::Arc;

use kernels::cuda::{Cuda, CudaError};

/// The first GPU; `None` with a message if there is none.
fn cuda() -> Option<Arc<Cuda>> {
    match Cuda::open(0) {
        Ok(cuda) => Some(cuda),
        Err(error @ (CudaError::NoDriver | CudaError::NoDevice { .. })) => {
            let required = std::env::var_os("HOLOBIONT_REQUIRE_CUDA").is_some_and(|value| value == "1");
            assert!(!required, "{error}");
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}
