//! The `tojson` filter as transformers defines it: Python's `json.dumps` with `ensure_ascii=False`.

use std::io;

use minijinja::{Error, ErrorKind, Value, value::Kwargs};
use serde::Serialize as _;
use serde_json::ser::Formatter;

/// Maximum number of indentation spaces; more has no use and multiplies with the depth.
const MAX_INDENT: usize = 16;

/// Implements the filter `value tojson(indent=..., ensure_ascii=..., separators=..., sort_keys=...)`.
#[expect(clippy::needless_pass_by_value, reason = "the signature minijinja's filters have")]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let separators: Option<(String, String)> =
        options.get::<Option<Value>>("separators")?.as_ref().map(pair).transpose()?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;

    let mut json = serde_json::to_value(value).map_err(unserializable)?;
    if sorted == Some(true) {
        json.sort_all_objects();
    }
    let default_item = if indent.is_some() { "," } else { ", " };
    let (item, key) = separators.unwrap_or_else(|| (default_item.to_owned(), ": ".to_owned()));
    let style = PythonStyle {
        item,
        key,
        indent: indent.map(|indent| indent.min(MAX_INDENT)),
        ascii: ascii.unwrap_or(false),
        depth: 0,
        has_items: false,
    };
    let mut out = Vec::new();
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, style)).map_err(unserializable)?;
    Ok(Value::from(String::from_utf8_lossy(&out).into_owned()))
}

fn unserializable(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::BadSerialization, "tojson cannot write this value").with_source(error)
}

/// Reads the separators as in Python: a tuple of two strings.
fn pair(value: &Value) -> Result<(String, String), Error> {
    let texts: Vec<String> = value.try_iter()?.map(|text| text.to_string()).collect();
    let pair: Result<[String; 2], _> = texts.try_into();
    let [item, key] = pair.map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, "tojson needs two separators, of items and keys")
    })?;
    Ok((item, key))
}

/// Layout of the output of Python's `json` module.
struct PythonStyle {
    item: String,
    key: String,
    indent: Option<usize>,
    ascii: bool,
    depth: usize,
    has_items: bool,
}

impl PythonStyle {
    fn open<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if std::mem::replace(&mut self.has_items, true) {
            self.new_line(out)?;
        }
        out.write_all(bracket)
    }

    fn begin_item<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.has_items = true;
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.new_line(out)
    }

    fn new_line<W: ?Sized + io::Write>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(out, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonStyle {
    fn write_f64<W: ?Sized + io::Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, out: &mut W, text: &str) -> io::Result<()> {
        if !self.ascii {
            return out.write_all(text.as_bytes());
        }
        for character in text.chars() {
            if character.is_ascii() {
                write!(out, "{character}")?;
            } else {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(out, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

/// Formats like Python's `repr(float)`: the shortest digits that read back equal, with an exponent below
/// 1e-4 and from 1e16 on.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.000_012_5, "1.25e-05"),
            (0.0, "0.0"),
        ] {
            assert_eq!(python_float(value), expected);
        }
    }
}
