//! A trainer service that completes jobs and requests of Tinker sessions at once, without training.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use control_protocol::training::{
    TrainerRequest,
    session::{CommandDone, ExportedAdapter, Lora, TrainingCommand},
};
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};

/// Ends when dropped; running trainers continue.
pub(crate) struct FakeTrainerService {
    directory: TempDir,
    counts: Arc<Counts>,
    listener: JoinHandle<()>,
}

#[derive(Default)]
struct Counts {
    taken: AtomicUsize,
    saved: AtomicUsize,
}

impl Drop for FakeTrainerService {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl FakeTrainerService {
    /// Starts a service with this number of trainers. Without a free trainer it rejects before reading, and
    /// closes.
    pub(crate) fn start(places: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("trainers")).unwrap();
        let counts = Arc::new(Counts::default());
        let now = Arc::clone(&counts);
        let serve = async move {
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                if now.taken.load(SeqCst) >= places {
                    let busy = json!({ "event": "failed", "message": "all trainers are busy", "exit": "unavailable" });
                    let _ = connection.write_all(format!("{busy}\n").as_bytes()).await;
                    continue;
                }
                now.taken.fetch_add(1, SeqCst);
                let now = Arc::clone(&now);
                tokio::spawn(async move {
                    // An error ends the connection, and so the trainer.
                    let _ = train(BufReader::new(connection), &now.saved).await;
                    now.taken.fetch_sub(1, SeqCst);
                });
            }
        };
        Self { directory, counts, listener: tokio::spawn(serve) }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("trainers")
    }

    pub(crate) fn taken(&self) -> usize {
        self.counts.taken.load(SeqCst)
    }
}

/// Weights of the trainers' `number`th adapter.
pub(crate) fn weights(number: usize) -> String {
    format!("weights {number}")
}

async fn train(mut stream: BufReader<UnixStream>, saved: &AtomicUsize) -> io::Result<()> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let TrainerRequest { arguments } = serde_json::from_str(&line)?;
    if let Some(at) = arguments.iter().position(|argument| argument == "--output") {
        return work(&mut stream, Path::new(&arguments[at + 1]), saved).await;
    }
    stream.write_all(b"{\"event\":\"ready\"}\n").await?;
    loop {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let order: TrainingCommand = serde_json::from_str(&line)?;
        let mut numbers = vec![0; order.numbers().expect("few enough numbers") * size_of::<f32>()];
        stream.read_exact(&mut numbers).await?;
        let (done, payload) = carry_out(order, saved)?;
        let mut answer = serde_json::to_value(&done)?;
        answer["event"] = "done".into();
        stream.write_all(format!("{answer}\n").as_bytes()).await?;
        stream.write_all(&payload).await?;
    }
}

async fn work(stream: &mut BufReader<UnixStream>, output: &Path, saved: &AtomicUsize) -> io::Result<()> {
    save(output, saved)?;
    for event in [
        json!({ "event": "plan", "examples": 1, "steps": 1, "kind": "text" }),
        json!({ "event": "step", "step": 1, "steps": 1, "loss": 0.5, "tokens": 9 }),
        json!({ "event": "done", "steps": 1, "loss": 0.5, "held_out_loss": null, "generation": "", "seconds": 0.1 }),
    ] {
        stream.write_all(format!("{event}\n").as_bytes()).await?;
    }
    Ok(())
}

fn carry_out(order: TrainingCommand, saved: &AtomicUsize) -> io::Result<(CommandDone, Vec<u8>)> {
    let (mut done, mut payload) = (CommandDone::default(), Vec::new());
    match order {
        TrainingCommand::Create { lora, .. } => done.lora = Some(lora),
        TrainingCommand::Load { directory, .. } => {
            assert!(directory.join("checkpoint").exists(), "no state");
            done.lora = Some(Lora { rank: 4, alpha: 32.0, targets: Vec::new() });
        }
        TrainingCommand::SaveState { directory } | TrainingCommand::Suspend { directory } => {
            write(&directory, "checkpoint", "a state")?;
        }
        TrainingCommand::ExportWeights {} => {
            payload = weights(saved.fetch_add(1, SeqCst)).into_bytes();
            let weight_bytes = payload.len() as u64;
            done.adapter = Some(ExportedAdapter { config: "{}".to_owned(), weight_bytes });
        }
        TrainingCommand::ForwardBackward { lengths, .. } => {
            done.numbers = lengths.iter().sum();
            payload = vec![0; done.numbers * size_of::<f32>()];
        }
        TrainingCommand::OptimStep(_) => {}
    }
    Ok((done, payload))
}

fn save(directory: &Path, saved: &AtomicUsize) -> io::Result<()> {
    write(directory, "adapter_config.json", "{}")?;
    write(directory, "adapter_model.safetensors", &weights(saved.fetch_add(1, SeqCst)))
}

fn write(directory: &Path, name: &str, text: &str) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    fs::write(directory.join(name), text)
}
