//! The target `zmtp` of the crate `fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = (fuzz::named("zmtp").run)(input);
});
