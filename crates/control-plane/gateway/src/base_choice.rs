//! Finds the base of a request, wakes it, and passes the request to the handler of the route.
//!
//! With one base that never sleeps, handlers are called directly. Otherwise the table of routes says where a
//! request names its base: a body in JSON is read here, and the handler reads the same bytes again. The base
//! stays awake until the last byte of the answer.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{FromRequest as _, FromRequestParts as _, Query, RawPathParams, Request},
    handler::Handler as _,
    http::{Method, request::Parts},
    response::{IntoResponse as _, Response},
    routing::{MethodFilter, MethodRouter, on},
};
use hyper::body::{Frame, SizeHint};
use serde::Deserialize;

use crate::{
    app::App,
    bases::{Bases, name_in_requests},
    body::{JsonBody, caller_of},
    caller::Caller,
    errors::ApiError,
    openai::{models::usable_names, target::MAX_LISTED},
    served_base::BaseUse,
};

/// Where a request names its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BaseChoice {
    /// The first base, which the request does not wake.
    First,
    /// The first base, because only it has this feature; a body in JSON that names another base is refused.
    FirstOnly(&'static str),
    /// The field `model` of the body in JSON.
    Model,
    /// The model in the path.
    Path,
    /// The executor in the path; the request wakes no base.
    Executor,
    /// The adapter and its base: fields of the body in JSON.
    AdapterBody,
    /// The adapter and its base: in the path, and in the query.
    AdapterPath,
}

/// Values of a request that name a base.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NamedModel {
    model: Option<String>,
    /// Model in older requests of Ollama's API.
    name: Option<String>,
    /// Model in requests of Tinker's API.
    base_model: Option<String>,
    lora_name: Option<String>,
    base_model_name: Option<String>,
}

/// Request whose base is known, and the body if that was read.
type ReadRequest = (Request, NamedModel, Option<JsonBody>);

/// Returns the handler of a route that finds the base of each request.
pub(crate) fn dispatched(
    bases: &Arc<Bases>,
    method: &Method,
    choice: BaseChoice,
    handler: MethodRouter<Arc<App>>,
) -> MethodRouter<Arc<App>> {
    // Every method of the table is one that a filter knows.
    let filter = MethodFilter::try_from(method.clone()).unwrap_or(MethodFilter::POST);
    let bases = Arc::clone(bases);
    on(filter, move |request: Request| async move {
        dispatch(&bases, choice, handler, request).await.unwrap_or_else(ApiError::into_response)
    })
}

async fn dispatch(
    bases: &Bases,
    choice: BaseChoice,
    handler: MethodRouter<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = caller_of(&request)?;
    let (request, named, body) = choice.read(bases, request).await?;
    let app = choice.base(bases, &named, &caller)?;
    // Requests for lists and reports leave a sleeping base asleep, and let an idle one fall asleep.
    let used = match choice.wakes(request.method()) {
        true => Some(bases.use_awake(app, &caller.tenant).await?),
        false => None,
    };
    let request = match body {
        // The handler reserves memory for the same bytes.
        Some(body) => request.map(|_| Body::from(body.into_bytes())),
        None => request,
    };
    let response = handler.call(request, Arc::clone(app)).await;
    Ok(match used {
        Some(used) => response.map(|body| Body::new(UsingBody { body, _used: used })),
        None => response,
    })
}

impl BaseChoice {
    fn wakes(self, method: &Method) -> bool {
        !matches!(self, Self::First | Self::Executor) && !method.is_safe()
    }

    /// Reads what names the base.
    async fn read(self, bases: &Bases, request: Request) -> Result<ReadRequest, ApiError> {
        let (mut parts, body) = request.into_parts();
        let is_post = parts.method == Method::POST;
        match self {
            _ if !bases.are_several() => {}
            Self::Model | Self::AdapterBody | Self::FirstOnly(_) if is_post && is_json(&parts) => {
                let app = bases.first();
                let again = Request::from_parts(parts.clone(), Body::empty());
                let body = JsonBody::from_request(Request::from_parts(parts, body), app).await?;
                let bytes = body.bytes();
                // The handler reports a body that is not valid.
                let read = move || Ok(serde_json::from_slice::<NamedModel>(&bytes).unwrap_or_default());
                let named = app.bodies.run(body.origin(), read).await?;
                return Ok((again, named, Some(body)));
            }
            Self::Path | Self::Executor | Self::AdapterPath => {
                let named = NamedModel::of_address(&mut parts).await;
                return Ok((Request::from_parts(parts, body), named, None));
            }
            _ => {}
        }
        Ok((Request::from_parts(parts, body), NamedModel::default(), None))
    }

