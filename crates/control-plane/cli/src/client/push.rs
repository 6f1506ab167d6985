//! Pushes of adapters to a gateway.

use std::fs::File;

use super::{ClientError, GatewayClient};

/// Adapter files to push.
#[derive(Debug)]
pub(crate) struct PushedFile {
    /// PEFT's configuration as the value of a header.
    pub(crate) config: String,
    pub(crate) weights: File,
}

/// Returns a name for the path of a URL, with slashes kept.
fn in_path(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let encode = |byte: u8| if is_plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    name.bytes().map(encode).collect()
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
    use super::*;

    #[test]
    fn a_name_in_a_path_keeps_its_slashes_and_nothing_else_that_means_something() {
        assert_eq!(in_path("run/1-a.b~c_d"), "run/1-a.b~c_d");
        assert_eq!(in_path("a b?c%ä"), "a%20b%3Fc%25%C3%A4");
    }
}
