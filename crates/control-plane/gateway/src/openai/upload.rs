//! `POST /v1/upload_lora_adapter`: loads an adapter from files in the request.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde_json::{Map, Value};

use super::{adapters::loaded, load_request::load_request};
use crate::{
    adapters::{IncomingAdapter, LoadRequest, StoreError},
    app::App,
    body::form::{FormPart, MultipartForm},
    errors::ApiError,
};

/// Text fields and boolean fields that a load by path has too.
const TEXTS: &[&str] = &["lora_name", "tenant", "expected_generation", "base_model_name"];
const FLAGS: &[&str] = &["pinned", "load_inplace"];

/// Receives an adapter's files; answers once the adapter is durable and ready.
pub(crate) async fn upload(
    State(app): State<Arc<App>>,
    form: MultipartForm,
) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let permit = app.registry.begin_load()?;
    let arriving = app.registry.receive()?;
    let request = read_form(&app, &serving.base_name, &arriving, form).await?;
    let entry = app.registry.load_received(arriving, permit, request, (&*serving).into()).await?;
    Ok(Json(loaded(&app, &entry)))
}

/// Reads the form. Text fields must precede the files, so that a bad request fails before files are sent.
async fn read_form(
    app: &App,
    base_name: &str,
    arriving: &IncomingAdapter,
    mut form: MultipartForm,
) -> Result<LoadRequest, ApiError> {
    let (mut texts, mut request) = (Map::new(), None);
    while let Some(part) = form.next().await? {
        let name = part.name().to_owned();
        match name.as_str() {
            "file" => {
                if request.is_none() {
                    request = Some(request_of(app, base_name, &mut texts)?);
                }
                keep(arriving, part).await?;
            }
            _ if request.is_some() => {
                return Err(ApiError::invalid(&name, format!("send '{name}' before the files")));
            }
            other => match load_field(other, &part.text().await?) {
                Some(value) => drop(texts.insert(name, value?)),
                None => return Err(ApiError::unsupported(other)),
            },
        }
    }
    request.ok_or_else(|| ApiError::missing("file", "send an adapter's files, each as 'file'"))
}

/// Returns the value of a field of a load that is sent as text; `None` if a load has no such field.
pub(super) fn load_field(name: &str, text: &str) -> Option<Result<Value, ApiError>> {
    if TEXTS.contains(&name) {
        return Some(Ok(text.into()));
    }
    let flag = || {
        let flag = text.parse::<bool>();
        flag.map(Value::from)
            .map_err(|_| ApiError::invalid(name, format!("'{name}' must be 'true' or 'false', not '{text}'")))
    };
    FLAGS.contains(&name).then(flag)
}

/// Builds the load request of the text fields, and refuses early what the load would refuse.
fn request_of(app: &App, base_name: &str, texts: &mut Map<String, Value>) -> Result<LoadRequest, ApiError> {
    // A load request needs a path, but uploaded files have none on this host.
    let name = texts.get("lora_name").cloned().unwrap_or_default();
    texts.insert("lora_path".to_owned(), name);
    let request = load_request(Value::Object(std::mem::take(texts)).to_string().as_bytes(), base_name)?;
    app.registry.check_load(&request, base_name)?;
    Ok(request)
}

async fn keep(arriving: &IncomingAdapter, mut part: FormPart<'_>) -> Result<(), ApiError> {
    let name = part.file_name().unwrap_or_default().to_owned();
    let mut file = arriving.begin(&name).await.map_err(refused)?;
    while let Some(bytes) = part.chunk().await? {
        file.write(&bytes).await.map_err(refused)?;
    }
    file.end().await.map_err(refused)
}

fn refused(error: StoreError) -> ApiError {
    crate::adapters::AdapterError::from(error).into()
}
