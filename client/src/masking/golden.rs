//! Golden values from `tests/golden/make_ring.py`, an independent implementation; Python tests use them too.

use std::fs;

use kernels::Modulus;
use serde_json::Value;
use shmproto::layer::seeded_rows::{Key, SeededRows};

use super::fixed_point::{from_whole, to_whole};

fn golden(part: &str) -> Vec<Value> {
    let path = testkit::paths::golden("ring.json");
    let all: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    all[part].as_array().unwrap().clone()
}

fn list<T>(of: &Value, read: impl Fn(&Value) -> Option<T>) -> Vec<T> {
    of.as_array().unwrap().iter().map(|value| read(value).unwrap()).collect()
}

fn small<T: TryFrom<i64>>(value: &Value) -> Option<T> {
    T::try_from(value.as_i64()?).ok()
}

fn floats(of: &Value) -> Vec<f32> {
    list(of, small::<u32>).into_iter().map(f32::from_bits).collect()
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn rows_become_the_whole_numbers_that_exact_fractions_become_and_back() {
    let conversions = golden("conversions");
    assert!(conversions.len() > 20);
    for golden in conversions {
        let row = floats(&golden["row"]);
        let mut whole = vec![0; row.len()];
        let exponent = to_whole(&row, small(&golden["bits"]).unwrap(), &mut whole).unwrap();
        assert_eq!(Some(exponent), small(&golden["exponent"]), "{golden}");
        let signed: Vec<i64> = whole.into_iter().map(u64::cast_signed).collect();
        assert_eq!(signed, list(&golden["whole"], Value::as_i64), "{golden}");
        let answers: Vec<u64> =
            list(&golden["answers"], Value::as_i64).into_iter().map(i64::cast_unsigned).collect();
        let mut back = vec![0.0; answers.len()];
        from_whole(
            Modulus::Bits64,
            &answers,
            exponent + small::<i32>(&golden["weight_exponent"]).unwrap(),
            &mut back,
        );
        assert_eq!(bits(&back), bits(&floats(&golden["back"])), "{golden}");
    }
}

#[test]
fn rows_of_a_key_are_those_of_the_cipher_as_it_was_published() {
    let draws = golden("draws");
    assert!(!draws.is_empty());
    for golden in draws {
        let hex = golden["key"].as_str().unwrap();
        let key: Vec<u8> =
            (0..32).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
        let draw = SeededRows {
            key: Key::new(key[..].try_into().unwrap()),
            first: golden["first"].as_u64().unwrap(),
        };
        let rows = list(&golden["rows"], |row| Some(list(row, Value::as_u64)));
        let width = rows[0].len();
        let mut made = vec![0_u64; 2 * width];
        draw.fill(0, 2 * width, bytemuck::cast_slice_mut(&mut made));
        assert_eq!(made, rows.concat(), "{golden}");
    }
}
