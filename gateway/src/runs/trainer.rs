//! A trainer of one model: orders and answers over a connection to a process of its own.

use std::io;

use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
};
use training_protocol::session::{Answer, BUSY, Done, MAX_LINE_BYTES, MAX_NUMBERS, Order, Refusal};

/// See the module's description.
#[derive(Debug)]
pub struct Trainer {
    stream: BufReader<UnixStream>,
}

/// What comes of an order: what is known of it, and its numbers. The outer error is the end of the trainer.
pub type Carried = io::Result<Result<(Done, Vec<u8>), Refusal>>;

impl Trainer {
    /// Waits until it can take orders.
    ///
    /// # Errors
    /// It cannot be had; it may help to wait.
    pub async fn ready(stream: UnixStream) -> io::Result<Self> {
        let mut trainer = Self { stream: BufReader::new(stream) };
        match trainer.answer().await? {
            Answer::Ready {} => Ok(trainer),
            Answer::Failed { message, exit } if exit == BUSY => {
                Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
            }
            Answer::Failed { message, .. } => Err(io::Error::other(message)),
            Answer::Done(_) | Answer::Refused(_) => Err(io::Error::other("it answers what nobody asked")),
        }
    }

    /// Has an order carried out.
    ///
    /// # Errors
    /// The trainer is gone.
    pub async fn order(&mut self, order: &Order, numbers: &[u8]) -> Carried {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.stream.write_all(&line).await?;
        self.stream.write_all(numbers).await?;
        self.stream.flush().await?;
        match self.answer().await? {
            Answer::Done(done) if done.numbers <= MAX_NUMBERS => {
                let mut numbers = vec![0; done.numbers * size_of::<f32>()];
                self.stream.read_exact(&mut numbers).await?;
                Ok(Ok((done, numbers)))
            }
            Answer::Refused(refusal) => Ok(Err(refusal)),
            Answer::Failed { message, .. } => Err(io::Error::other(message)),
            Answer::Done(_) | Answer::Ready {} => Err(io::Error::other("its answer is none")),
        }
    }

    async fn answer(&mut self) -> io::Result<Answer> {
        let mut line = Vec::new();
        (&mut self.stream).take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}
