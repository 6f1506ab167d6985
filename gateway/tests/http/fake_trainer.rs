//! A service whose trainers learn nothing: jobs and orders of Tinker sessions are carried out, and weights are what a test can tell.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};
use training_protocol::{
    Request,
    session::{Answer, Done, Lora, Order},
};

/// Ends with the test.
pub(crate) struct FakeTrainers {
    directory: TempDir,
    task: JoinHandle<()>,
}

impl Drop for FakeTrainers {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeTrainers {
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("trainers")).unwrap();
        let saved = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(train(stream, Arc::clone(&saved)));
            }
        });
        Self { directory, task }
    }

    /// Where trainers are asked for.
    pub(crate) fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("trainers")
    }
}

/// What the trainers wrote as the weights of their `number`th adapter.
pub(crate) fn weights(number: usize) -> String {
    format!("weights {number}")
}

/// Serves one connection; it ends when the gateway goes.
async fn train(stream: UnixStream, saved: Arc<AtomicUsize>) -> Option<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    let Request { arguments } = serde_json::from_str(&line).unwrap();
    if let Some(at) = arguments.iter().position(|argument| argument == "--output") {
        return work(&mut stream, Path::new(&arguments[at + 1]), &saved).await;
    }
    answer(&mut stream, &Answer::Ready {}).await?;
    loop {
        line.clear();
        if stream.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        let order: Order = serde_json::from_str(&line).unwrap();
        let mut numbers = vec![0; 4 * order.numbers().unwrap()];
        stream.read_exact(&mut numbers).await.ok()?;
        let done = carry_out(&order, &saved);
        answer(&mut stream, &Answer::Done(done)).await?;
    }
}

/// Does a fine-tuning job of one step.
async fn work(stream: &mut BufReader<UnixStream>, output: &Path, saved: &AtomicUsize) -> Option<()> {
    save(output, saved);
    for event in [
        json!({ "event": "plan", "examples": 1, "steps": 1, "kind": "text" }),
        json!({ "event": "step", "step": 1, "steps": 1, "loss": 0.5, "tokens": 9 }),
        json!({ "event": "done", "steps": 1, "loss": 0.5, "held_out_loss": null, "generation": "", "seconds": 0.1 }),
    ] {
        stream.write_all(format!("{event}\n").as_bytes()).await.ok()?;
    }
    Some(())
}

fn carry_out(order: &Order, saved: &AtomicUsize) -> Done {
    match order {
        Order::Create { lora, .. } => return Done { lora: Some(lora.clone()), ..Done::default() },
        Order::Load { .. } => {
            let lora = Lora { rank: 4, alpha: 32.0, targets: Vec::new() };
            return Done { lora: Some(lora), ..Done::default() };
        }
        Order::SaveState { directory } | Order::Suspend { directory } => {
            write(directory, "checkpoint", "a state")
        }
        Order::SaveWeights { directory } => save(directory, saved),
        Order::ForwardBackward { .. } | Order::OptimStep(_) => {}
    }
    Done::default()
}

/// Writes an adapter.
fn save(directory: &Path, saved: &AtomicUsize) {
    let number = saved.fetch_add(1, Ordering::Relaxed);
    write(directory, "adapter_config.json", "{}");
    write(directory, "adapter_model.safetensors", &weights(number));
}

fn write(directory: &Path, name: &str, text: &str) {
    std::fs::create_dir_all(directory).unwrap();
    std::fs::write(directory.join(name), text).unwrap();
}

async fn answer(stream: &mut BufReader<UnixStream>, answer: &Answer) -> Option<()> {
    let line = serde_json::to_string(answer).unwrap() + "\n";
    stream.write_all(line.as_bytes()).await.ok()
}
