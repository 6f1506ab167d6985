//! Patterns for the `format` keyword of strings.

/// Representation of a format in a grammar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Format {
    /// A format that the library supports under this name.
    Known(&'static str),
    /// Strings that match this pattern.
    Pattern(String),
    /// Either of two formats of the library.
    Either(&'static str, &'static str),
    /// Any string: the format only describes the purpose.
    Any,
}

/// Matches hours, minutes and seconds with at most nine fraction digits.
const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?";
const ZONE: &str = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
/// Matches a calendar date; the last part is February 29 in leap years.
const DATE: &str = concat!(
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|",
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|",
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
);
const OCTET: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const POINTER: &str = r"(?:/(?:[^~/]|~[01])*)*";

/// Returns the format with this name in JSON Schema, OpenAPI, Pydantic and others; `None` for an unknown
/// name.
pub(super) fn of(name: &str) -> Option<Format> {
    Some(match name {
        "date" => whole(DATE),
        "time" => whole(&format!("{TIME}{ZONE}")),
        "date-time" => whole(&format!("{DATE}[tT]{TIME}{ZONE}")),
        "duration" => whole(&duration()),
        "uuid" => Format::Known("uuid"),
        "email" | "idn-email" | "name-email" => Format::Known("email"),
        "hostname" | "idn-hostname" => Format::Known("hostname"),
        "ipv4" => Format::Known("ipv4"),
        "ipv6" => Format::Known("ipv6"),
        "ipvanyaddress" | "ip" | "ip-address" => Format::Either("ipv4", "ipv6"),
        "ipvanynetwork" | "ipvanyinterface" => whole(&network()),
        "uri" | "iri" | "url" | "http-url" | "multi-host-uri" => Format::Known("uri"),
        "uri-reference" | "iri-reference" => whole(&reference()),
        "base64" | "byte" => whole(&base64("+/")),
        "base64url" => whole(&base64("_-")),
        "decimal" => whole(r"-?(?:0|[1-9][0-9]{0,31})(?:\.[0-9]{1,32})?"),
        "double" | "float" => whole(r"-?(?:0|[1-9][0-9]{0,31})(?:\.[0-9]{1,32})?(?:[eE][+-]?[0-9]{1,3})?"),
        "int32" | "int64" | "sint32" | "sint64" => whole("-?(?:0|[1-9][0-9]{0,18})"),
        "uint32" | "uint64" => whole("(?:0|[1-9][0-9]{0,18})"),
        "json-pointer" => whole(POINTER),
        "relative-json-pointer" => whole(&format!("(?:0|[1-9][0-9]{{0,8}})(?:#|{POINTER})")),
        "path" | "file-path" | "directory-path" | "password" | "binary" | "text" | "textarea" | "string"
        | "markdown" | "html" | "unknown" => Format::Any,
        _ => return uuid_of_version(name),
    })
}

fn whole(pattern: &str) -> Format {
    Format::Pattern(format!("^(?:{pattern})$"))
}

fn uuid_of_version(name: &str) -> Option<Format> {
    let version = name.strip_prefix("uuid")?;
    if !matches!(version, "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8") {
        return None;
    }
    let pattern = format!(
        "[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}"
    );
    Some(whole(&pattern))
}

/// Returns the pattern of ISO 8601 durations with at most nine digits a number, or six from days upwards.
fn duration() -> String {
    let of = |unit: &str, most: u8, rest: &str| {
        let rest = if rest.is_empty() { String::new() } else { format!("(?:{rest})?") };
        format!("[0-9]{{1,{most}}}{unit}{rest}")
    };
    let second = r"[0-9]{1,9}(?:\.[0-9]{1,9})?S";
    let minute = of("M", 9, second);
    let hour = of("H", 9, &minute);
    let time = format!("T(?:{hour}|{minute}|{second})");
    let day = of("D", 6, "");
    let month = of("M", 4, &day);
    let year = of("Y", 4, &month);
    format!("P(?:(?:{year}|{month}|{day})(?:{time})?|{time}|{})", of("W", 5, ""))
}

fn network() -> String {
    let four = format!(r"(?:{OCTET}\.){{3}}{OCTET}(?:/(?:3[0-2]|[12]?[0-9]))?");
    let six = r"(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|(?:[0-9a-fA-F]{1,4}:){1,6}:";
    format!("{four}|(?:{six})(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?")
}

/// Returns the pattern of an absolute or relative URI reference.
fn reference() -> String {
    let sign = r"[a-zA-Z0-9\-._~!$&'()*+,;=@]|%[0-9a-fA-F]{2}";
    format!(r"(?:[a-zA-Z][a-zA-Z0-9+\-.]*:)?(?:{sign})*(?:[/?](?:[:/?]|{sign})*)?(?:#(?:[:/?]|{sign})*)?")
}

fn base64(signs: &str) -> String {
    let digit = format!("[A-Za-z0-9{signs}]");
    format!("(?:{digit}{{4}})*(?:{digit}{{2}}==|{digit}{{3}}=)?")
}

#[cfg(test)]
mod tests {
    use super::{
        super::patterns::{self, finds},
        *,
    };

    #[test]
    fn formats_take_what_their_writers_write_and_end() {
        for (name, taken, refused) in [
            ("time", &["17:00:00Z", "17:00:00.123456789+01:00"][..], &["17:00", "17:00:00.1234567890Z"][..]),
            ("date-time", &["2024-02-29T23:59:59.5z"], &["2026-02-29T00:00:00Z", "2026-02-28"]),
            (
                "duration",
                &["P3DT4H59M", "PT36H", "P1Y2M10DT2H30M", "P4W", "PT0.5S"],
                &["P", "PT", "P1234567D"],
            ),
            ("uuid4", &["0b1e4c6a-9f3d-4d2e-8a51-0f1e2d3c4b5a"], &["0b1e4c6a-9f3d-1d2e-8a51-0f1e2d3c4b5a"]),
            ("base64", &["", "QUJD", "QQ==", "QUI="], &["Q", "QQ=", "Q_=="]),
            ("ipvanynetwork", &["10.0.0.0/8", "192.168.1.1", "2001:db8::/32"], &["10.0.0.0/33", "1.2.3"]),
            ("decimal", &["0", "-1.50", "123456789012"], &["", "1e5", "00"]),
            ("int64", &["-9007199254740993"], &["1.5", "-"]),
            ("json-pointer", &["", "/a/~1b"], &["a", "/~2"]),
        ] {
            let Some(Format::Pattern(pattern)) = of(name) else { panic!("{name} is a pattern") };
            assert_eq!(patterns::plain(&pattern), Ok(vec![pattern.clone()]), "{name}");
            assert!(taken.iter().all(|text| finds(&pattern, text)), "{name}");
            assert!(!refused.iter().any(|text| finds(&pattern, text)), "{name}");
        }
        assert_eq!(of("colour"), None);
    }
}
