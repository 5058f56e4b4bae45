//! The peer: hyper 1.x on a tokio current-thread runtime, doing the same work.
//!
//! What is not HTTP is ours on both sides: routes, body parsing, template, tokeniser, engine thread, encoder. What is
//! compared is the way from a socket to these and back. It is written as a hyper user would: a task per connection, a
//! task that the engine's waker notifies, a channel per stream, one frame per event. It does less than our server: no
//! time limits on heads and bodies, no histograms, no per-request metrics, no bound on what a slow client is owed.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::thread;

use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};
use uring_serve::api::error::ApiError;
use uring_serve::api::request::Endpoint;
use uring_serve::api::request::Stream;
use uring_serve::api::response::{
    Choice, ChunkTemplate, FinishReason, ResponseHead, Usage, UsageChunk, write_response,
};
use uring_serve::api::route::{self, Route};
use uring_serve::app::{App, Prepared, UnknownNames};
use uring_serve::args::{self, Invocation};
use uring_serve::backend::{self, EngineKind};
use uring_serve::clock::{Clock, SystemClock};
use uring_serve::config::Config;
use uring_serve::engine::{Delta, Ended, Engine, EngineClient, Job, Mailroom, Submission};
use uring_serve::pool::Wake;
use uring_serve::prometheus::Metrics;
use uring_serve::service::ExchangeId;
use uring_serve_core::sse;

type Failure = Box<dyn std::error::Error>;
type Answer = Response<Either<Full<Bytes>, Events>>;

/// Serves until the process is killed.
pub(crate) fn run() -> Result<(), Failure> {
    let Invocation::Serve(config) =
        args::parse(std::env::args_os()).map_err(|failure| failure.to_string())?
    else {
        return Err("the arguments of `serve` are missing".into());
    };
    uring_serve::nofile::raise();
    let bell = Arc::new(Bell::default());
    let hub = start_engine(*config, &bell)?;
    // The thread has a name of its own, so that its time can be told from the engine's.
    let serve = move || -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        runtime.block_on(accept(hub, bell))
    };
    let thread = thread::Builder::new().name(crate::children::PEER_THREAD.into()).spawn(serve)?;
    thread.join().map_err(|_| "the runtime panicked")??;
    Ok(())
}

/// The engine's waker.
#[derive(Default)]
struct Bell(Notify);

impl Wake for Bell {
    fn wake(&self) {
        self.0.notify_one();
    }
}

/// What connections share.
struct Hub {
    app: Arc<App>,
    engine: EngineClient,
    clock: SystemClock,
    serial: AtomicU64,
    /// Requests that the engine runs, by serial.
    exchanges: Mutex<HashMap<u64, Exchange>>,
}

/// One request that the engine runs.
struct Exchange {
    endpoint: Endpoint,
    id: u128,
    created: u64,
    model: String,
    prompt_tokens: u64,
    out: Out,
}

enum Out {
    Events { template: ChunkTemplate, usage: UsageChunk, opened: bool, sender: UnboundedSender<Bytes> },
    Whole { text: String, sender: oneshot::Sender<Result<Bytes, ApiError>> },
}

fn start_engine(config: Config, bell: &Arc<Bell>) -> Result<Arc<Hub>, Failure> {
    let clock = Arc::new(SystemClock);
    let waker = Arc::clone(bell) as Arc<dyn Wake>;
    let (mailroom, mut clients) = Mailroom::new(vec![waker], config.max_queued_requests as usize);
    let loaded = backend::load(&config, EngineKind::Sim, clock.wall_seconds())
        .map_err(|failure| failure.to_string())?;
    let metrics = Arc::new(Metrics::new(&config.served_model_name, EngineKind::Sim.name(), 1));
    let tokenizer = Arc::clone(&loaded.model.tokenizer);
    let engine = Engine::new(loaded.backend, clock, loaded.shape, tokenizer, mailroom, Arc::clone(&metrics))
        .map_err(|error| error.to_string())?;
    thread::Builder::new().name("engine".into()).spawn(move || engine.run(|| {}))?;
    let app = App {
        config,
        model: OnceLock::from(loaded.model),
        shutdown: Arc::default(),
        metrics,
        unknown_fields: UnknownNames::default(),
        clock_offset_ns: AtomicI64::new(0),
    };
    Ok(Arc::new(Hub {
        app: Arc::new(app),
        engine: clients.remove(0),
        clock: SystemClock,
        serial: AtomicU64::new(0),
        exchanges: Mutex::default(),
    }))
}

