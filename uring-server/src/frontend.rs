//! The application on one ring thread: requests in, engine and pool, responses and records out.
//!
//! An `Exchange` is made when a body is complete and dropped when its record is written. Everything a ring
//! thread does in between is a short reaction: to a request, to a result of the pool, to a batch of the engine's
//! deltas, to a timer, to a client that left. Work that could last (a large body, a long template) goes to the pool.

mod answer;
mod exchange;
mod ids;
mod plain;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use std::time::Duration;

use uring_serve_core::gate::{self, BudgetPolicy, Grants};
use uring_serve_core::headers::HeaderSet;
use uring_serve_core::http1::RequestHead;
use uring_serve_core::metrics::{Record, Status};
use uring_serve_core::time::MonoNs;

use self::answer::{Answer, Identity, Pace};
use self::exchange::{About, Exchange, Phase, Progress, RequestId, Run};
use self::ids::{IdSource, SerialHasher};
use crate::api::error::ApiError;
use crate::api::request::Endpoint;
use crate::api::route::{self, Route};
use crate::app::{App, Prepared};
use crate::clock::Clock;
use crate::engine::{Delta, Ended, EngineClient, Job, StepBatch, Submission};
use crate::journal::{Entry, JournalHandle};
use crate::pool::{Finished, Mailbox, Panicked, Pool, PoolFull};
use crate::prometheus::{Observation, Outcome};
use crate::service::{ExchangeId, Gone, Refusal, Replies, Reply, Request, Service};

/// What the pool makes of a body.
#[derive(Debug)]
pub enum Pooled {
    /// Of a generation request.
    Generation(Box<Preparation>),
    /// Of a request that is answered by a page.
    Page(Page),
}

/// A generation request for the engine, or the error to answer.
type Preparation = Result<Prepared, ApiError>;

