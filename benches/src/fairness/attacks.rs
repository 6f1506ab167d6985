//! A tenant that attacks: everything that one user key can send to stop or slow others, at once and
//! repeatedly.
//!
//! Each attack is a loop on its own thread. Responses are counted by status and otherwise ignored: the server
//! may reject, cut off or close, and the attack continues with the next connection.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

/// Timeout of an attack's response.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pause between two tries of one attack: a client that is rejected at once would otherwise only use up its
/// own core.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of one write of an endless body.
const PIECE: usize = 64 << 10;
/// Default maximum length of a body.
const MAX_BODY: usize = 8 << 20;

#[derive(Debug)]
pub(super) struct Attacker<'a> {
    pub(super) port: u16,
    pub(super) key: &'a str,
    /// Names of the attacks to make, separated by commas; `None` for all.
    pub(super) only: Option<&'a str>,
    pub(super) model: &'a str,
    pub(super) is_over: &'a AtomicBool,
    /// Number of responses by status; 0 is a connection that ended without one.
    pub(super) answers: Mutex<BTreeMap<u16, usize>>,
}

/// A single try of an attack; its argument is the number of earlier tries.
type Attack = fn(&Attacker<'_>, usize) -> std::io::Result<()>;

const ATTACKS: [(&str, Attack, usize); 9] = [
    ("heavy_grammars", heavy_grammars, 4),
    ("escaped_grammars", escaped_grammars, 2),
    ("waiting_orders", waiting_orders, 2),
    ("empty_data", empty_data, 1),
    ("endless_multipart", endless_multipart, 2),
    ("dripping_uploads", dripping_uploads, 4),
    ("multiplied_prompts", multiplied_prompts, 1),
    ("jobs_made_and_cancelled", jobs_made_and_cancelled, 1),
    ("unfinished_bodies", unfinished_bodies, 8),
];

/// Checks attack names separated by commas.
///
/// # Errors
/// A name of no attack.
pub(super) fn check_names(names: &str) -> Result<()> {
    let known = ATTACKS.map(|(name, ..)| name);
    let unknown = names.split(',').find(|name| !known.contains(name));
    ensure!(
        unknown.is_none(),
        "--attacks: '{}' is not one of {}",
        unknown.unwrap_or_default(),
        known.join(", ")
    );
    Ok(())
}

impl Attacker<'_> {
    pub(super) fn run(&self) {
        thread::scope(|scope| {
            let is_meant = |name: &str| self.only.is_none_or(|only| only.split(',').any(|part| part == name));
            for (_, attack, threads) in ATTACKS.into_iter().filter(|(name, ..)| is_meant(name)) {
                for first in 0..threads {
                    scope.spawn(move || {
                        leave_the_cores_to_others();
                        let mut tries = first;
                        while !self.is_over() {
                            // A closed connection is a valid response of the server.
                            let _ = attack(self, tries);
                            tries += threads;
                            thread::sleep(PAUSE);
                        }
                    });
                }
            }
        });
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn head(&self, route: &str, kind: &str, length: Option<usize>) -> String {
        let length = length.map_or_else(
            || "transfer-encoding: chunked".to_owned(),
            |length| format!("content-length: {length}"),
        );
        format!(
            "POST {route} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nauthorization: Bearer {}\r\ncontent-type: {kind}\r\n{length}\r\n\
             connection: close\r\n\r\n",
            self.port, self.key
        )
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    fn post(&self, route: &str, kind: &str, body: &[u8]) -> std::io::Result<Value> {
        let mut stream = self.connect()?;
        stream.write_all(self.head(route, kind, Some(body.len())).as_bytes())?;
        // The server may reject a body before it has read all of it.
        let _ = stream.write_all(body);
        self.answer(stream)
    }

    fn post_json(&self, route: &str, body: &Value) -> std::io::Result<Value> {
        self.post(route, "application/json", body.to_string().as_bytes())
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<Value> {
        let mut raw = Vec::new();
        let read = stream.read_to_end(&mut raw);
        let text = String::from_utf8_lossy(&raw);
        let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner).entry(status).or_default() += 1;
        read?;
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        Ok(serde_json::from_str(body).unwrap_or(Value::Null))
    }
}

/// Gives the calling thread the lowest priority: a real attacker has another machine, so its own computation
/// must not slow this one.
fn leave_the_cores_to_others() {
    // On Linux this is the thread's niceness, which every thread may raise.
    let _ = rustix::process::nice(19);
}

fn chat(attacker: &Attacker<'_>, schema: &Value) -> Value {
    json!({
        "model": attacker.model,
        "messages": [{ "role": "user", "content": "x" }],
        "max_tokens": 1,
        "response_format": { "type": "json_schema", "json_schema": { "name": "s", "schema": schema } },
    })
}

/// Schemas that exhaust the compiler's budget, a new one each time.
fn heavy_grammars(attacker: &Attacker<'_>, tries: usize) -> std::io::Result<()> {
    let schema = match tries % 4 {
        0 => json!({ "type": "integer", "multipleOf": 900_000 + tries }),
        1 => {
            json!({ "type": "object", "properties": { "default": { "type": "integer", "multipleOf": 99_999_989 - tries } } })
        }
        2 => {
            json!({ "allOf": [{ "type": "integer", "multipleOf": 97 }, { "multipleOf": 89 }, { "multipleOf": 83 + tries }] })
        }
        _ => json!({ "type": "string", "pattern": format!("^((a|b)*a(a|b){{{}}}){{9}}$", 12 + tries % 20) }),
    };
    attacker.post_json("/v1/chat/completions", &chat(attacker, &schema)).map(drop)
}

/// Heavy schemas behind a key spelled with an escape, in a body that is short enough to be read at once.
fn escaped_grammars(attacker: &Attacker<'_>, tries: usize) -> std::io::Result<()> {
    let words: Vec<String> = (0..100).map(|word| format!("w{word}{tries}")).collect();
    let schema = json!({ "type": "array", "items": { "enum": words }, "minItems": 50, "maxItems": 90 });
    let body = chat(attacker, &schema).to_string().replace("response_format", "response_form\\u0061t");
    attacker.post("/v1/chat/completions", "application/json", body.as_bytes()).map(drop)
}

/// Creates a Tinker model whose queued operations wait for one that never comes.
fn model(attacker: &Attacker<'_>) -> std::io::Result<Option<String>> {
    let session = attacker.post_json("/api/v1/create_session", &json!({ "type": "create_session" }))?;
    let asked = json!({
        "session_id": session["session_id"], "model_seq_id": 0, "base_model": attacker.model, "lora_config": { "rank": 64 },
    });
    let made = attacker.post_json("/api/v1/create_model", &asked)?;
    Ok(made["model_id"].as_str().map(str::to_owned))
}

/// Operations with names of the maximum length, which wait for the first one.
fn waiting_orders(attacker: &Attacker<'_>, _tries: usize) -> std::io::Result<()> {
    let Some(model) = model(attacker)? else { return Ok(()) };
    for seq in 2..40_u8 {
        let request = evaluate(&model, seq, &"a".repeat(MAX_BODY - 1024));
        attacker.post("/api/v1/forward_backward", "application/x-protobuf", &request)?;
        let load = json!({ "model_id": model, "seq_id": 100 + seq, "path": "p".repeat(MAX_BODY - 1024) });
        attacker.post_json("/api/v1/load_weights", &load)?;
        if attacker.is_over() {
            break;
        }
    }
    Ok(())
}

/// Batch for the model in protobuf: fields 1 (model), 2 (sequence number) and 4 (loss).
fn evaluate(model: &str, seq: u8, loss: &str) -> Vec<u8> {
    [&text_field(1, model)[..], &[2 << 3, seq], &text_field(4, loss)].concat()
}

fn text_field(number: u8, text: &str) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = text.len();
    while length >= 0x80 {
        field.push((length as u8 & 0x7f) | 0x80);
        length >>= 7;
    }
    field.push(length as u8);
    field.extend(text.as_bytes());
    field
}

/// Four million empty sequences, two bytes each on the wire.
fn empty_data(attacker: &Attacker<'_>, _tries: usize) -> std::io::Result<()> {
    let data = [3 << 3 | 2, 0].repeat((MAX_BODY - 1024) / 2);
    attacker.post("/api/v1/forward_backward", "application/x-protobuf", &data).map(drop)
}

/// Multipart body whose first boundary never comes.
fn endless_multipart(attacker: &Attacker<'_>, _tries: usize) -> std::io::Result<()> {
    let mut stream = attacker.connect()?;
    let head = attacker.head("/v1/files", "multipart/form-data; boundary=x", None);
    stream.write_all(head.as_bytes())?;
    let piece = [format!("{PIECE:x}\r\n").as_bytes(), &vec![b'a'; PIECE], b"\r\n"].concat();
    while !attacker.is_over() && stream.write_all(&piece).is_ok() {}
    attacker.answer(stream).map(drop)
}

/// File upload of one byte per second.
fn dripping_uploads(attacker: &Attacker<'_>, _tries: usize) -> std::io::Result<()> {
    let mut stream = attacker.connect()?;
    let begin = "--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nfine-tune\r\n--x\r\n\
                 content-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n";
    let head = attacker.head("/v1/files", "multipart/form-data; boundary=x", Some(1 << 20));
    stream.write_all(format!("{head}{begin}").as_bytes())?;
    while !attacker.is_over() && stream.write_all(b"a").is_ok() {
        thread::sleep(Duration::from_secs(1));
    }
    attacker.answer(stream).map(drop)
}

/// Sixty-four prompts of maximum length, each with 128 choices.
fn multiplied_prompts(attacker: &Attacker<'_>, _tries: usize) -> std::io::Result<()> {
    let prompt = vec![7; 8191];
    let body = json!({ "model": attacker.model, "prompt": vec![prompt; 64], "n": 128, "max_tokens": 1 });
    attacker.post_json("/v1/completions", &body).map(drop)
}

/// Fine-tuning jobs of a missing and of an existing file.
fn jobs_made_and_cancelled(attacker: &Attacker<'_>, tries: usize) -> std::io::Result<()> {
    let line = r#"{"prompt":"a","completion":"b"}"#;
    let form = format!(
        "--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nfine-tune\r\n--x\r\n\
         content-disposition: form-data; name=\"file\"; filename=\"f.jsonl\"\r\n\r\n{line}\r\n--x--\r\n"
    );
    let file = attacker.post("/v1/files", "multipart/form-data; boundary=x", form.as_bytes())?;
    let asked =
        json!({ "model": attacker.model, "training_file": file["id"], "suffix": format!("s{tries}") });
    let job = attacker.post_json("/v1/fine_tuning/jobs", &asked)?;
    let Some(id) = job["id"].as_str() else { return Ok(()) };
    attacker.post_json(&format!("/v1/fine_tuning/jobs/{id}/cancel"), &json!({})).map(drop)
}

/// Body of the maximum length whose last byte never comes.
fn unfinished_bodies(attacker: &Attacker<'_>, _tries: usize) -> std::io::Result<()> {
    let mut stream = attacker.connect()?;
    stream.write_all(attacker.head("/v1/completions", "application/json", Some(MAX_BODY)).as_bytes())?;
    stream.write_all(&vec![b' '; MAX_BODY - 1])?;
    attacker.answer(stream.try_clone()?).map(drop)?;
    stream.shutdown(Shutdown::Both)
}
