//! Declares structs of shared memory: one cache line of atomics, whose layout is asserted at the declaration.
//! The declaration also gives a text for the layout hash and a table that `docs/PROTOCOL.md` must draw.

pub(crate) const LINE_BYTES: usize = 64;

/// Declares one cache line of atomics with the offset of each field.
macro_rules! line {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $offset:literal $field:ident: $kind:ident,)* }) => {
        $(#[$doc])*
        #[repr(C, align(64))]
        #[derive(Debug, Default)]
        pub(crate) struct $name { $($(#[$field_doc])* pub(crate) $field: $kind,)* }

        #[cfg(not(loom))]
        const _: () = {
            assert!(size_of::<$name>() == $crate::cache_line::LINE_BYTES && align_of::<$name>() == $crate::cache_line::LINE_BYTES);
            $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
        };

        impl $name {
            /// Table that `docs/PROTOCOL.md` must draw: offset, bytes and name of each field.
            #[cfg(all(test, not(loom)))]
            pub(crate) const FIELDS: &'static [(usize, usize, &'static str)] =
                &[$(($offset, size_of::<$kind>(), stringify!($field)),)*];

            /// Layout as text, for the layout hash.
            pub(crate) const TEXT: &'static str =
                concat!(stringify!($name), $(" ", $offset, " ", stringify!($field), " ", stringify!($kind),)* "\n");
        }
    };
}
pub(crate) use line;

/// Returns FNV-1a of all `texts`: a checksum against mistakes, not against attacks.
pub(crate) const fn fnv1a(texts: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut text = 0;
    while text < texts.len() {
        let bytes = texts[text].as_bytes();
        let mut next = 0;
        while next < bytes.len() {
            hash = (hash ^ bytes[next] as u64).wrapping_mul(0x0100_0000_01b3);
            next += 1;
        }
        text += 1;
    }
    hash
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    pub(crate) const DOCUMENT: &str = include_str!("../../docs/PROTOCOL.md");

    /// Returns offset, bytes and name of each row of the table under a heading.
    pub(crate) fn drawn(heading: &str) -> Vec<(usize, usize, String)> {
        let heading = format!("\n### `{heading}`\n");
        let (_, section) = DOCUMENT.split_once(&heading).unwrap_or_else(|| panic!("no heading {heading:?}"));
        let rows = section.lines().take_while(|line| !line.starts_with('#'));
        let rows = rows.filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let [_, offset, bytes, name, ..] = cells[..] else { return None };
            Some((offset.parse().ok()?, bytes.parse().ok()?, name.trim_matches('`').to_owned()))
        });
        rows.collect()
    }
}
