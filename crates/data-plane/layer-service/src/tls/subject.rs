//! The common name of a certificate's subject, from a walk along the DER that reads nothing else.
//!
//! ```text
//! Certificate     SEQUENCE { TBSCertificate SEQUENCE {
//!                   [0] version OPTIONAL, serial, algorithm, issuer, validity, subject, ... }, ... }
//! subject         SEQUENCE OF SET OF SEQUENCE { OID, text }
//! ```
//!
//! The input is a certificate that the handshake has verified; other bytes give no name and no panic.

use rustls_pki_types::CertificateDer;

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_ID: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
/// The tag `[0]`, constructed.
const VERSION: u8 = 0xa0;
/// The object identifier 2.5.4.3.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
/// Serial, algorithm, issuer, validity.
const BEFORE_SUBJECT: usize = 4;

/// Returns the common name of the subject, if there is exactly one.
#[must_use]
pub fn common_name<'a>(certificate: &'a CertificateDer<'_>) -> Option<&'a str> {
    let (whole, _) = tagged(SEQUENCE, certificate)?;
    let (mut fields, _) = tagged(SEQUENCE, whole)?;
    if let Some((_, rest)) = tagged(VERSION, fields) {
        fields = rest;
    }
    for _ in 0..BEFORE_SUBJECT {
        fields = element(fields)?.rest;
    }
    let (mut names, _) = tagged(SEQUENCE, fields)?;
    let mut found = None;
    while !names.is_empty() {
        let (mut set, rest) = tagged(SET, names)?;
        names = rest;
        while !set.is_empty() {
            let (attribute, rest) = tagged(SEQUENCE, set)?;
            set = rest;
            let (kind, text) = tagged(OBJECT_ID, attribute)?;
            if kind == COMMON_NAME && found.replace(text_of(text)?).is_some() {
                return None;
            }
        }
    }
    found
}

fn text_of(bytes: &[u8]) -> Option<&str> {
    let Element { tag: UTF8_STRING | PRINTABLE_STRING, value, rest: [] } = element(bytes)? else {
        return None;
    };
    std::str::from_utf8(value).ok()
}

/// A DER element and the bytes after it.
struct Element<'a> {
    tag: u8,
    value: &'a [u8],
    rest: &'a [u8],
}

fn tagged(tag: u8, bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    element(bytes).filter(|element| element.tag == tag).map(|element| (element.value, element.rest))
}

/// Reads one element. Lengths of up to three bytes suffice, because no certificate of a handshake is longer.
fn element(bytes: &[u8]) -> Option<Element<'_>> {
    let (&tag, bytes) = bytes.split_first()?;
    let (&length, bytes) = bytes.split_first()?;
    let (length, bytes) = match length {
        short @ 0..=0x7f => (usize::from(short), bytes),
        long @ 0x81..=0x83 => {
            let (digits, bytes) = bytes.split_at_checked(usize::from(long & 0x7f))?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), bytes)
        }
        _ => return None,
    };
    let (value, rest) = bytes.split_at_checked(length)?;
    Some(Element { tag, value, rest })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn certificate(names: &[(DnType, &str)]) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["elsewhere.example".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, name) in names {
            params.distinguished_name.push(kind.clone(), *name);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_tenant_is_the_common_name_of_the_subject() {
        let names = [(DnType::OrganizationName, "Acme"), (DnType::CommonName, "alice")];
        assert_eq!(common_name(&certificate(&names)), Some("alice"));
        assert_eq!(common_name(&certificate(&names[..1])), None);
        assert_eq!(common_name(&certificate(&[])), None);
    }

    proptest! {
        #[test]
        fn bytes_that_are_no_certificate_give_no_panic(at in 0usize..400, byte: u8, cut in 0usize..400) {
            let mut bytes = certificate(&[(DnType::CommonName, "alice")]).to_vec();
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
            bytes.truncate(bytes.len().saturating_sub(cut));
            let _ = common_name(&CertificateDer::from(bytes));
        }
    }
}
