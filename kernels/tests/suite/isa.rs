//! The instruction sets of this CPU, or of the emulator of its matrix unit (`scripts/amx-on-cpu`).

use kernels::Isa;

#[test]
fn the_matrix_unit_is_there_where_a_run_requires_it() {
    let is_required = std::env::var_os("HOLOBIONT_REQUIRE_AMX").is_some_and(|value| value == "1");
    let available = Isa::available();
    assert_eq!((available.first(), available.last()), (Some(&Isa::best()), Some(&Isa::Portable)));
    assert!(!is_required || Isa::best().is_fast_at_bf16(), "HOLOBIONT_REQUIRE_AMX=1, but {available:?}");
}
