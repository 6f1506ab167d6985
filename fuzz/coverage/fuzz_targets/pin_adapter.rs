//! The target `pin_adapter` of the crate `fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = (fuzz::named("pin_adapter").run)(input);
});
