//! Paths of files and sockets, from the settings or beside the gateways' socket.

use std::path::{Path, PathBuf};

use layer_service::start::ListenAddresses;

use super::{EngineKind, ExecutorConfig, LayerSocket};

impl ExecutorConfig {
    /// Returns the private directory of the packed weights file.
    #[must_use]
    pub(crate) fn weight_directory(&self) -> PathBuf {
        match &self.disk_directory {
            Some(directory) => directory.join("weights"),
            None => self.beside("weights"),
        }
    }

    /// Returns the private directory of the disk tier's file.
    #[must_use]
    pub(crate) fn disk_directory(&self) -> PathBuf {
        self.disk_directory.clone().unwrap_or_else(|| self.beside("history"))
    }

    #[must_use]
    pub(crate) fn worker_socket(&self) -> PathBuf {
        self.worker_socket.clone().unwrap_or_else(|| self.beside("workers.sock"))
    }

    /// Returns the socket for split clients of this host; `None` if they are not served.
    #[must_use]
    pub(crate) fn layer_socket(&self) -> Option<PathBuf> {
        match &self.layers.place {
            // Random weights have no files that split clients could fetch.
            _ if self.random_weights.is_some() => None,
            Some(LayerSocket::Off) => None,
            Some(LayerSocket::At(path)) => Some(path.clone()),
            None => Some(self.beside("layers.sock")),
        }
    }

    /// Returns the addresses of the layer service, if it is on.
    #[must_use]
    pub(crate) fn layer_places(&self) -> Option<ListenAddresses> {
        let own = self.socket.clone().filter(|_| self.engine == EngineKind::Resident);
        let name = own.as_deref().and_then(Path::file_stem).unwrap_or_default();
        let lent = match &self.disk_directory {
            Some(directory) => directory.join("lent"),
            None => self.beside(&format!("{}.lent", name.to_string_lossy())),
        };
        self.layer_socket().map(|socket| self.layers.places(socket, own, lent))
    }

    /// Whether split clients are offered the modular path. Hashing all weights of a large model takes
    /// seconds, so only a setting enables it.
    #[must_use]
    pub(crate) fn offers_exact(&self) -> bool {
        self.layers.exact && self.layer_socket().is_some()
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.socket.as_ref().map_or_else(|| name.into(), |socket| socket.with_file_name(name))
    }
}