/// A content type and a body, or the error to answer.
type Page = Result<(&'static str, Vec<u8>), ApiError>;

/// Bodies up to this many bytes are read on the ring thread: parsing and tokenising them stays well below the 1 ms
/// that one turn may take; a hand-over to the pool and back costs two wake-ups.
const INLINE_BODY_BYTES_MAX: usize = 2048;

/// Request bytes that one turn takes in, so that it ends well within its 1 ms. Measured with the real model's tokenizer
/// and template on one core of an AMD EPYC: 8 µs a request and 28 µs a KiB of body.
const TURN_BYTES_MAX: usize = 20 * 1024;

/// What a request counts for beside its body: the time of so many bytes.
const REQUEST_BYTES: usize = 256;

/// One ring thread's application.
pub struct Frontend {
    app: Arc<App>,
    worker: u16,
    engine: EngineClient,
    pool: Arc<Pool<Pooled>>,
    mailbox: Arc<Mailbox<Pooled>>,
    journal: Option<JournalHandle<Entry>>,
    clock: Arc<dyn Clock>,
    /// Wall time in seconds, read again at this point.
    wall: (u64, MonoNs),
    /// What is left of [`TURN_BYTES_MAX`] in this turn.
    turn_bytes_left: usize,
    ids: IdSource,
    exchanges: HashMap<u64, Exchange, BuildHasherDefault<SerialHasher>>,
    batches: Vec<StepBatch>,
    pooled: Vec<Finished<Pooled>>,
    budgets: BudgetPolicy,
    clock_header: Arc<str>,
    headers: HeaderSet,
    body: Vec<u8>,
}

/// What a [`Frontend`] is made of.
pub struct Parts {
    /// Shared by all rings.
    pub app: Arc<App>,
    /// This ring's number.
    pub worker: u16,
    /// This ring's end of the engine's queues.
    pub engine: EngineClient,
    /// Shared by all rings.
    pub pool: Arc<Pool<Pooled>>,
    /// This ring's results of the pool.
    pub mailbox: Arc<Mailbox<Pooled>>,
    /// Where records go, if there is a file.
    pub journal: Option<JournalHandle<Entry>>,
    /// Tells `created`, once a second.
    pub clock: Arc<dyn Clock>,
    /// Seeds ids and the sampling seeds of requests that name none.
    pub seed: u64,
}

impl Frontend {
    /// Creates it with nothing under way.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self {
            headers: HeaderSet::new(&parts.app.config.clock_header),
            clock_header: Arc::from(parts.app.config.clock_header.as_str()),
            budgets: BudgetPolicy {
                headers: parts.app.config.metrics_header_budget,
                event: parts.app.config.metrics_event_budget,
                requested_max: parts.app.config.metrics_header_budget_max,
            },
            ids: IdSource::new(parts.seed),
            turn_bytes_left: TURN_BYTES_MAX,
            wall: (0, MonoNs::from_raw(0)),
            clock: parts.clock,
            app: parts.app,
            worker: parts.worker,
            engine: parts.engine,
            pool: parts.pool,
            mailbox: parts.mailbox,
            journal: parts.journal,
            exchanges: HashMap::default(),
            batches: Vec::new(),
            pooled: Vec::new(),
            body: Vec::new(),
        }
    }

    /// Begins a generation request: prepares it here or in the pool.
    fn begin(&mut self, now: MonoNs, endpoint: Endpoint, request: Request<'_>, reply: &mut dyn Reply) {
        let about = self.about(&request);
        let (id, wall) = (request.id, self.wall_seconds(now));
        reply.end_at_fin();
        if request.body.len() <= INLINE_BODY_BYTES_MAX {
            let prepared = self.app.prepare(endpoint, request.body, wall);
            return self.start(now, id, about, prepared, Some(reply));
        }
        let (app, mut body) = (Arc::clone(&self.app), request.body.to_vec());
        let prepare = move || Pooled::Generation(Box::new(app.prepare(endpoint, &mut body, wall)));
        let queued = self.pool.submit(&self.mailbox, id, prepare);
        match queued {
            Ok(()) => {
                reply.set_timer(about.deadline.map(|at| at.checked_since(now).unwrap_or_default()));
                self.exchanges.insert(id.serial, Exchange { about, phase: Phase::Preparing });
            }
            Err(PoolFull) => self.start(now, id, about, Err(ApiError::overloaded()), Some(reply)),
        }
    }

    /// Wall time for `created` and templates, at most a second old.
    fn wall_seconds(&mut self, now: MonoNs) -> u64 {
        if now >= self.wall.1 {
            self.wall = (self.clock.wall_seconds(), now.saturating_add(Duration::from_secs(1)));
        }
        self.wall.0
    }

    fn request_id(&mut self, head: &RequestHead<'_>) -> RequestId {
        match plain::kept_request_id(head) {
            Some(id) => RequestId::Kept(id),
            None => RequestId::Own(self.ids.next_request_id()),
        }
    }

    fn about(&mut self, request: &Request<'_>) -> About {
        let request_id = self.request_id(&request.head);
        let config = &self.app.config;
        let grants = gate::decide(config.policy, request.head.header_values(gate::RETURN_METRICS));
        About {
            head_at: request.head_at,
            deadline: config.request_timeout.map(|timeout| request.head_at.saturating_add(timeout)),
            request_id,
            grants,
            budgets: gate::choose_budgets(self.budgets, request.head.header_values(gate::METRICS_BUDGET)),
            clock_header: Arc::clone(&self.clock_header),
            clock: self.app.clock_offset(),
            cancelled: Arc::default(),
            verdict: None,
        }
    }

    /// Hands a prepared request to the engine, or answers why not. `reply` is `None` when the client left, or the request's
    /// deadline passed, while the pool was at work.
    fn start(
        &mut self,
        now: MonoNs,
        id: ExchangeId,
        about: About,
        prepared: Preparation,
        reply: Option<&mut dyn Reply>,
    ) {
        let prompts = prepared.as_ref().map_or(0, |prepared| prepared.prompts.len());
        let Some(reply) = reply else {
            let status = about.verdict.unwrap_or(Status::Aborted);
            self.observe(if status == Status::Timeout { Outcome::Timeout } else { Outcome::Aborted });
            return self.write_records(&about, about.early_records(prompts, status));
        };
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return self.refuse(id, about, prompts, &error, reply),
        };
        let submission = self.submission(id, &about, &prepared);
        if self.engine.submit(submission).is_err() {
            return self.refuse(id, about, prompts, &ApiError::overloaded(), reply);
        }
        let answer = self.answer(now, &prepared);
        answer.set_timer(now, &about, reply);
        let run = Run::new(&about, answer, prompts, prepared.request.n, now);
        self.exchanges.insert(id.serial, Exchange { about, phase: Phase::Running(Box::new(run)) });
    }

    fn answer(&mut self, now: MonoNs, prepared: &Prepared) -> Answer {
        let request = &prepared.request;
        let identity = Identity {
            id: self.ids.next_id(),
            created: self.wall_seconds(now),
            model: request.model.clone().unwrap_or_else(|| self.app.config.served_model_name.clone()),
        };
        let prompt_tokens = prepared.prompts.iter().map(|prompt| prompt.tokens.len() as u32).collect();
        let pace = Pace {
            head_until: now.saturating_add(self.app.config.stream_head_after),
            keepalive: self.app.config.sse_keepalive,
        };
        Answer::new(identity, request, prompt_tokens, pace)
    }

    fn submission(&mut self, id: ExchangeId, about: &About, prepared: &Prepared) -> Submission {
        let request = &prepared.request;
        let fallback_seed = self.ids.next_seed();
        let ends = self.app.model.get().map_or(&[][..], |model| model.tokenizer.ends());
        let jobs = (0_u32..)
            .zip(&prepared.prompts)
            .flat_map(|(at, prompt)| (0..request.n).map(move |index| (at * request.n + index, prompt)));
        let jobs = jobs.map(|(choice, prompt)| Job {
            exchange: id,
            choice,
            prompt: Arc::clone(&prompt.tokens),
            output_tokens_max: prompt.output_tokens_max,
            sampling: request.sampling_params(choice, fallback_seed, ends),
            stop: Arc::clone(&prepared.stop),
            trace: about.grants.collect().is_some(),
            cancelled: Arc::clone(&about.cancelled),
        });
        Submission { jobs: jobs.collect() }
    }

    /// Answers a request that did not reach the engine.
    fn refuse(
        &mut self,
        id: ExchangeId,
        about: About,
        prompts: usize,
        error: &ApiError,
        reply: &mut dyn Reply,
    ) {
        self.observe(Outcome::Rejected);
        plain::send_error(error, &about, reply, &mut self.body);
        let records = about.early_records(prompts, Status::Rejected);
        self.exchanges.insert(id.serial, Exchange { about, phase: Phase::Settled(records) });
    }

    /// Applies one delta: marks, text, end.
    fn apply(&mut self, now: MonoNs, mut delta: Delta, text: &str, replies: &mut dyn Replies) {
        let id = delta.exchange;
        let Some(Exchange { about, phase }) = self.exchanges.get_mut(&id.serial) else { return };
        let Phase::Running(run) = phase else { return };
        if let Some(observation) = run.observation(about, &delta) {
            self.app.metrics.shard(self.worker).observe(&observation);
        }
        let progress = run.note(now, &mut delta);
        if about.verdict.is_none()
            && let Some(reply) = replies.reply(id)
        {
            match progress {
                Progress::Open => run.answer.take(now, &delta, text, about, reply),
                Progress::Done => {
                    run.answer.take(now, &delta, text, about, reply);
                    let records = run.records(about, Status::Complete);
                    run.answer.finish(now, about, &records, &mut self.headers, reply);
                    *phase = Phase::Settled(records);
                    return;
                }
                Progress::Failed => {
                    let (error, status) = failure(delta.end.as_ref().map(|end| &end.ended));
                    about.verdict = Some(status);
                    about.cancel();
                    run.answer.fail(&error, about, reply, &mut self.body);
                }
            }
        }
        if run.is_over() {
            let status = about.verdict.unwrap_or(Status::Aborted);
            let records = run.records(about, status);
            if let Some(exchange) = self.exchanges.remove(&id.serial) {
                self.write_records(&exchange.about, records);
            }
        }
    }

    /// Answers with the page or object of a route that generates nothing, here or by way of the pool.
    fn answer_plain(&mut self, now: MonoNs, route: Route, request: Request<'_>, reply: &mut dyn Reply) {
        let (about, id) = (self.about(&request), request.id);
        let wall = self.wall_seconds(now);
        if request.body.len() <= INLINE_BODY_BYTES_MAX {
            let page = plain::page(&self.app, now, wall, &route, request.body);
            return self.send_page(&about, &page, Some(reply));
        }
        let (app, mut body) = (Arc::clone(&self.app), request.body.to_vec());
        let make = move || Pooled::Page(plain::page(&app, now, wall, &route, &mut body));
        match self.pool.submit(&self.mailbox, id, make) {
            Ok(()) => {
                self.exchanges.insert(id.serial, Exchange { about, phase: Phase::Preparing });
            }
            Err(PoolFull) => plain::send_error(&ApiError::overloaded(), &about, reply, &mut self.body),
        }
    }

    fn send_page(&mut self, about: &About, page: &Page, reply: Option<&mut dyn Reply>) {
        let Some(reply) = reply else { return };
        match page {
            Ok((content_type, body)) => plain::send(content_type, body, about, reply),
            Err(error) => plain::send_error(error, about, reply, &mut self.body),
        }
    }

    /// Runs one token through everything a request meets, without a record (product contract 9).
    fn begin_probe(&mut self, now: MonoNs, request: &Request<'_>, reply: &mut dyn Reply) {
        let about = About { grants: Grants::default(), ..self.about(request) };
        reply.end_at_fin();
        let wall = self.wall_seconds(now);
        let prepared = self.app.prepare(Endpoint::Completions, &mut plain::PROBE_BODY.to_vec(), wall);
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return plain::send_error(&error, &about, reply, &mut self.body),
        };
        let submission = self.submission(request.id, &about, &prepared);
        if self.engine.submit(submission).is_err() {
            return plain::send_error(&ApiError::overloaded(), &about, reply, &mut self.body);
        }
        let answer = Answer::probe();
        answer.set_timer(now, &about, reply);
        let run = Run::new(&about, answer, 1, 1, now);
        self.exchanges.insert(request.id.serial, Exchange { about, phase: Phase::Running(Box::new(run)) });
    }

    fn observe(&self, outcome: Outcome) {
        self.app.metrics.shard(self.worker).observe(&Observation { outcome, ..exchange::NOTHING_OBSERVED });
    }

    fn write_records(&self, about: &About, records: Vec<Record>) {
        let (Some(journal), Some(grant)) = (&self.journal, about.grants.file) else { return };
        for record in records {
            if record.status == Status::Complete || self.app.config.perf_metrics_failed_requests {
                journal.submit(Entry { grant, record });
            }
        }
    }
}

