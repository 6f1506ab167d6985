//! The target `from_layers` of the crate `fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = (fuzz::named("from_layers").run)(input);
});
