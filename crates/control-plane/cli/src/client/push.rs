//! Pushes of adapters to a gateway.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io,
    path::Path,
};

use super::{ClientError, GatewayClient};

/// PEFT's names of an adapter's files.
pub(crate) const CONFIG_FILE: &str = "adapter_config.json";
pub(crate) const WEIGHT_FILE: &str = "adapter_model.safetensors";

/// Adapter files to push.
#[derive(Debug)]
pub(crate) struct PushedFile {
    /// PEFT's configuration as the value of a header.
    config: String,
    weights: File,
}

impl PushedFile {
    /// Returns the weights with the text of their configuration.
    pub(crate) fn new(config: &str, weights: File) -> Self {
        Self { config: header_value(config), weights }
    }

    /// Opens the files of the adapter in `directory`.
    pub(crate) fn of_directory(directory: &Path) -> io::Result<Self> {
        let config = fs::read_to_string(directory.join(CONFIG_FILE))?;
        Ok(Self::new(&config, File::open(directory.join(WEIGHT_FILE))?))
    }
}

/// Returns a name for the path of a URL, with slashes kept.
fn in_path(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let encode = |byte: u8| if is_plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    name.bytes().map(encode).collect()
}

/// Returns JSON as the value of an HTTP header: in one line, with escapes for characters outside of ASCII.
fn header_value(json: &str) -> String {
    let mut value = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            // Strings contain no control characters, so these stand between tokens.
            character if character.is_control() => value.push(' '),
            character if character.is_ascii() => value.push(character),
            character => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    // Writing to a string never fails.
                    let _ = write!(value, "\\u{unit:04x}");
                }
            }
        }
    }
    value
}

impl GatewayClient {
    /// Pushes an adapter under `name` with the parameters `query`, and returns the answer's body as text.
    pub(crate) fn push(
        &self,
        name: &str,
        query: &[(&str, &str)],
        file: PushedFile,
    ) -> Result<String, ClientError> {
        let mut request = self.agent.post(format!("{}/v1/adapters/{}", self.url, in_path(name)));
        for (parameter, value) in query {
            request = request.query(parameter, value);
        }
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let request = request.header("x-adapter-config", file.config);
        self.text(request.content_type("application/x-safetensors").send(file.weights))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_name_in_a_path_keeps_its_slashes_and_nothing_else_that_means_something() {
        assert_eq!(in_path("run/1-a.b~c_d"), "run/1-a.b~c_d");
        assert_eq!(in_path("a b?c%ä"), "a%20b%3Fc%25%C3%A4");
    }

    #[test]
    fn a_configuration_is_the_same_json_in_one_line_of_ascii() {
        let config =
            json!({ "r": 8, "base_model_name_or_path": "Käfer-\u{1f41e}\n", "target_modules": ["q_proj"] });
        let value = header_value(&serde_json::to_string_pretty(&config).unwrap());
        assert!(value.bytes().all(|byte| (b' '..0x7f).contains(&byte)), "{value}");
        assert_eq!(serde_json::from_str::<Value>(&value).unwrap(), config);
    }
}