impl Service for Frontend {
    fn handle_head(&mut self, _now: MonoNs, head: &RequestHead<'_>) -> Option<Refusal> {
        let mut refusal = plain::judge_login(self.app.config.api_key.as_ref(), head)?;
        let id = String::from_utf8_lossy(self.request_id(head).as_bytes()).into_owned();
        refusal.headers.push(("x-request-id", id));
        Some(refusal)
    }

    fn handle_request(&mut self, now: MonoNs, request: Request<'_>, reply: &mut dyn Reply) {
        let bytes = REQUEST_BYTES + request.body.len().min(INLINE_BODY_BYTES_MAX);
        self.turn_bytes_left = self.turn_bytes_left.saturating_sub(bytes);
        match route::find(request.head.method, request.head.path) {
            Ok(Route::ChatCompletions) => self.begin(now, Endpoint::Chat, request, reply),
            Ok(Route::Completions) => self.begin(now, Endpoint::Completions, request, reply),
            Ok(Route::HealthGenerate) => self.begin_probe(now, &request, reply),
            Ok(route) => self.answer_plain(now, route, request, reply),
            Err(unrouted) => {
                let about = self.about(&request);
                plain::send_unrouted(&unrouted, &about, reply, &mut self.body);
            }
        }
    }

    fn drain_queues(&mut self) {
        self.turn_bytes_left = TURN_BYTES_MAX;
        self.batches.extend(std::iter::from_fn(|| self.engine.take_batch()));
        self.pooled.extend(std::iter::from_fn(|| self.mailbox.take()));
    }

