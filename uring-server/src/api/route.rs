//! Method and path to what is served there.

use crate::api::error::ApiError;

/// Everything this server serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// POST `/v1/chat/completions`.
    ChatCompletions,
    /// GET `/steady_clock_offset`.
    ClockRead,
    /// POST `/steady_clock_offset`.
    ClockSet,
    /// POST `/v1/completions`.
    Completions,
    /// POST `/detokenize`.
    Detokenize,
    /// GET `/health`.
    Health,
    /// GET `/health_generate`.
    HealthGenerate,
    /// GET `/metrics` and `/prometheus/metrics`.
    Metrics,
    /// GET `/v1/models/{id}`; the id, percent-decoded.
    Model(String),
    /// GET `/v1/models`.
    Models,
    /// GET `/server_info`.
    ServerInfo,
    /// POST `/tokenize`.
    Tokenize,
    /// GET `/version`.
    Version,
}

/// A request that no route takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unrouted {
    /// 404 or 405.
    pub error: ApiError,
    /// The `Allow` header of a 405 (RFC 9110 section 15.5.6).
    pub allow: Option<&'static str>,
}

/// Finds the route of a method and a request target in origin form; what follows `?` does not matter.
///
/// Paths are compared as they are: no trailing slash, no doubled one, no percent-encoding of our own letters, as
/// two spellings of one route are how a proxy's rules are gone around. `HEAD` is `GET` without a body.
///
/// # Errors
/// [`Unrouted`] with a 405 and its `Allow`, or a 404.
pub fn find(method: &str, target: &str) -> Result<Route, Unrouted> {
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    let allow = match path {
        "/steady_clock_offset" => "GET, HEAD, POST",
        "/v1/chat/completions" | "/v1/completions" | "/tokenize" | "/detokenize" => "POST",
        "/health"
        | "/health_generate"
        | "/metrics"
        | "/prometheus/metrics"
        | "/server_info"
        | "/v1/models"
        | "/version" => "GET, HEAD",
        "/perf_metrics" => return Err(unrouted(PERF_METRICS)),
        _ if model_id(path).is_some() => "GET, HEAD",
        _ => return Err(unrouted("Nothing is served at this path.")),
    };
    let reads = matches!(method, "GET" | "HEAD");
    let found = match path {
        "/steady_clock_offset" if reads => Route::ClockRead,
        "/steady_clock_offset" if method == "POST" => Route::ClockSet,
        "/v1/chat/completions" if method == "POST" => Route::ChatCompletions,
        "/v1/completions" if method == "POST" => Route::Completions,
        "/tokenize" if method == "POST" => Route::Tokenize,
        "/detokenize" if method == "POST" => Route::Detokenize,
        "/health" if reads => Route::Health,
        "/health_generate" if reads => Route::HealthGenerate,
        "/metrics" | "/prometheus/metrics" if reads => Route::Metrics,
        "/server_info" if reads => Route::ServerInfo,
        "/v1/models" if reads => Route::Models,
        "/version" if reads => Route::Version,
        _ => match model_id(path).filter(|_| reads) {
            Some(id) => Route::Model(id),
            None => return Err(method_not_allowed(allow)),
        },
    };
    Ok(found)
}

/// Returns the id of `/v1/models/{id}`. It may hold slashes, as model names do, written plainly or as `%2F`.
fn model_id(path: &str) -> Option<String> {
    let encoded = path.strip_prefix("/v1/models/").filter(|id| !id.is_empty())?;
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let [high, low, tail @ ..] = rest else { return None };
        bytes.push(u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()?);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}

fn unrouted(message: &'static str) -> Unrouted {
    Unrouted { error: ApiError::not_found(message), allow: None }
}

fn method_not_allowed(allow: &'static str) -> Unrouted {
    let error = ApiError { status: 405, ..ApiError::body(format!("This path takes only {allow}.")) };
    Unrouted { error, allow: Some(allow) }
}

const PERF_METRICS: &str = "/perf_metrics was removed. Ask for a request's metrics with the header \
                            'X-TRTLLM-return-metrics: 1', write all of them with --perf-metrics-output-dir, or read \
                            totals at /prometheus/metrics.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_has_its_methods_and_no_other() {
        type Row<'a> = (&'a str, &'a [(&'a str, Route)], &'a str);
        let rows: [Row<'_>; 14] = [
            ("/v1/chat/completions", &[("POST", Route::ChatCompletions)], "POST"),
            ("/v1/completions", &[("POST", Route::Completions)], "POST"),
            ("/tokenize", &[("POST", Route::Tokenize)], "POST"),
            ("/detokenize", &[("POST", Route::Detokenize)], "POST"),
            ("/health", &[("GET", Route::Health), ("HEAD", Route::Health)], "GET, HEAD"),
            (
                "/health_generate",
                &[("GET", Route::HealthGenerate), ("HEAD", Route::HealthGenerate)],
                "GET, HEAD",
            ),
            ("/metrics", &[("GET", Route::Metrics), ("HEAD", Route::Metrics)], "GET, HEAD"),
            ("/prometheus/metrics", &[("GET", Route::Metrics), ("HEAD", Route::Metrics)], "GET, HEAD"),
            ("/server_info", &[("GET", Route::ServerInfo), ("HEAD", Route::ServerInfo)], "GET, HEAD"),
            ("/version", &[("GET", Route::Version), ("HEAD", Route::Version)], "GET, HEAD"),
            ("/v1/models", &[("GET", Route::Models), ("HEAD", Route::Models)], "GET, HEAD"),
            (
                "/v1/models/org%2Fname/v%201",
                &[
                    ("GET", Route::Model("org/name/v 1".to_owned())),
                    ("HEAD", Route::Model("org/name/v 1".to_owned())),
                ],
                "GET, HEAD",
            ),
            ("/health?verbose=1", &[("GET", Route::Health), ("HEAD", Route::Health)], "GET, HEAD"),
            (
                "/steady_clock_offset",
                &[("GET", Route::ClockRead), ("HEAD", Route::ClockRead), ("POST", Route::ClockSet)],
                "GET, HEAD, POST",
            ),
        ];
        for (target, routes, allow) in rows {
            for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "get"] {
                let found = find(method, target);
                match routes.iter().find(|(served, _)| *served == method) {
                    Some((_, route)) => assert_eq!(found.as_ref(), Ok(route), "{method} {target}"),
                    None => {
                        let unrouted = found.expect_err(target);
                        assert_eq!(
                            (unrouted.error.status, unrouted.allow),
                            (405, Some(allow)),
                            "{method} {target}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn other_paths_are_404() {
        for target in [
            "/",
            "",
            "*",
            "/v1/chat/completions/",
            "//v1/models",
            "/V1/models",
            "/v1/models/",
            "/v1/models/%zz",
            "/v1/models/%f",
            "/v1/models/%ff",
            "/v2/nope",
            "/v1/chat%2Fcompletions",
        ] {
            let unrouted = find("GET", target).expect_err(target);
            assert_eq!((unrouted.error.status, unrouted.allow), (404, None), "{target}");
        }
    }

    #[test]
    fn the_removed_path_says_what_replaced_it() {
        for method in ["GET", "POST"] {
            let error = find(method, "/perf_metrics").unwrap_err().error;
            assert_eq!(error.status, 404);
            for part in ["X-TRTLLM-return-metrics", "--perf-metrics-output-dir", "/prometheus/metrics"] {
                assert!(error.message.contains(part), "{part}");
            }
        }
    }
}
