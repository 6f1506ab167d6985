//! A client that pushes weights over one connection, and takes the time from their last byte to the answer.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Weights, and a configuration that changes with each push.
#[derive(Debug)]
pub(super) struct PushClient {
    stream: BufReader<TcpStream>,
    weights: Vec<u8>,
    config: Value,
    pushed: usize,
}

impl PushClient {
    /// Connects to the gateway at `port`, with the weights in `adapter`.
    ///
    /// # Errors
    /// If the files cannot be read, or nothing listens.
    pub(super) fn new(port: u16, adapter: &Path) -> Result<Self> {
        let read = |name| fs::read(adapter.join(name)).with_context(|| format!("cannot read {name}"));
        let config = serde_json::from_slice(&read("adapter_config.json")?).context("no configuration")?;
        let stream = TcpStream::connect(("127.0.0.1", port)).context("the gateway is gone")?;
        stream.set_nodelay(true).context("no TCP connection")?;
        let weights = read("adapter_model.safetensors")?;
        Ok(Self { stream: BufReader::new(stream), weights, config, pushed: 0 })
    }

    /// Begins to count pushes at `number`, so that the versions of several clients differ.
    pub(super) fn begin_at(&mut self, number: usize) {
        self.pushed = number;
    }

    /// Number of pushes so far.
    pub(super) fn pushed(&self) -> usize {
        self.pushed
    }

    /// Pushes a new version of `name`, and returns the milliseconds from its last byte to the answer.
    ///
    /// # Errors
    /// Fails if the gateway refuses the push.
    pub(super) fn push(&mut self, name: &str) -> Result<f64> {
        self.pushed += 1;
        let alpha = self.config["r"].as_f64().unwrap_or(1.0) * (1.0 + self.pushed as f64 * 1e-6);
        self.config["lora_alpha"] = json!(alpha);
        let head = format!(
            "POST /v1/adapters/{name}?durable=false HTTP/1.1\r\nhost: 127.0.0.1\r\n\
             content-type: application/x-safetensors\r\nx-adapter-config: {}\r\ncontent-length: {}\r\n\r\n",
            self.config,
            self.weights.len()
        );
        let stream = self.stream.get_mut();
        stream.write_all(head.as_bytes()).context("the gateway takes no push")?;
        stream.write_all(&self.weights).context("the gateway takes no weights")?;
        let sent = Instant::now();
        let (status, body) = self.answer()?;
        let took_ms = sent.elapsed().as_secs_f64() * 1e3;
        ensure!(status.contains(" 200 "), "a push was answered with {status}: {body}");
        Ok(took_ms)
    }

    fn answer(&mut self) -> Result<(String, String)> {
        let (mut status, mut length) = (String::new(), 0);
        self.stream.read_line(&mut status).context("no answer to a push")?;
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).context("an answer broke off")?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().context("an answer has no length")?;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).context("an answer broke off")?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }
}
