//! Where files and sockets are, as the settings say or beside the gateways' socket.

use std::path::{Path, PathBuf};

use layer_service::start::ListenAddresses;

use super::{EngineKind, ExecutorConfig, LayerSocket};

impl ExecutorConfig {
    /// The private directory of the file of packed weights.
    #[must_use]
    pub fn weight_directory(&self) -> PathBuf {
        match &self.disk_directory {
            Some(directory) => directory.join("weights"),
            None => self.beside("weights"),
        }
    }

    /// The private directory of the disk tier's file.
    #[must_use]
    pub fn disk_directory(&self) -> PathBuf {
        self.disk_directory.clone().unwrap_or_else(|| self.beside("history"))
    }

    /// Where workers connect.
    #[must_use]
    pub fn worker_socket(&self) -> PathBuf {
        self.worker_socket.clone().unwrap_or_else(|| self.beside("workers.sock"))
    }

    /// Where split clients of this host connect; `None` if they are not served.
    #[must_use]
    pub fn layer_socket(&self) -> Option<PathBuf> {
        match &self.layers.place {
            // There are no files to give them.
            _ if self.random_weights.is_some() => None,
            Some(LayerSocket::Off) => None,
            Some(LayerSocket::At(path)) => Some(path.clone()),
            None => Some(self.beside("layers.sock")),
        }
    }

    /// Where the doors of the layer service are, if it has any.
    #[must_use]
    pub fn layer_places(&self) -> Option<ListenAddresses> {
        let own = self.socket.clone().filter(|_| self.engine == EngineKind::Resident);
        let name = own.as_deref().and_then(Path::file_stem).unwrap_or_default();
        let lent = match &self.disk_directory {
            Some(directory) => directory.join("lent"),
            None => self.beside(&format!("{}.lent", name.to_string_lossy())),
        };
        self.layer_socket().map(|socket| self.layers.places(socket, own, lent))
    }

    /// Whether split clients are offered exact arithmetic. To commit to all weights is a matter of seconds for large models, so that
    /// it is done for those alone who ask for it.
    #[must_use]
    pub fn offers_exact(&self) -> bool {
        self.layers.exact && self.layer_socket().is_some()
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.socket.as_ref().map_or_else(|| name.into(), |socket| socket.with_file_name(name))
    }
}
