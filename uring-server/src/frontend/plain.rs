//! Answers that need no engine: status pages, models, tokens, errors; and what every answer's head has in common.

use uring_serve_core::http1::RequestHead;
use uring_serve_core::time::{ClockOffset, MonoNs};

use super::exchange::About;
use crate::api::error::{ApiError, Kind};
use crate::api::response::{
    ServerInfo, write_clock, write_detokenized, write_model, write_models, write_server_info,
    write_tokenized, write_version,
};
use crate::api::route::{Route, Unrouted};
use crate::api::tokens::{read_clock_offset, read_detokenize, read_tokenize};
use crate::app::{App, Model};
use crate::config::ApiKey;
use crate::engine::tokenizer::SpecialTokens;
use crate::prometheus;
use crate::service::{Refusal, Reply};
use crate::signals::Stage;

/// What `/health_generate` runs.
pub(super) const PROBE_BODY: &[u8] = b"{\"prompt\":\"hi\",\"max_tokens\":1,\"temperature\":0}";

/// Seconds that a client is asked to wait before it tries again.
const RETRY_AFTER_S: &[u8] = b"1";

/// Longest `x-request-id` that is kept, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Paths that need no key.
const OPEN_PATHS: [&str; 4] = ["/health", "/metrics", "/prometheus/metrics", "/version"];

/// Makes the page of a route that generates nothing: its content type and body.
pub(super) fn page(
    app: &App,
    now: MonoNs,
    wall_seconds: u64,
    route: &Route,
    body: &mut [u8],
) -> Result<(&'static str, Vec<u8>), ApiError> {
    let mut out = Vec::new();
    match route {
        Route::Health => return health(app).map(|()| (TEXT, out)),
        Route::Metrics => {
            let mut page = String::new();
            app.metrics.write_page(&mut page);
            return Ok((prometheus::CONTENT_TYPE, page.into_bytes()));
        }
        Route::Version => write_version(&mut out, env!("CARGO_PKG_VERSION")),
        Route::ClockRead => {
            let at = ClockOffset::default().to_reference(now).as_raw() as f64 / 1e9;
            write_clock(&mut out, at, at);
        }
        Route::ClockSet => {
            let offset = ClockOffset::from_seconds(read_clock_offset(body)?);
            app.set_clock_offset(offset.ok_or_else(|| ApiError::invalid("offset", "'offset' is no time."))?);
        }
        Route::Models | Route::Model(_) | Route::ServerInfo | Route::Tokenize | Route::Detokenize => {
            write_of_model(app, app.loaded()?, wall_seconds, route, body, &mut out)?;
        }
        // The front end runs these itself.
        Route::ChatCompletions | Route::Completions | Route::HealthGenerate => {
            return Err(ApiError::server("This route has no page."));
        }
    }
    Ok((JSON, out))
}

/// The pages that need the model.
fn write_of_model(
    app: &App,
    model: &Model,
    wall_seconds: u64,
    route: &Route,
    body: &mut [u8],
    out: &mut Vec<u8>,
) -> Result<(), ApiError> {
    let name = &app.config.served_model_name;
    match route {
        Route::Models => write_models(out, name, model.created, model.context_tokens),
        Route::Model(id) if id == name => write_model(out, id, model.created, model.context_tokens),
        Route::Model(id) => return Err(ApiError::unknown_model(id)),
        Route::Tokenize => {
            let request = read_tokenize(body, &app.context(model))?;
            app.unknown_fields.report(&request.unknown);
            let ids = model.tokenize_request(&request, wall_seconds)?;
            let spellings = request.return_token_strs.then_some(&*model.tokenizer);
            write_tokenized(out, &ids, model.context_tokens, spellings);
        }
        Route::Detokenize => {
            let request = read_detokenize(body, &app.context(model))?;
            app.unknown_fields.report(&request.unknown);
            write_detokenized(out, &model.tokenizer.decode(&request.tokens, SpecialTokens::Show));
        }
        Route::ServerInfo
        | Route::ChatCompletions
        | Route::ClockRead
        | Route::ClockSet
        | Route::Completions
        | Route::Health
        | Route::HealthGenerate
        | Route::Metrics
        | Route::Version => write_info(app, model, out),
    }
    Ok(())
}

