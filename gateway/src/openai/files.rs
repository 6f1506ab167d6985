//! `/v1/files`: what people send to learn from, and what jobs have measured.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::{Multipart, Path, Query, State, multipart::Field},
    http::{HeaderValue, header},
    response::Response,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::paging::{self, PageQuery};
use crate::{
    app::App,
    caller::Caller,
    errors::ApiError,
    training::{
        Training,
        records::{FileRecord, Purpose},
    },
};

/// Longest name of a file, in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Longest text field beside the file, in bytes.
const MAX_FIELD_BYTES: usize = 1024;

/// Takes a file in; answers when it is durable.
pub async fn upload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    form: Multipart,
) -> Result<Json<Value>, ApiError> {
    let training = Arc::clone(&app.training);
    let _turn = timeout(app.connections.body_timeout, training.turn())
        .await
        .map_err(|_| ApiError::queue_full(1, "other files are being taken in; try again shortly"))?;
    let file = take(&app, &training, form, &caller).await?;
    Ok(Json(describe(&file)))
}

/// Reads the form: `file`, and `purpose` before or behind it.
async fn take(
    app: &App,
    training: &Training,
    mut form: Multipart,
    caller: &Caller,
) -> Result<FileRecord, ApiError> {
    let (mut purpose, mut taken) = (None, None);
    while let Some(mut field) = next(app, &mut form).await? {
        match field.name().unwrap_or_default() {
            "purpose" => purpose = Some(short_text(app, "purpose", field).await?),
            "file" => {
                let name = field.file_name().unwrap_or("file").to_owned();
                if name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
                    return Err(ApiError::invalid(
                        "file",
                        format!("a file's name has at most {MAX_NAME_BYTES} bytes"),
                    ));
                }
                let mut upload = training.upload().await?;
                while let Some(bytes) = chunk(app, &mut field).await? {
                    upload.write(&bytes).await?;
                    let limit = training.max_file_bytes();
                    if upload.bytes() > limit {
                        return Err(ApiError::file_too_large(limit));
                    }
                }
                taken = Some((name, upload));
            }
            other => return Err(ApiError::unsupported(other)),
        }
    }
    match purpose.as_deref() {
        Some("fine-tune") => {}
        Some(other) => {
            let message = format!("files are taken for 'fine-tune', not for '{other}'");
            return Err(ApiError::invalid("purpose", message));
        }
        None => return Err(ApiError::missing("purpose", "say what the file is for: 'purpose': 'fine-tune'")),
    }
    let (name, upload) = taken.ok_or_else(|| ApiError::missing("file", "send a file as 'file'"))?;
    if upload.bytes() == 0 {
        return Err(ApiError::invalid("file", "the file is empty"));
    }
    Ok(upload.keep(&caller.tenant, name, Purpose::FineTune).await?)
}

pub(super) async fn next<'a>(app: &App, form: &'a mut Multipart) -> Result<Option<Field<'a>>, ApiError> {
    let limit = app.connections.body_timeout;
    let next = timeout(limit, form.next_field()).await.map_err(|_| ApiError::body_timeout(limit))?;
    next.map_err(|error| ApiError::body_broken(&error.body_text()))
}

pub(super) async fn chunk(app: &App, field: &mut Field<'_>) -> Result<Option<axum::body::Bytes>, ApiError> {
    let limit = app.connections.body_timeout;
    let chunk = timeout(limit, field.chunk()).await.map_err(|_| ApiError::body_timeout(limit))?;
    chunk.map_err(|error| ApiError::body_broken(&error.body_text()))
}

/// A text field beside the file; `name` is what it is called.
pub(super) async fn short_text(app: &App, name: &str, mut field: Field<'_>) -> Result<String, ApiError> {
    let mut text = Vec::new();
    while let Some(bytes) = chunk(app, &mut field).await? {
        text.extend_from_slice(&bytes);
        if text.len() > MAX_FIELD_BYTES {
            return Err(ApiError::invalid(name, format!("a field has at most {MAX_FIELD_BYTES} bytes")));
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// What a list of files may be narrowed to.
#[derive(Debug, Deserialize)]
pub struct FileQuery {
    purpose: Option<String>,
    #[serde(flatten)]
    page: PageQuery,
}

/// The caller's files, the newest first.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<FileQuery>,
) -> Result<Json<Value>, ApiError> {
    let listed = app.training.files(&caller.tenant, &query.page.checked(10_000)?).await?;
    let wanted = |file: &&FileRecord| query.purpose.as_deref().is_none_or(|it| it == file.purpose.word());
    let data: Vec<Value> = listed.items.iter().filter(wanted).map(describe).collect();
    Ok(Json(paging::list(&data, listed.has_more)))
}

/// One of the caller's files.
pub async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.training.file(&id, &caller.tenant).await?)))
}

/// What is in one of the caller's files.
pub async fn content(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let file = app.training.file(&id, &caller.tenant).await?;
    let opened = app.training.content(&file).await?;
    let pieces = futures::stream::unfold(opened, |mut file| async move {
        let mut piece = vec![0; 64 << 10];
        match tokio::io::AsyncReadExt::read(&mut file, &mut piece).await {
            Ok(0) => None,
            Ok(length) => {
                piece.truncate(length);
                Some((Ok(piece), file))
            }
            Err(error) => Some((Err(error), file)),
        }
    });
    let mut response = Response::new(Body::from_stream(pieces));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(file.bytes));
    Ok(response)
}

/// Removes one of the caller's files.
pub async fn delete(
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
        "filename": file.name,
        "purpose": file.purpose.word(),
        // What is in it is looked at when a job begins.
        "status": "processed",
    })
}
