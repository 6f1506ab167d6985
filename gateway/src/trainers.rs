//! Trainers: processes that learn, one for each job, asked for at the socket of `holobiont-trainer serve`.

use std::{io, path::PathBuf, time::Duration};

use tokio::{io::AsyncWriteExt as _, net::UnixStream, time::timeout};
use training_protocol::Request;

/// How long the trainer service may take to answer the phone.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why there is no trainer.
#[derive(Debug, thiserror::Error)]
pub enum NoTrainer {
    /// This gateway was not told where to ask.
    #[error(
        "this deployment does not train: start it with trainers ('trainers' above 0 in [training]; of services, HOLOBIONT_MAX_TRAINERS above 0 and --trainer-socket)"
    )]
    Nowhere,
    /// Nobody answers.
    #[error("the trainer service cannot be reached: {0}; is it running?")]
    Unreachable(#[from] io::Error),
}

/// Where trainers are asked for.
#[derive(Debug, Clone)]
pub struct Trainers {
    socket: Option<PathBuf>,
}

impl Trainers {
    /// Those of the service at `socket`, if there is one.
    #[must_use]
    pub fn at(socket: Option<PathBuf>) -> Self {
        Self { socket }
    }

    /// # Errors
    /// There is no service.
    pub fn check(&self) -> Result<(), NoTrainer> {
        self.socket.as_ref().map(drop).ok_or(NoTrainer::Nowhere)
    }

    /// Starts a trainer with these arguments. What it reads and says is the connection; it ends when that does.
    ///
    /// # Errors
    /// Nobody answers. One that is refused a place says so itself, as its last line.
    pub async fn start(&self, arguments: &[String]) -> Result<UnixStream, NoTrainer> {
        let socket = self.socket.as_ref().ok_or(NoTrainer::Nowhere)?;
        let request = Request { arguments: arguments.to_vec() };
        let request = serde_json::to_string(&request).unwrap_or_default() + "\n";
        let ask = async {
            let mut connection = UnixStream::connect(socket).await?;
            connection.write_all(request.as_bytes()).await?;
            Ok(connection)
        };
        timeout(PATIENCE, ask)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(NoTrainer::Unreachable)
    }
}
