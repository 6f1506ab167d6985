//! A small HTTP/1.1 client that can stop in the middle.

use std::net::SocketAddr;

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    time::timeout,
};

use crate::harness::WATCHDOG;

#[derive(Debug, Clone)]
pub(crate) struct TestClient {
    address: SocketAddr,
    headers: String,
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Response {
    fn parse(raw: &[u8]) -> Self {
        let end = raw.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("no answer");
        let (head, body) = (std::str::from_utf8(&raw[..end]).unwrap(), &raw[end + 4..]);
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let split = |line: &str| line.split_once(": ").map(|(key, value)| (key.to_owned(), value.to_owned()));
        let headers: Vec<(String, String)> = lines.filter_map(split).collect();
        let chunked = headers.iter().any(|(key, value)| key == "transfer-encoding" && value == "chunked");
        let body = if chunked { unchunked(body) } else { body.to_vec() };
        Self { status, headers, body: String::from_utf8_lossy(&body).into_owned() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {}", self.body)).to_owned()
    }

    pub(crate) fn events(&self) -> Vec<String> {
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        events.filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
    }

    /// Events as JSON, without the last, which must be `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

impl TestClient {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, headers: format!("host: {address}\r\n") }
    }

    pub(crate) fn with_key(&self, key: &str) -> Self {
        self.with_header("authorization", &format!("Bearer {key}"))
    }

    pub(crate) fn with_header(&self, name: &str, value: &str) -> Self {
        Self { headers: format!("{}{name}: {value}\r\n", self.headers), ..self.clone() }
    }

    pub(crate) fn with_host(&self, host: &str) -> Self {
        Self { headers: format!("host: {host}\r\n"), ..self.clone() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) async fn connect(&self) -> BufReader<TcpStream> {
        BufReader::new(TcpStream::connect(self.address).await.unwrap())
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.send("GET", path, "application/json", "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, "application/json", &body.to_string()).await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: impl AsRef<[u8]>,
    ) -> Response {
        let exchange = async { self.open(method, path, content_type, body).await.rest().await };
        timeout(WATCHDOG, exchange).await.expect("an answer")
    }

    pub(crate) async fn open(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: impl AsRef<[u8]>,
    ) -> HttpExchange {
        let body = body.as_ref();
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\n{}connection: close\r\ncontent-type: {content_type}\r\n\
             content-length: {}\r\n\r\n",
            self.headers,
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // A server that rejects a long body may stop reading it.
        let _ = stream.write_all(body).await;
        HttpExchange { stream: BufReader::new(stream), seen: Vec::new() }
    }

    pub(crate) async fn open_post(&self, path: &str, body: &Value) -> HttpExchange {
        self.open("POST", path, "application/json", &body.to_string()).await
    }
}

/// A sent request. Dropping it closes the connection.
pub(crate) struct HttpExchange {
    stream: BufReader<TcpStream>,
    seen: Vec<u8>,
}

impl HttpExchange {
    pub(crate) async fn read_until(&mut self, text: &str) {
        self.read_until_any(&[text]).await;
    }

    pub(crate) async fn read_until_any(&mut self, texts: &[&str]) {
        let mut seen = String::new();
        let read = async {
            while !texts.iter().any(|text| seen.contains(text)) {
                let mut line = String::new();
                let count = self.stream.read_line(&mut line).await.unwrap();
                assert_ne!(count, 0, "ended without {texts:?}: {seen}");
                self.seen.extend_from_slice(line.as_bytes());
                seen.push_str(&line);
            }
        };
        timeout(WATCHDOG, read).await.expect("the text comes");
    }

    /// The whole answer, including earlier reads.
    pub(crate) async fn rest(mut self) -> Response {
        let read = self.stream.read_to_end(&mut self.seen);
        timeout(WATCHDOG, read).await.expect("it ends").unwrap();
        Response::parse(&self.seen)
    }
}

fn unchunked(mut raw: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let end = raw.windows(2).position(|bytes| bytes == b"\r\n").expect("the body ends in a last chunk");
        let size = usize::from_str_radix(std::str::from_utf8(&raw[..end]).unwrap(), 16).unwrap();
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&raw[end + 2..end + 2 + size]);
        raw = &raw[end + 4 + size..];
    }
}
