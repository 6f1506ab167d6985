//! Client of the trainer service (`holobiont-trainer serve`), which starts one trainer process per job or
//! session model; [`trainer_slots`] decides the order in which jobs and models get one.

pub mod trainer_slots;

use std::{io, path::PathBuf, time::Duration};

use control_protocol::training::TrainerRequest;
use tokio::{io::AsyncWriteExt as _, net::UnixStream, time::timeout};

use self::trainer_slots::TrainerSlots;

/// Timeout for the trainer service to accept a request.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum TrainerUnavailable {
    #[error(
        "training is off; set [training] trainers above 0 (for services, HOLOBIONT_MAX_TRAINERS above 0 \
         and --trainer-socket)"
    )]
    Nowhere,
    #[error("cannot reach the trainer service: {0}; start it")]
    Unreachable(#[from] io::Error),
}

/// Client of one trainer service; clones share the queue for trainers.
#[derive(Debug, Clone)]
pub struct TrainerClient {
    socket: Option<PathBuf>,
    places: TrainerSlots,
}

impl TrainerClient {
    /// Creates a client of the service at `socket`; without a socket, this deployment does not train.
    #[must_use]
    pub fn at(socket: Option<PathBuf>) -> Self {
        Self { socket, places: TrainerSlots::default() }
    }

    #[must_use]
    pub fn places(&self) -> &TrainerSlots {
        &self.places
    }

    /// # Errors
    /// If there is no trainer service.
    pub fn check(&self) -> Result<(), TrainerUnavailable> {
        self.socket.as_ref().map(drop).ok_or(TrainerUnavailable::Nowhere)
    }

    /// Starts a trainer with `arguments`. The connection is the trainer's stdin and stdout; the trainer ends
    /// when it is closed.
    ///
    /// # Errors
    /// If the service cannot be reached. A service without a free trainer reports so on the connection, as a
    /// trainer that failed.
    pub async fn start(&self, arguments: &[String]) -> Result<UnixStream, TrainerUnavailable> {
        let socket = self.socket.as_ref().ok_or(TrainerUnavailable::Nowhere)?;
        let request = TrainerRequest { arguments: arguments.to_vec() };
        let request = serde_json::to_string(&request).unwrap_or_default() + "\n";
        let ask = async {
            let mut connection = UnixStream::connect(socket).await?;
            match connection.write_all(request.as_bytes()).await {
                // The service may have refused before it read the request; its refusal can still be read.
                Err(error) if is_closed(&error) => Ok(connection),
                written => written.map(|()| connection),
            }
        };
        timeout(PATIENCE, ask)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(TrainerUnavailable::Unreachable)
    }
}

/// Whether a write failed because the peer closed the connection. Data that the peer sent before can still be
/// read.
pub(crate) fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;
    use crate::training_sessions::trainer::Trainer;

    #[tokio::test]
    async fn a_service_that_refuses_and_closes_before_it_reads_is_heard() {
        const BUSY: &[u8] =
            b"{\"event\":\"failed\",\"message\":\"all 1 trainers are busy\",\"exit\":\"unavailable\"}\n";
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("trainers");
        let listener = UnixListener::bind(&socket).unwrap();
        let refuse = async move {
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                connection.write_all(BUSY).await.unwrap();
            }
        };
        let service = tokio::spawn(refuse);
        let trainers = TrainerClient::at(Some(socket));
        // The long request exceeds the socket buffer: the service closes the connection before all of it is
        // written.
        let arguments = ["session".to_owned(), "a".repeat(4 << 20)];
        for arguments in [&arguments[..1], &arguments[..]] {
            let connection = trainers.start(arguments).await.unwrap();
            let refused = Trainer::ready(connection).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ResourceBusy, "{refused}");
            assert_eq!(refused.to_string(), "all 1 trainers are busy");
        }
        service.abort();
    }
}
