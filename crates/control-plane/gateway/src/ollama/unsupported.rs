//! Routes of Ollama that this server does not have; each error names the alternative.

use crate::errors::ApiError;

fn refuse(what: &str, instead: &str) -> ApiError {
    ApiError::not_implemented("not_supported", format!("this server does not {what}; {instead}"))
}

/// `POST /api/pull`: not implemented.
pub(crate) async fn pull() -> ApiError {
    refuse(
        "pull models",
        "the operator chooses the model at start, and adds adapters with 'holobiont adapters add'",
    )
}

/// `POST /api/push`: not implemented.
pub(crate) async fn push() -> ApiError {
    refuse("push models", "adapters are files on the server")
}

/// `POST /api/create`: not implemented.
pub(crate) async fn create() -> ApiError {
    refuse(
        "create models from a Modelfile",
        "send 'system' and 'options' with each request, or train an adapter",
    )
}

/// `POST /api/copy`: not implemented.
pub(crate) async fn copy() -> ApiError {
    refuse("copy models", "add the adapter under another name with 'holobiont adapters add'")
}

/// `DELETE /api/delete`: not implemented.
pub(crate) async fn delete() -> ApiError {
    refuse("delete models on this route", "remove an adapter with DELETE /v1/models/NAME")
}