    fn is_spent(&self) -> bool {
        self.turn_bytes_left == 0
    }

    fn handle_queues(&mut self, now: MonoNs, replies: &mut dyn Replies) {
        let mut pooled = std::mem::take(&mut self.pooled);
        for finished in pooled.drain(..) {
            let Some(Exchange { about, .. }) = self.exchanges.remove(&finished.exchange.serial) else {
                continue;
            };
            let reply = replies.reply(finished.exchange);
            let failed = || ApiError::server("The server failed while reading this request.");
            match finished.result {
                Ok(Pooled::Page(page)) => self.send_page(&about, &page, reply),
                Ok(Pooled::Generation(made)) => self.start(now, finished.exchange, about, *made, reply),
                Err(Panicked) => self.start(now, finished.exchange, about, Err(failed()), reply),
            }
        }
        self.pooled = pooled;
        let mut batches = std::mem::take(&mut self.batches);
        for mut batch in batches.drain(..) {
            let text = std::mem::take(&mut batch.text);
            for delta in batch.deltas.drain(..) {
                let range = delta.text.clone();
                self.apply(now, delta, &text[range], replies);
            }
            batch.text = text;
            self.engine.return_batch(batch);
        }
        self.batches = batches;
    }

    fn handle_timer(&mut self, now: MonoNs, id: ExchangeId, reply: &mut dyn Reply) {
        let Some(Exchange { about, phase }) = self.exchanges.get_mut(&id.serial) else { return };
        if about.verdict.is_some() {
            return;
        }
        let is_late = about.deadline.is_some_and(|deadline| deadline <= now);
        if is_late {
            about.cancel();
        }
        match phase {
            // The pool's result or the engine's last delta writes the record.
            Phase::Preparing if is_late => {
                about.verdict = Some(Status::Timeout);
                plain::send_error(&ApiError::timeout(), about, reply, &mut self.body);
            }
            Phase::Running(run) if is_late => {
                about.verdict = Some(Status::Timeout);
                run.answer.fail(&ApiError::timeout(), about, reply, &mut self.body);
            }
            Phase::Running(run) => run.answer.handle_timer(now, about, reply),
            Phase::Preparing | Phase::Settled(_) => {}
        }
    }

