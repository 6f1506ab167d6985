//! The W3C `traceparent` header: `00-<trace>-<parent>-<flags>` in hexadecimal.

use std::fmt;

use crate::random::random_u64;

pub(crate) const HEADER: &str = "traceparent";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trace {
    /// Trace id, from the caller or new.
    pub trace: u128,
    pub span: u64,
    /// Span id of the caller, if sent.
    pub parent: Option<u64>,
    /// Whether the trace is sampled; yes unless the caller says no.
    pub sampled: TraceFlag,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TraceFlag {
    Yes,
    No,
}

impl Trace {
    /// Continues the caller's trace, or begins one if the header is absent or malformed.
    #[must_use]
    pub(crate) fn after(header: Option<&str>) -> Self {
        let own = || u128::from(random_u64()) << 64 | u128::from(random_u64() | 1);
        match header.and_then(parse) {
            Some((trace, parent, sampled)) => {
                Self { trace, span: random_u64() | 1, parent: Some(parent), sampled }
            }
            None => Self { trace: own(), span: random_u64() | 1, parent: None, sampled: TraceFlag::Yes },
        }
    }
}

impl fmt::Display for Trace {
    /// Writes the header that names this request's span as the parent.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "00-{:032x}-{:016x}-{:02x}",
            self.trace,
            self.span,
            u8::from(self.sampled == TraceFlag::Yes)
        )
    }
}

fn parse(header: &str) -> Option<(u128, u64, TraceFlag)> {
    let mut parts = header.trim().split('-');
    let version = hex(parts.next()?, 2)?;
    let trace = hex(parts.next()?, 32).filter(|trace| *trace != 0)?;
    let parent = hex(parts.next()?, 16).filter(|parent| *parent != 0)?;
    let flags = hex(parts.next()?, 2)?;
    // Later versions may have more parts; version 0 has none, and 255 is invalid.
    if version == 255 || (version == 0 && parts.next().is_some()) {
        return None;
    }
    let sampled = if flags & 1 == 1 { TraceFlag::Yes } else { TraceFlag::No };
    Some((trace, u64::try_from(parent).ok()?, sampled))
}

fn hex(text: &str, digits: usize) -> Option<u128> {
    let is_hex = text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

    #[test]
    fn a_callers_trace_goes_on_under_a_span_of_our_own() {
        let trace = Trace::after(Some(HEADER));
        assert_eq!((trace.parent, trace.sampled), (Some(0x00f0_67aa_0ba9_02b7), TraceFlag::No));
        let header = trace.to_string();
        assert!(
            header.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && header.ends_with("-00"),
            "{header}"
        );
        assert_ne!(header, HEADER);
    }

    #[test]
    fn what_is_no_traceparent_begins_a_trace() {
        let long = format!("{HEADER}-00");
        for bad in ["", "00", &HEADER.to_uppercase(), &HEADER.replace("4bf9", "4bfg"), &long, "00-0-0-0"] {
            assert_eq!(Trace::after(Some(bad)).parent, None, "{bad}");
        }
        let zeros = "00-00000000000000000000000000000000-00f067aa0ba902b7-01";
        assert_eq!(Trace::after(Some(zeros)).parent, None);
        assert_ne!(Trace::after(None).trace, Trace::after(None).trace);
    }
}
