//! Clients that send requests and disconnect, or send more than the gateway can process: the cost of both is
//! bounded.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use gateway::{
    lifecycle::LoadText,
    tenant_memory::MemoryLimits,
    text::{ChatMessage, Decoder, TemplateOptions, Text, TextError, TextInfo},
};
use serde_json::{Value, json};
use text::{
    chat_template::TemplateError,
    detokenize::TextStart,
    grammar::Tokens,
    pair_template::{PairTemplate, QueryAndDocument},
    tokenizer::AddSpecial,
};
use tokio::{io::AsyncWriteExt as _, net::TcpSocket, task::JoinSet};

use crate::{
    fake_executor::reply_with,
    harness::{Harness, eventually, eventually_async},
    text::{ByteText, always},
};

const TEXT: &str = "/v1/completions";
/// Long bodies of one tenant that are processed at once.
const WORKED_ON: usize = 1;
/// Bodies that fit in a tenant's memory.
const HELD: usize = 8;
/// Time in which an unexpected event would have occurred.
const WHILE: Duration = Duration::from_millis(300);

#[derive(Debug, Default)]
struct GatedText {
    text: ByteText,
    entered: AtomicUsize,
    open: Mutex<bool>,
    opened: Condvar,
}

impl GatedText {
    fn entered(&self) -> usize {
        self.entered.load(SeqCst)
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

/// Opens the gate when dropped, since blocked threads would outlive the test.
struct Gate(Arc<GatedText>);

impl Gate {
    fn closed() -> Self {
        Self(Arc::default())
    }

    fn text(&self) -> LoadText {
        always(Arc::clone(&self.0) as Arc<dyn Text>)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.open();
    }
}

impl Text for GatedText {
    fn encode(&self, text: &str, add: AddSpecial) -> Result<Vec<u32>, TextError> {
        self.entered.fetch_add(1, SeqCst);
        let closed = self.opened.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap();
        drop(closed);
        self.text.encode(text, add)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        self.text.decode(tokens)
    }

    fn token_bytes(&self, token: u32) -> &[u8] {
        self.text.token_bytes(token)
    }

    fn decoder(&self, start: TextStart, shown: &[&str]) -> Box<dyn Decoder> {
        self.text.decoder(start, shown)
    }

    fn special_token(&self, name: &str) -> Option<u32> {
        self.text.special_token(name)
    }

    fn encode_chat(
        &self,
        messages: &[ChatMessage],
        showing: &TemplateOptions,
    ) -> Result<Vec<u32>, TextError> {
        self.text.encode_chat(messages, showing)
    }

    fn encode_pair(
        &self,
        template: &PairTemplate,
        values: &QueryAndDocument<'_>,
    ) -> Result<Vec<u32>, TextError> {
        self.text.encode_pair(template, values)
    }

    fn tokens(&self) -> Tokens {
        self.text.tokens()
    }

    fn info(&self) -> &TextInfo {
        self.text.info()
    }

    fn with_chat_template(&self, source: &Arc<str>) -> Arc<dyn Text> {
        self.text.with_chat_template(source)
    }

    fn check_chat_template(&self, source: &Arc<str>) -> Result<(), TemplateError> {
        self.text.check_chat_template(source)
    }

    fn is_sandboxed(&self) -> bool {
        self.text.is_sandboxed()
    }
}

async fn left(harness: &Harness) -> usize {
    let metrics = harness.client.get("/metrics").await.body;
    let row = format!("holobiont_http_requests_total{{route=\"{TEXT}\",status=\"499\"}} ");
    metrics.lines().find_map(|line| line.strip_prefix(&row)?.parse().ok()).unwrap_or(0)
}

/// Body too long to be processed on the async threads.
fn body(bytes: usize) -> Value {
    json!({ "model": "base", "prompt": "a".repeat(bytes), "max_tokens": 1 })
}

#[tokio::test]
async fn who_posts_and_leaves_takes_no_more_turns_than_those_who_stay() {
    let gate = Gate::closed();
    let text = &gate.0;
    let harness = Harness::start_with_text(reply_with("x"), gate.text(), |_| {}).await;
    let mut exchanges = Vec::new();
    for _ in 0..WORKED_ON {
        exchanges.push(harness.client.open_post(TEXT, &body(5 << 10)).await);
    }
    eventually("as many are worked on as may be", || text.entered() == WORKED_ON).await;
    exchanges.clear();
    eventually_async("the first is seen to have left", async || left(&harness).await == WORKED_ON).await;
    for _ in WORKED_ON..50 {
        exchanges.push(harness.client.open_post(TEXT, &body(5 << 10)).await);
    }
    tokio::time::sleep(WHILE).await;
    exchanges.clear();
    eventually_async("all are seen to have left", async || left(&harness).await == 50).await;
    assert_eq!(text.entered(), WORKED_ON, "what nobody works on any more was begun");
    text.open();
    // The encoding reports that the prompt exceeds the context.
    let answer = harness.client.post(TEXT, &body(5 << 10)).await;
    assert_eq!(answer.code(), "context_length_exceeded");
    assert_eq!(text.entered(), WORKED_ON + 1, "no work was left behind by those who left");
}

#[test]
fn adapters_are_copied_while_long_bodies_are_worked_on() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(WORKED_ON)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let gate = Gate::closed();
        let harness = Harness::start_with_text(reply_with("x"), gate.text(), |_| {}).await;
        let one = harness.client.open_post(TEXT, &body(5 << 10)).await;
        let other = harness.client.open_post(TEXT, &body(5 << 10)).await;
        eventually("a body is worked on", || gate.0.entered() == WORKED_ON).await;
        let load = json!({ "lora_name": "a", "lora_path": harness.adapter("a", "weights") });
        assert_eq!(harness.client.post("/v1/load_lora_adapter", &load).await.status, 200);
        gate.0.open();
        drop((one, other));
    });
}

/// Sends a body through a socket with a small buffer, and counts it once it is sent completely.
async fn push(address: SocketAddr, body: Arc<str>, taken: Arc<AtomicUsize>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_send_buffer_size(4 << 10).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let head = format!(
        "POST {TEXT} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    taken.fetch_add(1, SeqCst);
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_tenant_whose_bodies_fill_its_memory_is_refused_until_they_are_worked_on() {
    let gate = Gate::closed();
    let text = &gate.0;
    let body: Arc<str> = body(512 << 10).to_string().into();
    let limits = MemoryLimits { tenant_bytes: HELD * body.len(), total_bytes: 1 << 30 };
    let harness =
        Harness::start_with_text(reply_with("x"), gate.text(), |config| config.connections.memory = limits)
            .await;
    let taken = Arc::new(AtomicUsize::new(0));
    let mut senders = JoinSet::new();
    for _ in 0..HELD {
        senders.spawn(push(harness.client.address(), Arc::clone(&body), Arc::clone(&taken)));
    }
    eventually("as many are held as may be", || taken.load(SeqCst) >= HELD).await;
    eventually("as many are worked on as may be", || text.entered() == WORKED_ON).await;
    let refused = harness.client.post(TEXT, &serde_json::from_str(&body).unwrap()).await;
    assert_eq!((refused.status, &*refused.code()), (429, "memory_full"));
    text.open();
    eventually_async("the memory is given back", async || {
        harness.client.post(TEXT, &serde_json::from_str(&body).unwrap()).await.status != 429
    })
    .await;
}