    fn base<'a>(
        self,
        bases: &'a Bases,
        named: &NamedModel,
        caller: &Caller,
    ) -> Result<&'a Arc<App>, ApiError> {
        let model = named.model.as_ref().or(named.name.as_ref());
        match (self, model) {
            (Self::Model | Self::Path, Some(model)) => {
                bases.of_model(model, caller)?.ok_or_else(|| unknown(bases, model, caller))
            }
            (Self::FirstOnly(feature), model) => {
                check_first(bases, feature, model.or(named.base_model.as_ref()), caller)
            }
            (Self::AdapterBody | Self::AdapterPath, _) => Ok(of_adapter(bases, named, caller)),
            (Self::Executor, Some(name)) => {
                let with = bases.all().iter().find(|app| app.executors.named(name).is_some());
                Ok(with.unwrap_or(bases.first()))
            }
            _ => Ok(bases.first()),
        }
    }
}

impl NamedModel {
    /// Reads the path and the query of a request.
    async fn of_address(parts: &mut Parts) -> Self {
        let path = RawPathParams::from_request_parts(parts, &()).await.ok();
        let name = path.and_then(|path| path.iter().next().map(|(_, value)| value.to_owned()));
        let query = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
        let fields = query.map(|Query(fields)| fields).unwrap_or_default();
        let base = fields.into_iter().find(|(field, _)| field == "base_model_name");
        Self {
            model: name.clone(),
            lora_name: name,
            base_model_name: base.map(|(_, value)| value),
            ..Self::default()
        }
    }
}

/// Whether the body may be JSON; the handler refuses other types where it wants JSON.
fn is_json(parts: &Parts) -> bool {
    let kind = parts.headers.get(axum::http::header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_none_or(|kind| !kind.contains("protobuf") && !kind.contains("multipart"))
}

/// Returns the error of a model that no base knows, with the models that the caller may use.
fn unknown(bases: &Bases, model: &str, caller: &Caller) -> ApiError {
    let names = bases.all().iter().filter_map(|app| name_in_requests(app));
    let adapters = bases.all().iter().flat_map(|app| usable_names(app, caller));
    ApiError::model_not_found(model)
        .naming_models(&names.chain(adapters).take(MAX_LISTED).collect::<Vec<_>>())
}

/// Returns the first base, and refuses a model of another base.
fn check_first<'a>(
    bases: &'a Bases,
    feature: &str,
    model: Option<&String>,
    caller: &Caller,
) -> Result<&'a Arc<App>, ApiError> {
    let first = bases.first();
    let Some(model) = model else { return Ok(first) };
    match bases.of_model(model, caller)?.filter(|app| !Arc::ptr_eq(app, first)) {
        // The handler knows more about the models of this feature.
        None => Ok(first),
        Some(other) => {
            let [name, first] = [other, first].map(|app| name_in_requests(app).unwrap_or_default());
            let message = format!(
                "{feature} is not possible with the base '{name}', only with '{first}', the first base of this \
                 deployment; use '{first}', or start a deployment whose first base is '{name}'"
            );
            Err(ApiError::not_implemented("first_base_only", message).of("model"))
        }
    }
}

/// Returns the base of an adapter: the one that the request names, or the one at which the adapter is
/// registered, or the first. The registry refuses a name that another base has.
fn of_adapter<'a>(bases: &'a Bases, named: &NamedModel, caller: &Caller) -> &'a Arc<App> {
    let owner = named.lora_name.as_deref().and_then(|name| bases.with_adapter(name, caller));
    // The handler refuses a base that there is not.
    let wanted = named.base_model_name.as_deref().and_then(|name| bases.served_as(name));
    wanted.or(owner).unwrap_or(bases.first())
}

/// The body of an answer, which keeps its base awake.
struct UsingBody {
    body: Body,
    _used: BaseUse,
}

impl HttpBody for UsingBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
