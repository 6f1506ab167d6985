//! The PEFT configuration of weights that arrive without a file of their own for it: text in the metadata of
//! a safetensors file.
//!
//! ```text
//! header length u64, little-endian | header: JSON | tensors
//! header = { "__metadata__": { "adapter_config": "{...}", ... }, "<tensor>": { ... }, ... }
//! ```

use model_files::strict_json;
use serde_json::Value;

/// Name of the configuration in the metadata.
pub(crate) const METADATA_KEY: &str = "adapter_config";
/// Maximum length of a header, as executors read it.
const MAX_HEADER_BYTES: u64 = 1 << 20;
const LENGTH_BYTES: usize = 8;

/// Collects the header of a safetensors file.
#[derive(Debug, Default)]
pub(super) struct HeaderReader {
    bytes: Vec<u8>,
}

impl HeaderReader {
    /// Takes the next bytes of the file. Returns the configuration once the header is complete.
    ///
    /// # Errors
    /// If the header is too long, or has no configuration.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<Option<String>, String> {
        let wanted = self.missing_bytes()?;
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(wanted)]);
        // The first bytes say how many follow.
        let more = self.missing_bytes()?.min(bytes.len().saturating_sub(wanted));
        self.bytes.extend_from_slice(&bytes[bytes.len().min(wanted)..][..more]);
        if self.missing_bytes()? > 0 {
            return Ok(None);
        }
        config_of(&self.bytes[LENGTH_BYTES..]).map(Some)
    }

    /// Returns the number of bytes up to the end of the length, and then up to the end of the header.
    fn missing_bytes(&self) -> Result<usize, String> {
        let Some(length) = self.bytes.first_chunk::<LENGTH_BYTES>() else {
            return Ok(LENGTH_BYTES - self.bytes.len());
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES {
            return Err(format!(
                "the body is no safetensors file that this server reads: its header would have {length} bytes, and \
                 the limit is {MAX_HEADER_BYTES}"
            ));
        }
        let end = usize::try_from(length).unwrap_or(usize::MAX).saturating_add(LENGTH_BYTES);
        Ok(end - self.bytes.len())
    }

    /// Returns the error of a file that ended before its header.
    pub(super) fn cut(&self) -> String {
        format!("the body ends after {} bytes, in the middle of the safetensors header", self.bytes.len())
    }
}

fn config_of(header: &[u8]) -> Result<String, String> {
    let header = strict_json::parse(header);
    let mut header = header.map_err(|error| format!("the safetensors header is not JSON: {error}"))?;
    match header["__metadata__"][METADATA_KEY].take() {
        Value::String(config) => Ok(config),
        Value::Null => Err(format!(
            "the weights have no PEFT configuration; put the text of adapter_config.json into the safetensors \
             metadata as '{METADATA_KEY}', or into the header x-adapter-config"
        )),
        _ => Err(format!("'{METADATA_KEY}' in the safetensors metadata must be JSON as a string")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(b"tensors");
        file
    }

    #[test]
    fn the_configuration_is_found_however_the_file_is_cut() {
        let file = file(r#"{"__metadata__":{"format":"pt","adapter_config":"{\"r\":8}"},"t":{"shape":[1]}}"#);
        for piece in [1, 3, 7, 8, 9, 40, file.len()] {
            let mut reader = HeaderReader::default();
            let found = file.chunks(piece).find_map(|bytes| reader.take(bytes).unwrap());
            assert_eq!(found.as_deref(), Some(r#"{"r":8}"#), "in pieces of {piece}");
        }
    }

    #[test]
    fn a_header_without_a_configuration_is_refused_by_what_it_lacks() {
        let refused = |header: &str| HeaderReader::default().take(&file(header)).unwrap_err();
        assert!(refused("{}").contains("x-adapter-config"));
        assert!(refused(r#"{"__metadata__":{"format":"pt"}}"#).contains("x-adapter-config"));
        assert!(refused(r#"{"__metadata__":{"adapter_config":{}}}"#).contains("must be JSON as a string"));
        assert!(refused("{").contains("is not JSON"));
        assert!(refused(r#"{"a":1,"a":2}"#).contains("is not JSON"));
        let endless = HeaderReader::default().take(&[0xff; 16]).unwrap_err();
        assert!(endless.contains("the limit is 1048576"), "{endless}");
        let mut cut = HeaderReader::default();
        assert_eq!(cut.take(&file("{}")[..9]).unwrap(), None);
        assert!(cut.cut().contains("after 9 bytes"), "{}", cut.cut());
    }
}