async fn accept(hub: Arc<Hub>, bell: Arc<Bell>) -> io::Result<()> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
    socket.listen(4096)?;
    let listener = TcpListener::from_std(socket.into())?;
    writeln!(io::stderr(), "{}{}", crate::children::LISTENING, listener.local_addr()?)?;
    tokio::spawn(dispatch(Arc::clone(&hub), bell));
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let hub = Arc::clone(&hub);
        let service = service_fn(move |request| answer(Arc::clone(&hub), request));
        tokio::spawn(async move {
            // A client that leaves is no news.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// Hands the engine's news to those who wait for it.
async fn dispatch(hub: Arc<Hub>, bell: Arc<Bell>) {
    loop {
        bell.0.notified().await;
        while let Some(mut batch) = hub.engine.take_batch() {
            let mut exchanges = hub.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
            for delta in batch.deltas.drain(..) {
                apply(&mut exchanges, &delta, &batch.text[delta.text.clone()]);
            }
            drop(exchanges);
            hub.engine.return_batch(batch);
        }
    }
}

fn apply(exchanges: &mut HashMap<u64, Exchange>, delta: &Delta, text: &str) {
    let serial = delta.exchange.serial;
    if delta.end.is_some() {
        if let Some(exchange) = exchanges.remove(&serial) {
            exchange.finish(delta, text);
        }
    } else if let Some(exchange) = exchanges.get_mut(&serial) {
        match &mut exchange.out {
            Out::Events { template, opened, sender, .. } => {
                let mut event = Vec::with_capacity(256);
                if !std::mem::replace(opened, true) {
                    template.write_role(&mut event, 0);
                }
                if !text.is_empty() {
                    template.write_text(&mut event, 0, text);
                }
                if !event.is_empty() {
                    // A client that left has dropped the other end, and told the engine.
                    let _ = sender.send(Bytes::from(event));
                }
            }
            Out::Whole { text: whole, .. } => whole.push_str(text),
        }
    }
}

impl Exchange {
    /// Sends the last of it.
    fn finish(self, delta: &Delta, text: &str) {
        let Self { endpoint, id, created, model, prompt_tokens, out } = self;
        let reason = match delta.end.as_ref().map(|end| &end.ended) {
            Some(Ended::Length) => FinishReason::Length,
            Some(Ended::Stop) => FinishReason::Stop,
            Some(Ended::Cancelled | Ended::Failed | Ended::NeverFits | Ended::QueueFull) | None => {
                if let Out::Whole { sender, .. } = out {
                    // See above.
                    let _ = sender.send(Err(ApiError::overloaded()));
                }
                return;
            }
        };
        let usage = Usage { prompt_tokens, cached_tokens: None, completion_tokens: u64::from(delta.tokens) };
        match out {
            Out::Events { template, usage: asked, opened, sender } => {
                let mut events = Vec::with_capacity(512);
                if !opened {
                    template.write_role(&mut events, 0);
                }
                if !text.is_empty() {
                    template.write_text(&mut events, 0, text);
                }
                template.write_finish(&mut events, 0, reason);
                if asked == UsageChunk::Asked {
                    template.write_usage(&mut events, &usage);
                }
                sse::write_done(&mut events);
                let _ = sender.send(Bytes::from(events));
            }
            Out::Whole { text: mut whole, sender } => {
                whole.push_str(text);
                let head = ResponseHead { endpoint, id, created, model: &model };
                let mut body = Vec::with_capacity(512);
                write_response(&mut body, &head, &[Choice { index: 0, text: &whole, reason }], &usage);
                let _ = sender.send(Ok(Bytes::from(body)));
            }
        }
    }
}

async fn answer(hub: Arc<Hub>, request: Request<Incoming>) -> Result<Answer, Infallible> {
    let result = match route::find(request.method().as_str(), request.uri().path()) {
        Ok(Route::ChatCompletions) => generate(hub, Endpoint::Chat, request).await,
        Ok(Route::Completions) => generate(hub, Endpoint::Completions, request).await,
        Ok(_) => Err(ApiError::server("The peer does not serve this route.")),
        Err(unrouted) => Err(unrouted.error),
    };
    Ok(result.unwrap_or_else(|error| {
        let mut body = Vec::new();
        error.write_json(&mut body);
        let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        respond(status, "application/json", Either::Left(Full::new(Bytes::from(body))))
    }))
}

async fn generate(hub: Arc<Hub>, endpoint: Endpoint, request: Request<Incoming>) -> Result<Answer, ApiError> {
    let body = request.into_body().collect().await;
    let body = body.map_err(|error| ApiError::invalid("body", error.to_string()))?.to_bytes();
    let mut body = Vec::from(body);
    let created = hub.clock.wall_seconds();
    let prepared = hub.app.prepare(endpoint, &mut body, created)?;
    let serial = hub.serial.fetch_add(1, Ordering::Relaxed) + 1;
    let cancelled = Arc::new(AtomicBool::new(false));
    let submission = submission(&hub, serial, &prepared, &cancelled);
    let (exchange, receiver) = exchange(&hub, serial, created, prepared);
    hub.exchanges.lock().unwrap_or_else(PoisonError::into_inner).insert(serial, exchange);
    if hub.engine.submit(submission).is_err() {
        hub.exchanges.lock().unwrap_or_else(PoisonError::into_inner).remove(&serial);
        return Err(ApiError::overloaded());
    }
    let cancel = CancelOnDrop(cancelled);
    match receiver {
        Receiver::Events(receiver) => {
            let events = Either::Right(Events { receiver, _cancel: cancel });
            let mut answer = respond(StatusCode::OK, "text/event-stream; charset=utf-8", events);
            answer.headers_mut().insert(CACHE_CONTROL, hyper::header::HeaderValue::from_static("no-cache"));
            Ok(answer)
        }
        Receiver::Whole(receiver) => {
            let body = receiver.await.map_err(|_| ApiError::server("The engine is gone."))??;
            Ok(respond(StatusCode::OK, "application/json", Either::Left(Full::new(body))))
        }
    }
}

enum Receiver {
    Events(UnboundedReceiver<Bytes>),
    Whole(oneshot::Receiver<Result<Bytes, ApiError>>),
}

fn submission(hub: &Hub, serial: u64, prepared: &Prepared, cancelled: &Arc<AtomicBool>) -> Submission {
    let ends = hub.app.model.get().map_or(&[][..], |model| model.tokenizer.ends());
    let jobs = prepared.prompts.iter().map(|prompt| Job {
        exchange: ExchangeId { worker: 0, slot: 0, serial },
        choice: 0,
        prompt: Arc::clone(&prompt.tokens),
        output_tokens_max: prompt.output_tokens_max,
        sampling: prepared.request.sampling_params(0, serial, ends),
        stop: Arc::clone(&prepared.stop),
        trace: false,
        cancelled: Arc::clone(cancelled),
    });
    Submission { jobs: jobs.collect() }
}

fn exchange(hub: &Hub, serial: u64, created: u64, prepared: Prepared) -> (Exchange, Receiver) {
    let Prepared { request, prompts, .. } = prepared;
    let model = request.model.unwrap_or_else(|| hub.app.config.served_model_name.clone());
    let (endpoint, id) = (request.endpoint, u128::from(serial));
    let head = ResponseHead { endpoint, id, created, model: &model };
    let usage = match request.stream {
        Stream::Off => None,
        Stream::WithUsage => Some(UsageChunk::Asked),
        Stream::WithoutUsage => Some(UsageChunk::NotAsked),
    };
    let (out, receiver) = match usage {
        None => {
            let (sender, receiver) = oneshot::channel();
            (Out::Whole { text: String::new(), sender }, Receiver::Whole(receiver))
        }
        Some(usage) => {
            let (sender, receiver) = unbounded_channel();
            let template = ChunkTemplate::new(&head, usage);
            (Out::Events { template, usage, opened: false, sender }, Receiver::Events(receiver))
        }
    };
    let prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum();
    (Exchange { endpoint, id, created, model, prompt_tokens, out }, receiver)
}

fn respond(status: StatusCode, content_type: &'static str, body: Either<Full<Bytes>, Events>) -> Answer {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(content_type));
    response
}

/// A body of one frame per event.
struct Events {
    receiver: UnboundedReceiver<Bytes>,
    _cancel: CancelOnDrop,
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.receiver.poll_recv(context).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

/// Tells the engine when nobody waits any more.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
