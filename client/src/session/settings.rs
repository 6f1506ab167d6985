//! Settings of a client.

use std::{fmt, time::Duration};

use shmproto::layer::Dtype;

/// Behaviour of a client towards its executor.
#[derive(Clone)]
pub struct ClientSettings {
    /// API key; `None` if a certificate or the socket identifies the client.
    pub key: Option<String>,
    /// Name of the client in the operator's lists.
    pub name: String,
    /// Masking mode: `off`, `paper`, `pads` or `shares`.
    pub masking: String,
    /// Number format of rows on the wire.
    pub dtype: Dtype,
    /// Maximum time for retries after a loss or a refusal for lack of capacity.
    pub patience: Duration,
    /// Maximum number of rows per call; the executor may permit fewer.
    pub max_rows: u32,
}

impl Default for ClientSettings {
    fn default() -> Self {
        Self {
            key: None,
            name: "holobiont-client".to_owned(),
            masking: "off".to_owned(),
            dtype: Dtype::F32,
            patience: Duration::from_secs(30),
            max_rows: 512,
        }
    }
}

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, masking, dtype, patience, max_rows, .. } = self;
        let mut shown = f.debug_struct("Settings");
        shown.field("name", name).field("masking", masking).field("dtype", dtype);
        shown.field("patience", patience).field("max_rows", max_rows).finish_non_exhaustive()
    }
}