fn health(app: &App) -> Result<(), ApiError> {
    if app.shutdown.stage() != Stage::Serving {
        return Err(ApiError::unavailable("The server is shutting down."));
    }
    app.loaded().map(drop)
}

fn write_info(app: &App, model: &Model, out: &mut Vec<u8>) {
    let info = ServerInfo {
        version: env!("CARGO_PKG_VERSION"),
        model: &app.config.served_model_name,
        engine: model.engine,
        device: &model.spec.device,
        role: "server",
        context_tokens: model.context_tokens,
        vocab: model.spec.vocab,
        batch_seqs_max: app.config.max_batch_size,
        batch_tokens_max: app.config.max_num_tokens,
        kv_cache_tokens: model.kv_cache_tokens,
    };
    write_server_info(out, &info);
}

/// The head's fields that every answer has: content type, the request's id.
pub(super) fn fields<'a>(about: &'a About, content_type: &'static str) -> Vec<(&'a str, &'a [u8])> {
    let mut fields: Vec<(&str, &[u8])> = Vec::with_capacity(10);
    fields.push(("Content-Type", content_type.as_bytes()));
    fields.push(("x-request-id", about.request_id.as_bytes()));
    fields
}

/// Sends a whole answer.
pub(super) fn send(content_type: &'static str, body: &[u8], about: &About, reply: &mut dyn Reply) {
    reply.send(200, &fields(about, content_type), body);
}

/// Sends a line of text.
pub(super) fn send_text(status: u16, text: &str, about: &About, reply: &mut dyn Reply) {
    reply.send(status, &fields(about, TEXT), text.as_bytes());
}

/// Sends an error object. `body` is scratch space.
pub(super) fn send_error(error: &ApiError, about: &About, reply: &mut dyn Reply, body: &mut Vec<u8>) {
    body.clear();
    error.write_json(body);
    let mut fields = fields(about, JSON);
    if matches!(error.status, 429 | 503) {
        fields.push(("Retry-After", RETRY_AFTER_S));
    }
    reply.send(error.status, &fields, body);
}

/// Sends the 404 or 405 of a request that no route takes.
pub(super) fn send_unrouted(unrouted: &Unrouted, about: &About, reply: &mut dyn Reply, body: &mut Vec<u8>) {
    body.clear();
    unrouted.error.write_json(body);
    let mut fields = fields(about, JSON);
    if let Some(allow) = unrouted.allow {
        fields.push(("Allow", allow.as_bytes()));
    }
    reply.send(unrouted.error.status, &fields, body);
}

/// Returns the client's `x-request-id` if it is one, short, and visible ASCII.
pub(super) fn kept_request_id(head: &RequestHead<'_>) -> Option<String> {
    let mut values = head.header_values("x-request-id");
    let value = values.next().filter(|value| (1..=REQUEST_ID_BYTES_MAX).contains(&value.len()))?;
    let only = values.next().is_none() && value.iter().all(u8::is_ascii_graphic);
    only.then(|| String::from_utf8_lossy(value).into_owned())
}

/// Judges `Authorization: Bearer KEY` before the body is read.
pub(super) fn judge_login(key: Option<&ApiKey>, head: &RequestHead<'_>) -> Option<Refusal> {
    let key = key.filter(|_| !OPEN_PATHS.contains(&head.path))?;
    let mut values = head.header_values("authorization");
    let presented = values.next().and_then(|value| {
        let (scheme, token) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
    });
    if presented.is_some_and(|token| key.matches(token)) && values.next().is_none() {
        return None;
    }
    let error = ApiError {
        status: 401,
        kind: Kind::Authentication,
        message: "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.".into(),
        param: None,
        code: Some("invalid_api_key"),
    };
    let mut body = Vec::new();
    error.write_json(&mut body);
    let headers = vec![("Content-Type", JSON.to_owned()), ("WWW-Authenticate", "Bearer".to_owned())];
    Some(Refusal { status: 401, headers, body })
}

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
