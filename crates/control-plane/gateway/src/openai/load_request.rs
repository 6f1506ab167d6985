//! Reads the body of a load: by path, by URI, or from files in the request.

use std::path::PathBuf;

use super::strict_fields::StrictFields;
use crate::{
    adapters::{
        FetchError, LoadRequest, Replace,
        uri::{AdapterUri, UriError, digest::Digest},
    },
    errors::ApiError,
};

/// Source of an adapter to load.
#[derive(Debug)]
pub enum LoadSource {
    /// The path in the request.
    Path,
    Uri(AdapterUri),
}

/// Reads the body of a load by path or URI, with the field `digest` that pins the weights of a URI.
///
/// # Errors
/// Names the field that is missing, malformed or unknown.
pub fn read_load(body: &[u8], base_name: &str) -> Result<(LoadRequest, LoadSource), ApiError> {
    let mut fields = StrictFields::parse(body)?;
    let digest = fields.text("digest")?;
    let request = load_fields(&mut fields, base_name)?;
    fields.finish()?;
    let digest = digest.map(|text| Digest::parse(&text).ok_or_else(malformed_digest)).transpose()?;
    let path = request.path.to_string_lossy();
    if !path.contains("://") {
        let message = "'digest' needs a URI in 'lora_path', such as file:///DIRECTORY or hf://ORG/NAME";
        return match digest {
            None => Ok((request, LoadSource::Path)),
            Some(_) => Err(ApiError::invalid("digest", message)),
        };
    }
    let refused = |error: UriError| ApiError::from(FetchError::from(error)).of("lora_path");
    let uri: AdapterUri = path.parse().map_err(refused)?;
    let uri = match digest {
        None => uri,
        Some(digest) => uri.with_digest(digest).map_err(refused)?,
    };
    Ok((request, LoadSource::Uri(uri)))
}

fn malformed_digest() -> ApiError {
    ApiError::invalid("digest", "'digest' must be 'sha256:' and 64 hexadecimal digits")
}

/// Reads the body of a load from files in the request.
///
/// # Errors
/// Names the field that is missing, malformed or unknown.
pub fn load_request(body: &[u8], base_name: &str) -> Result<LoadRequest, ApiError> {
    let mut fields = StrictFields::parse(body)?;
    let request = load_fields(&mut fields, base_name)?;
    fields.finish()?;
    Ok(request)
}

/// Takes the fields that all loads have.
fn load_fields(fields: &mut StrictFields, base_name: &str) -> Result<LoadRequest, ApiError> {
    let name = fields.required_text("lora_name")?;
    let path = PathBuf::from(fields.required_text("lora_path")?);
    let in_place = fields.flag("load_inplace", false)?;
    let replace = match (fields.text("expected_generation")?, in_place) {
        (Some(generation), _) => Replace::Only(generation),
        (None, true) => Replace::Always,
        (None, false) => Replace::Never,
    };
    let tenant = fields.text("tenant")?;
    let pinned = fields.optional_flag("pinned")?;
    take_harmless(fields, base_name)?;
    Ok(LoadRequest { name, path, replace, tenant, pinned })
}

/// Accepts fields of vLLM without effect here, and the name of the served base.
fn take_harmless(fields: &mut StrictFields, base_name: &str) -> Result<(), ApiError> {
    // vLLM's number of the adapter; this API identifies adapters by name.
    fields.integer("lora_int_id", 0..=i64::MAX)?;
    // The names of an adapter's tensors say whether factors of all experts lie in one tensor.
    fields.flag("is_3d_lora_weight", false)?;
    match fields.text("base_model_name")? {
        Some(base) if base != base_name => Err(ApiError::invalid(
            "base_model_name",
            format!(
                "there is no base model '{base}' for this adapter; omit 'base_model_name', or name '{base_name}'"
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_pins_a_uri_and_nothing_else() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let read = |path: &str, digest: &str| {
            let body = serde_json::json!({"lora_name": "a", "lora_path": path, "digest": digest});
            read_load(body.to_string().as_bytes(), "base")
        };
        let (_, source) = read("hf://org/name@v1", &digest).unwrap();
        let LoadSource::Uri(uri) = source else { panic!("it is a URI") };
        assert_eq!(uri.to_string(), format!("hf://org/name@v1#sha256={}", "a".repeat(64)));
        for (path, digest, param) in [
            ("/srv/sql", digest.as_str(), "'digest'"),
            ("hf://org/name", "sha256:ab", "'digest'"),
            ("gs://bucket/x", &digest, "its scheme"),
        ] {
            let error = read(path, digest).unwrap_err().to_string();
            assert!(error.contains(param), "{error}");
        }
    }
}