    fn handle_submitted(&mut self, _now: MonoNs, id: ExchangeId) {
        // One that failed while others of its sequences run waits for their ends.
        let settled = |exchange: &Exchange| matches!(exchange.phase, Phase::Settled(_));
        if self.exchanges.get(&id.serial).is_some_and(settled)
            && let Some(Exchange { about, phase: Phase::Settled(records) }) =
                self.exchanges.remove(&id.serial)
        {
            self.write_records(&about, records);
        }
    }

    fn is_settled(&self) -> bool {
        self.exchanges.is_empty()
    }

    fn handle_gone(&mut self, _now: MonoNs, id: ExchangeId, _why: Gone) {
        let Some(Exchange { about, phase }) = self.exchanges.get_mut(&id.serial) else { return };
        about.cancel();
        match phase {
            // The pool's result or the engine's last delta ends it.
            Phase::Preparing | Phase::Running(_) => {
                about.verdict.get_or_insert(Status::Aborted);
            }
            Phase::Settled(records) => {
                let mut records = std::mem::take(records);
                for record in &mut records {
                    record.status = Status::Aborted;
                }
                if let Some(exchange) = self.exchanges.remove(&id.serial) {
                    self.write_records(&exchange.about, records);
                }
            }
        }
    }
}

/// Records of requests that the engine had no more time to report on say what this ring knows of them.
impl Drop for Frontend {
    fn drop(&mut self) {
        let mut left: Vec<(u64, Exchange)> = std::mem::take(&mut self.exchanges).into_iter().collect();
        left.sort_unstable_by_key(|(serial, _)| *serial);
        for (_, Exchange { about, phase }) in left {
            about.cancel();
            let status = about.verdict.unwrap_or(Status::Aborted);
            let mut records = match phase {
                Phase::Preparing => about.early_records(1, status),
                Phase::Running(mut run) => run.records(&about, status),
                Phase::Settled(records) => records,
            };
            records.iter_mut().for_each(|record| record.status = status);
            self.write_records(&about, records);
        }
    }
}

/// What the client is told, and what the record says, when the engine could not serve a sequence.
fn failure(ended: Option<&Ended>) -> (ApiError, Status) {
    match ended {
        Some(Ended::QueueFull) => (ApiError::overloaded(), Status::Rejected),
        Some(Ended::NeverFits) => (ApiError::never_fits(), Status::Rejected),
        Some(Ended::Failed | Ended::Cancelled | Ended::Length | Ended::Stop) | None => {
            (ApiError::server("The engine failed while serving this request."), Status::Error)
        }
    }
}
