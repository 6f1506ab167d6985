//! The target of the crate `fuzz` that `HOLOBIONT_FUZZ_TARGET` names.
#![no_main]

use std::{env, sync::LazyLock};

static TARGET: LazyLock<&fuzz::Target> = LazyLock::new(|| {
    fuzz::named(&env::var("HOLOBIONT_FUZZ_TARGET").expect("HOLOBIONT_FUZZ_TARGET names the target"))
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = (TARGET.run)(input);
});
