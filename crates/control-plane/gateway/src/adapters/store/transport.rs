//! HTTP client of `object_store` for buckets, and of hubs, with the TLS configuration that all processes here
//! share.

use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::Body;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector as TcpConnector},
    rt::TokioExecutor,
};
use object_store::{
    ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
        HttpResponseBody, HttpService,
    },
};
use security::tls_client::{CredentialsError, TlsFiles};
use tokio::time::timeout;

/// Client for requests with bodies of type `B`.
pub(in crate::adapters) type HttpsClient<B> = Client<HttpsConnector<TcpConnector>, B>;

/// Timeout of a connection or an answer of the bucket.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct BucketTransport;

#[derive(Debug)]
struct Service(HttpsClient<HttpRequestBody>);

impl HttpConnector for BucketTransport {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = https_client();
        let client =
            client.map_err(|error| object_store::Error::Generic { store: "S3", source: error.into() })?;
        Ok(HttpClient::new(Service(client)))
    }
}

/// Returns a client that trusts the authorities of the system, and follows no redirects.
///
/// # Errors
/// If the system has no authorities.
pub(in crate::adapters) fn https_client<B>() -> Result<HttpsClient<B>, CredentialsError>
where
    B: Body + Send,
    B::Data: Send,
{
    let trusted = security::tls_client::config(&TlsFiles::default())?;
    let mut tcp = TcpConnector::new();
    tcp.set_connect_timeout(Some(PATIENCE));
    tcp.enforce_http(false);
    let connector = HttpsConnectorBuilder::new().with_tls_config(trusted).https_or_http().enable_http1();
    Ok(Client::builder(TokioExecutor::new()).build(connector.wrap_connector(tcp)))
}

#[async_trait::async_trait]
impl HttpService for Service {
    /// Returns the head of the answer; the body is streamed as it is read.
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = timeout(PATIENCE, self.0.request(request)).await;
        let answer = answer.map_err(|elapsed| HttpError::new(HttpErrorKind::Timeout, elapsed))?;
        let answer = answer.map_err(|error| {
            let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
            HttpError::new(kind, error)
        })?;
        let body = |error| HttpError::new(HttpErrorKind::Interrupted, error);
        Ok(answer.map(|answer| HttpResponseBody::new(answer.map_err(body))))
    }
}
