//! How a client behaves towards its executor.

use std::{fmt, time::Duration};

use shmproto::layer::Dtype;

/// How a client behaves towards its executor.
#[derive(Clone)]
pub struct ClientSettings {
    /// API key; `None` where a certificate, or the socket, says who the client is.
    pub key: Option<String>,
    /// What it calls itself in the operator's lists.
    pub name: String,
    /// How it protects its activations: `off`, `paper`, `pads` or `shares`.
    pub masking: String,
    /// How rows travel.
    pub dtype: Dtype,
    /// How long a lost executor, or a refusal for lack of room, is waited for.
    pub patience: Duration,
    /// Most rows of a call; the executor may take fewer.
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
