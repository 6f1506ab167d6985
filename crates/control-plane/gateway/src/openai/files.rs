//! `/v1/files`: training data and batches that callers upload, and result files of jobs and batches.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    response::Response,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::paging::{self, PageQuery};
use crate::{
    app::App,
    body::{
        self,
        form::{FormPart, MultipartForm},
    },
    caller::Caller,
    errors::ApiError,
    training::{
        MAX_TRANSFERS, TENANT_TRANSFERS, Training,
        files::{FileSpec, Upload},
        records::{FileRecord, Purpose},
    },
};

const MAX_NAME_BYTES: usize = 256;
/// Memory reserved for one download, in bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Stores an uploaded file; answers when the file is durable.
pub(crate) async fn upload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    form: MultipartForm,
) -> Result<Json<Value>, ApiError> {
    let slot = app.training.upload_slots().acquire(&caller.tenant, app.connections.body_timeout).await;
    let _slot = slot.ok_or_else(|| {
        let message = format!(
            "too many uploads at once: the limits are {TENANT_TRANSFERS} of your files and \
             {MAX_TRANSFERS} of all tenants; try again shortly"
        );
        ApiError::queue_full(1, message)
    })?;
    let file = read_form(&app.training, form, &caller).await?;
    Ok(Json(describe(&file)))
}

/// Reads the form's parts `file` and `purpose`, in either order.
async fn read_form(
    training: &Training,
    mut form: MultipartForm,
    caller: &Caller,
) -> Result<FileRecord, ApiError> {
    let (mut purpose, mut taken) = (None, None);
    while let Some(part) = form.next().await? {
        match part.name() {
            "purpose" if purpose.is_none() => purpose = Some(part.text().await?),
            "file" if taken.is_none() => taken = Some(receive(training, part).await?),
            said @ ("purpose" | "file") => {
                return Err(ApiError::invalid(said, format!("'{said}' appears twice; send it once")));
            }
            other => return Err(ApiError::unsupported(other)),
        }
    }
    let purpose = purpose
        .ok_or_else(|| ApiError::missing("purpose", "'purpose' is required: 'fine-tune' or 'batch'"))?;
    let purpose = Purpose::of_upload(&purpose).ok_or_else(|| {
        let message = format!("'purpose' must be 'fine-tune' or 'batch', not '{purpose}'");
        ApiError::invalid("purpose", message)
    })?;
    let (name, upload) = taken.ok_or_else(|| ApiError::missing("file", "send a file as 'file'"))?;
    if upload.bytes() == 0 {
        return Err(ApiError::invalid("file", "the file is empty"));
    }
    Ok(upload.keep(&caller.tenant, FileSpec::new(name, purpose)).await?)
}

/// Receives the bytes of a file; returns the upload with the file's name.
async fn receive<'a>(
    training: &'a Training,
    mut part: FormPart<'_>,
) -> Result<(String, Upload<'a>), ApiError> {
    let name = part.file_name().unwrap_or("file").to_owned();
    if name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        let message = format!("a file's name has at most {MAX_NAME_BYTES} bytes and no control characters");
        return Err(ApiError::invalid("file", message));
    }
    let mut upload = training.upload().await?;
    while let Some(bytes) = part.chunk().await? {
        upload.write(&bytes).await?;
        let limit = training.max_file_bytes();
        if upload.bytes() > limit {
            return Err(ApiError::file_too_large(limit));
        }
    }
    Ok((name, upload))
}

#[derive(Debug, Deserialize)]
pub(crate) struct FileQuery {
    purpose: Option<String>,
    #[serde(flatten)]
    page: PageQuery,
}

/// Lists the caller's files, newest first.
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<FileQuery>,
) -> Result<Json<Value>, ApiError> {
    let listed = app.training.files(&caller.tenant, &query.page.checked(10_000)?).await?;
    let wanted = |file: &&FileRecord| query.purpose.as_deref().is_none_or(|it| it == file.purpose.as_str());
    let data: Vec<Value> = listed.items.iter().filter(wanted).map(describe).collect();
    Ok(Json(paging::list(&data, listed.has_more)))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.training.file(&id, &caller.tenant).await?)))
}

/// Sends the content of a file.
pub(crate) async fn content(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let file = app.training.file(&id, &caller.tenant).await?;
    let slot = app.training.download_slots().acquire(&caller.tenant, app.connections.body_timeout).await;
    let slot = slot.ok_or_else(|| {
        let message = format!(
            "too many downloads at once: the limits are {TENANT_TRANSFERS} of your files and \
             {MAX_TRANSFERS} of all tenants; try again shortly"
        );
        ApiError::queue_full(1, message)
    })?;
    let memory = app.memory.reserve(&caller.tenant, PIECE_BYTES)?;
    let opened = app.training.content(&file).await?;
    Ok(body::file::respond(opened, file.bytes, (slot, memory)))
}

pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let file = app.training.remove_file(&id, &caller.tenant).await?;
    Ok(Json(json!({ "id": file.id, "object": "file", "deleted": true })))
}

fn describe(file: &FileRecord) -> Value {
    json!({
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.name,
        "purpose": file.purpose.as_str(),
        // The content is checked only when a job or a batch begins.
        "status": "processed",
    })
}
