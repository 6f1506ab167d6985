//! A separate bucket for a test: S3 by moto, which keeps all data in memory.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
};

use super::wire::FaultyRelay;

const NAME: &str = "fleet";

/// Credentials of any user, because moto does not check them.
const AUTHORIZATION: &str = "Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, \
                             SignedHeaders=host, Signature=0";

/// A server with an empty bucket, which ends on drop.
#[derive(Debug)]
pub struct Bucket {
    server: Child,
    port: u16,
    /// Relay through which the tested processes reach the server.
    pub wire: FaultyRelay,
}

impl Bucket {
    /// Starts a server and creates the bucket.
    ///
    /// # Errors
    /// If moto is not installed.
    pub fn start() -> Result<Self, &'static str> {
        let found = super::find("moto_server", [crate::paths::root().join(".venv/bin")]);
        let program =
            found.ok_or("there is no moto; .venv/bin/pip install -r scripts/python-requirements.txt")?;
        let port = super::free_port();
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).stdin(Stdio::null());
        let server = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let bucket = Self { server, port, wire: FaultyRelay::to(port) };
        crate::eventually("the bucket is made", || bucket.put("", b"").is_ok());
        Ok(bucket)
    }

    /// Returns the bucket's URL for a setting.
    #[must_use]
    pub fn url(&self) -> String {
        format!("s3://{NAME}/adapters")
    }

    /// Returns the server's port of loopback without the relay.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the environment variables for access through the relay.
    #[must_use]
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        self.variables_at(SocketAddr::from(([127, 0, 0, 1], self.wire.port())))
    }

    /// Returns the environment variables for access at `address`.
    #[must_use]
    pub fn variables_at(&self, address: SocketAddr) -> Vec<(&'static str, String)> {
        let endpoint = format!("http://{address}");
        let variables = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
        ];
        variables.map(|(name, value)| (name, value.to_owned())).to_vec()
    }

    /// Replaces the object `name`.
    pub fn replace(&self, name: &str, bytes: &[u8]) {
        self.put(&format!("/{name}"), bytes).expect("moto takes it");
    }

    /// Returns the objects of the bucket, by name.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let listed = self.ask("GET", "?list-type=2", b"").expect("moto lists it");
        let keys = listed.split("<Key>").skip(1);
        keys.map(|rest| rest.split("</Key>").next().unwrap_or_default().to_owned()).collect()
    }

    fn put(&self, path: &str, body: &[u8]) -> std::io::Result<()> {
        self.ask("PUT", path, body).map(drop)
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        let length = body.len();
        write!(
            stream,
            "{method} /{NAME}{path} HTTP/1.1\r\nHost: s3\r\n{AUTHORIZATION}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        )?;
        stream.write_all(body)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        match answer.starts_with("HTTP/1.1 200") {
            true => Ok(answer),
            false => Err(std::io::Error::other(answer)),
        }
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
