//! A trainer service that carries every order out at once, and learns nothing.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};
use training_protocol::session::{Done, Order};

/// Ends when it is dropped; trainers that were given out go on.
pub(crate) struct FakeTrainers {
    /// Trainers that are given out now.
    taken: Arc<AtomicUsize>,
    listener: JoinHandle<()>,
}

impl Drop for FakeTrainers {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl FakeTrainers {
    /// A service at `socket` with so many trainers. One that has none left refuses before it reads, and closes.
    pub(crate) fn start(socket: &Path, places: usize) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let taken = Arc::new(AtomicUsize::new(0));
        let now = Arc::clone(&taken);
        let serve = async move {
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                if now.load(SeqCst) >= places {
                    let busy = json!({ "event": "failed", "message": "all trainers are busy", "exit": "unavailable" });
                    let _ = connection.write_all(format!("{busy}\n").as_bytes()).await;
                    continue;
                }
                now.fetch_add(1, SeqCst);
                let now = Arc::clone(&now);
                tokio::spawn(async move {
                    // An error is the end of the connection, and so of the trainer.
                    let _ = train(connection).await;
                    now.fetch_sub(1, SeqCst);
                });
            }
        };
        Self { taken, listener: tokio::spawn(serve) }
    }

    /// Trainers that are given out now.
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(SeqCst)
    }
}

/// Tells adapters of all trainers apart.
static WRITTEN: AtomicUsize = AtomicUsize::new(0);

async fn train(connection: UnixStream) -> std::io::Result<()> {
    let mut stream = BufReader::new(connection);
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    stream.write_all(b"{\"event\":\"ready\"}\n").await?;
    loop {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let order: Order = serde_json::from_str(&line)?;
        let mut numbers = vec![0; order.numbers().expect("few enough numbers") * size_of::<f32>()];
        stream.read_exact(&mut numbers).await?;
        let mut done = Done::default();
        match order {
            Order::Create { lora, .. } => done.lora = Some(lora),
            Order::ForwardBackward { lengths, .. } => done.numbers = lengths.iter().sum(),
            Order::SaveState { directory } | Order::Suspend { directory } => {
                std::fs::create_dir_all(&directory)?;
                std::fs::write(directory.join("checkpoint"), "state")?;
            }
            Order::SaveWeights { directory } => {
                std::fs::create_dir_all(&directory)?;
                std::fs::write(directory.join("adapter_config.json"), "{}")?;
                let weights = format!("weights {}", WRITTEN.fetch_add(1, SeqCst));
                std::fs::write(directory.join("adapter_model.safetensors"), weights)?;
            }
            Order::Load { directory, .. } => assert!(directory.join("checkpoint").exists(), "no state"),
            Order::OptimStep(_) => {}
        }
        let logprobs = vec![0; done.numbers * size_of::<f32>()];
        let mut answer = serde_json::to_value(&done)?;
        answer["event"] = "done".into();
        stream.write_all(format!("{answer}\n").as_bytes()).await?;
        stream.write_all(&logprobs).await?;
    }
}
