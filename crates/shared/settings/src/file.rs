//! Reads a field of a deployment file or an environment variable.

use std::{fmt, str::FromStr};

use serde::{Deserializer, de};

/// Reads a field through its `FromStr`, written as any scalar of TOML or as a text: `8`, `"8"` and `true` all
/// work. A list of texts is read as one text with spaces between them.
///
/// # Errors
/// Fails if the value is neither a scalar nor a list of texts, or if its `FromStr` refuses it.
pub fn setting<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr,
    T::Err: fmt::Display,
{
    struct Scalar;

    impl<'de> de::Visitor<'de> for Scalar {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string, a number, a boolean or a list of strings")
        }
        fn visit_str<E>(self, text: &str) -> Result<String, E> {
            Ok(text.to_owned())
        }
        fn visit_i64<E>(self, number: i64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_f64<E>(self, number: f64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_bool<E>(self, flag: bool) -> Result<String, E> {
            Ok(flag.to_string())
        }
        fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<String, A::Error> {
            let mut texts: Vec<String> = Vec::new();
            while let Some(text) = list.next_element()? {
                texts.push(text);
            }
            Ok(texts.join(" "))
        }
    }

    let text = deserializer.deserialize_any(Scalar)?;
    text.parse().map(Some).map_err(|cause: T::Err| de::Error::custom(format!("`{text}`: {cause}")))
}
