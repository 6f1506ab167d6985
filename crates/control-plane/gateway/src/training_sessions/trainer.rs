//! Connection to the trainer process of one model: commands and replies.

use std::io;

use control_protocol::training::session::{
    BUSY, CommandDone, CommandRefusal, CommandReply, ExportedAdapter, MAX_LINE_BYTES, MAX_NUMBERS,
    TrainingCommand,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Take},
    net::UnixStream,
};

use crate::trainer_client::is_closed;

#[derive(Debug)]
pub(crate) struct Trainer {
    stream: BufReader<UnixStream>,
}

/// Result of a command: its reply and values. The outer error means that the trainer has ended.
pub(crate) type OrderResult = io::Result<Result<(CommandDone, Vec<u8>), CommandRefusal>>;

/// Weight file that a trainer sends after its reply.
pub(crate) type ExportedWeights<'a> = Take<&'a mut BufReader<UnixStream>>;

impl Trainer {
    /// Waits until the trainer accepts commands.
    ///
    /// # Errors
    /// If the trainer cannot start. The kind `ResourceBusy` means that a retry may succeed.
    pub(crate) async fn ready(stream: UnixStream) -> io::Result<Self> {
        let mut trainer = Self { stream: BufReader::new(stream) };
        match trainer.answer().await? {
            CommandReply::Ready {} => Ok(trainer),
            CommandReply::Failed { message, exit } if exit == BUSY => {
                Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
            }
            CommandReply::Failed { message, .. } => Err(io::Error::other(message)),
            CommandReply::Done(_) | CommandReply::Refused(_) => {
                Err(io::Error::other("it sent an unexpected answer"))
            }
        }
    }

    /// Runs a command.
    ///
    /// # Errors
    /// If the trainer has ended.
    pub(crate) async fn order(&mut self, order: &TrainingCommand, numbers: &[u8]) -> OrderResult {
        match self.done(order, numbers).await? {
            Ok(done) if done.numbers <= MAX_NUMBERS && done.adapter.is_none() => {
                let mut numbers = vec![0; done.numbers * size_of::<f32>()];
                self.stream.read_exact(&mut numbers).await?;
                Ok(Ok((done, numbers)))
            }
            Ok(_) => Err(unexpected()),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// Asks for the adapter. The weight file must be read to its end before the next command.
    ///
    /// # Errors
    /// If the trainer has ended.
    pub(crate) async fn export(
        &mut self,
    ) -> io::Result<Result<(ExportedAdapter, ExportedWeights<'_>), CommandRefusal>> {
        match self.done(&TrainingCommand::ExportWeights {}, &[]).await? {
            Ok(CommandDone { numbers: 0, adapter: Some(adapter), .. }) => {
                let weights = (&mut self.stream).take(adapter.weight_bytes);
                Ok(Ok((adapter, weights)))
            }
            Ok(_) => Err(unexpected()),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// Sends a command, and returns the line of its reply.
    async fn done(
        &mut self,
        order: &TrainingCommand,
        numbers: &[u8],
    ) -> io::Result<Result<CommandDone, CommandRefusal>> {
        let line = match order.line() {
            Ok(line) => line,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let sent = self.send(&line, numbers).await;
        if let Err(error) = sent
            && !is_closed(&error)
        {
            return Err(error);
        }
        // A trainer that has ended gives the reason in its last line, whether or not it has read the command.
        match self.answer().await? {
            CommandReply::Done(done) => Ok(Ok(done)),
            CommandReply::Refused(refusal) => Ok(Err(refusal)),
            CommandReply::Failed { message, .. } => Err(io::Error::other(message)),
            CommandReply::Ready {} => Err(unexpected()),
        }
    }

    async fn send(&mut self, line: &[u8], numbers: &[u8]) -> io::Result<()> {
        self.stream.write_all(line).await?;
        self.stream.write_all(numbers).await?;
        self.stream.flush().await
    }

    async fn answer(&mut self) -> io::Result<CommandReply> {
        let mut line = Vec::new();
        (&mut self.stream).take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}

fn unexpected() -> io::Error {
    io::Error::other("it sent an unexpected answer to a command")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_trainer_that_ends_without_reading_an_order_says_why_it_ended() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut trainer = Trainer { stream: BufReader::new(near) };
        far.write_all(b"{\"event\":\"failed\",\"message\":\"the executor is gone\"}\n").await.unwrap();
        drop(far);
        let ended = trainer.order(&TrainingCommand::SaveState { directory: "d".into() }, &[0; 1 << 20]).await;
        assert_eq!(ended.unwrap_err().to_string(), "the executor is gone");
    }
}
