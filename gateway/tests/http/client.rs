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
pub(crate) struct Client {
    address: SocketAddr,
    /// Header lines of every request.
    headers: String,
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The error's code.
    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {}", self.body)).to_owned()
    }

    /// The data of server-sent events, in order.
    pub(crate) fn events(&self) -> Vec<String> {
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        events.filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
    }

    /// The events as JSON, without the last, which must be `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, headers: format!("host: {address}\r\n") }
    }

    pub(crate) fn with_key(&self, key: &str) -> Self {
        self.with_header("authorization", &format!("Bearer {key}"))
    }

    pub(crate) fn with_header(&self, name: &str, value: &str) -> Self {
        Self { headers: format!("{}{name}: {value}\r\n", self.headers), ..self.clone() }
    }

    /// Calls the server by another name than its address.
    pub(crate) fn with_host(&self, host: &str) -> Self {
        Self { headers: format!("host: {host}\r\n"), ..self.clone() }
    }

    /// A connection on which nothing has been said.
    pub(crate) async fn connect(&self) -> BufReader<TcpStream> {
        BufReader::new(TcpStream::connect(self.address).await.unwrap())
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.send("GET", path, "application/json", "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, "application/json", &body.to_string()).await
    }

    pub(crate) async fn send(&self, method: &str, path: &str, content_type: &str, body: &str) -> Response {
        let exchange = async { self.open(method, path, content_type, body).await.rest().await };
        timeout(WATCHDOG, exchange).await.expect("an answer")
    }

    /// Sends a request and leaves the answer to be read, or not.
    pub(crate) async fn open(&self, method: &str, path: &str, content_type: &str, body: &str) -> Exchange {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\n{}connection: close\r\ncontent-type: {content_type}\r\n\
             content-length: {}\r\n\r\n",
            self.headers,
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // A server that refuses a long body may stop reading it.
        let _ = stream.write_all(body.as_bytes()).await;
        Exchange { stream: BufReader::new(stream) }
    }

    pub(crate) async fn open_post(&self, path: &str, body: &Value) -> Exchange {
        self.open("POST", path, "application/json", &body.to_string()).await
    }
}

/// A request that has been sent. Dropping it closes the connection.
pub(crate) struct Exchange {
    stream: BufReader<TcpStream>,
}

impl Exchange {
    /// Reads until `text` has come.
    pub(crate) async fn read_until(&mut self, text: &str) {
        let mut seen = String::new();
        let read = async {
            while !seen.contains(text) {
                let mut line = String::new();
                assert_ne!(
                    self.stream.read_line(&mut line).await.unwrap(),
                    0,
                    "ended without {text}: {seen}"
                );
                seen.push_str(&line);
            }
        };
        timeout(WATCHDOG, read).await.expect("the text comes");
    }

    async fn rest(mut self) -> Response {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.stream.read_line(&mut line).await.unwrap(), 0, "no answer");
            match line.trim_end() {
                "" => break,
                line => head.push(line.to_owned()),
            }
        }
        let status = head[0].split(' ').nth(1).unwrap().parse().unwrap();
        let split =
            |line: &String| line.split_once(": ").map(|(key, value)| (key.to_owned(), value.to_owned()));
        let headers: Vec<(String, String)> = head[1..].iter().filter_map(split).collect();
        let chunked = headers.iter().any(|(key, value)| key == "transfer-encoding" && value == "chunked");
        let body = if chunked { self.chunked().await } else { self.plain().await };
        Response { status, headers, body: String::from_utf8(body).unwrap() }
    }

    async fn plain(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        self.stream.read_to_end(&mut body).await.unwrap();
        body
    }

    async fn chunked(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let mut size = String::new();
            self.stream.read_line(&mut size).await.unwrap();
            let size = usize::from_str_radix(size.trim_end(), 16).expect("the body ends in a last chunk");
            let mut chunk = vec![0; size + 2];
            self.stream.read_exact(&mut chunk).await.unwrap();
            if size == 0 {
                return body;
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }
}
