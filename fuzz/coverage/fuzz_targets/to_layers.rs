//! The target `to_layers` of the crate `fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = (fuzz::named("to_layers").run)(input);
});
