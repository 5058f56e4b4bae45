//! The response of one generation request, as it grows.

use std::time::Duration;

use uring_serve_core::headers::{ClockStamp, HeaderSet, WriteOptions};
use uring_serve_core::http1::Framing;
use uring_serve_core::metrics::Record;
use uring_serve_core::sse::{self, MetricsEvent};
use uring_serve_core::time::MonoNs;

use super::exchange::About;
use super::plain;
use crate::api::error::ApiError;
use crate::api::request::{Endpoint, Generation, Stream};
use crate::api::response::{
    Choice, ChunkTemplate, FinishReason, ResponseHead, Usage, UsageChunk, write_response,
};
use crate::engine::{Delta, Ended};
use crate::service::Reply;

/// What the client has got and will get.
pub(super) struct Answer {
    id: u128,
    endpoint: Endpoint,
    created: u64,
    model: String,
    /// By prompt.
    prompt_tokens: Vec<u32>,
    choices: Vec<ChoiceState>,
    form: Form,
}

/// How it leaves.
enum Form {
    /// `/health_generate`: only whether it ended matters.
    Probe,
    /// One JSON object at the end.
    Whole,
    /// Events as they come.
    Events(Events),
}

struct Events {
    template: ChunkTemplate,
    usage: UsageChunk,
    /// Whether the head has left.
    begun: bool,
    /// When the head leaves without a token, or the stream says that it is still there.
    tick: Option<MonoNs>,
    keepalive: Option<Duration>,
    chunk: Vec<u8>,
}

#[derive(Default)]
struct ChoiceState {
    /// Text of an answer that leaves whole.
    text: String,
    tokens: u32,
    reason: Option<FinishReason>,
    /// Whether a stream has said who speaks.
    opened: bool,
}

/// What a stream sends when it has no token.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// When the head leaves at the latest.
    pub(super) head_until: MonoNs,
    /// Interval of comments in a silent stream.
    pub(super) keepalive: Option<Duration>,
}

/// What identifies a response.
pub(super) struct Identity {
    pub(super) id: u128,
    pub(super) created: u64,
    pub(super) model: String,
}

impl Answer {
    /// Begins the answer to `request`, whose prompts have that many tokens each.
    pub(super) fn new(identity: Identity, request: &Generation, prompt_tokens: Vec<u32>, pace: Pace) -> Self {
        let Identity { id, created, model } = identity;
        let head = ResponseHead { endpoint: request.endpoint, id, created, model: &model };
        let form = match request.stream {
            Stream::Off => Form::Whole,
            Stream::WithUsage => Form::Events(Events::new(&head, UsageChunk::Asked, pace)),
            Stream::WithoutUsage => Form::Events(Events::new(&head, UsageChunk::NotAsked, pace)),
        };
        let choices = (0..request.choice_count()).map(|_| ChoiceState::default()).collect();
        Self { id, endpoint: request.endpoint, created, model, prompt_tokens, choices, form }
    }

    /// The answer to `/health_generate`.
    pub(super) fn probe() -> Self {
        Self {
            id: 0,
            endpoint: Endpoint::Completions,
            created: 0,
            model: String::new(),
            prompt_tokens: vec![1],
            choices: vec![ChoiceState::default()],
            form: Form::Probe,
        }
    }

    /// Returns whether it is the answer to `/health_generate`, which is no generation request.
    pub(super) fn is_probe(&self) -> bool {
        matches!(self.form, Form::Probe)
    }

    /// Arms the exchange's one timer for what comes first: the request's deadline or the stream's next tick.
    pub(super) fn set_timer(&self, now: MonoNs, about: &About, reply: &mut dyn Reply) {
        let tick = match &self.form {
            Form::Events(events) => events.tick,
            Form::Probe | Form::Whole => None,
        };
        let next = about.deadline.into_iter().chain(tick).min();
        reply.set_timer(next.map(|at| at.checked_since(now).unwrap_or_default()));
    }

    /// Tokens of one prompt.
    pub(super) fn prompt_tokens(&self, prompt: usize) -> u32 {
        self.prompt_tokens.get(prompt).copied().unwrap_or(0)
    }

    /// Takes a sequence's news: its token count, its text, how it ended. The text of a stream leaves at once, together
    /// with the head if that has not left.
    pub(super) fn take(
        &mut self,
        now: MonoNs,
        delta: &Delta,
        text: &str,
        about: &About,
        reply: &mut dyn Reply,
    ) {
        let Some(choice) = self.choices.get_mut(delta.choice as usize) else { return };
        choice.tokens = delta.tokens;
        let reason = delta.end.as_ref().and_then(|end| match end.ended {
            Ended::Length => Some(FinishReason::Length),
            Ended::Stop => Some(FinishReason::Stop),
            Ended::Cancelled | Ended::Failed | Ended::NeverFits | Ended::QueueFull => None,
        });
        choice.reason = reason;
        let Form::Events(events) = &mut self.form else {
            choice.text.push_str(text);
            return;
        };
        let begins = !events.begun;
        events.begin(now, about, reply);
        // A timer armed for an earlier tick finds this one and goes on to it.
        events.rest(now);
        events.chunk.clear();
        if !choice.opened {
            choice.opened = true;
            events.template.write_role(&mut events.chunk, delta.choice);
        }
        if !text.is_empty() {
            events.template.write_text(&mut events.chunk, delta.choice, text);
        }
        if let Some(reason) = reason {
            events.template.write_finish(&mut events.chunk, delta.choice, reason);
        }
        reply.body(&events.chunk);
        if begins {
            self.set_timer(now, about, reply);
        }
    }

    /// Ends the response. `records` are those of all its prompts, complete.
    pub(super) fn finish(
        &mut self,
        now: MonoNs,
        about: &About,
        records: &[Record],
        headers: &mut HeaderSet,
        reply: &mut dyn Reply,
    ) {
        let usage = self.usage();
        match &mut self.form {
            Form::Probe => plain::send_text(200, "Generation health check OK", about, reply),
            Form::Events(events) => {
                events.chunk.clear();
                if events.usage == UsageChunk::Asked {
                    events.template.write_usage(&mut events.chunk, &usage);
                }
                sse::write_done(&mut events.chunk);
                if let Some(grant) = about.grants.response {
                    headers.write_records(grant, records, &about.event_options());
                    let head = ResponseHead {
                        endpoint: self.endpoint,
                        id: self.id,
                        created: self.created,
                        model: &self.model,
                    };
                    let mut id = Vec::with_capacity(48);
                    head.write_id(&mut id);
                    let event = MetricsEvent {
                        headers,
                        id: str::from_utf8(&id).unwrap_or_default(),
                        object: head.chunk_object(),
                        created: self.created,
                        model: &self.model,
                    };
                    event.write(&mut events.chunk);
                }
                reply.body(&events.chunk);
                reply.finish();
            }
            Form::Whole => self.send_whole(now, about, records, &usage, headers, reply),
        }
    }

    /// Tells of a failure: as an error answer if nothing has left, else as the stream's last event.
    pub(super) fn fail(
        &mut self,
        error: &ApiError,
        about: &About,
        reply: &mut dyn Reply,
        body: &mut Vec<u8>,
    ) {
        match &mut self.form {
            Form::Events(events) if events.begun => {
                events.chunk.clear();
                error.write_event(&mut events.chunk);
                reply.body(&events.chunk);
                reply.finish();
            }
            Form::Probe => plain::send_text(500, "Generation health check failed", about, reply),
            Form::Events(_) | Form::Whole => plain::send_error(error, about, reply, body),
        }
    }

    /// The exchange's timer has come: the head of a stream leaves without a token, or a silent stream says that it is
    /// still there.
    pub(super) fn handle_timer(&mut self, now: MonoNs, about: &About, reply: &mut dyn Reply) {
        if let Form::Events(events) = &mut self.form
            && events.tick.is_some_and(|tick| tick <= now)
        {
            if !events.begun {
                events.begin(now, about, reply);
            } else {
                reply.body(b": keep-alive\n\n");
            }
            events.rest(now);
        }
        self.set_timer(now, about, reply);
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens.iter().map(|tokens| u64::from(*tokens)).sum(),
            cached_tokens: None,
            completion_tokens: self.choices.iter().map(|choice| u64::from(choice.tokens)).sum(),
        }
    }

    fn send_whole(
        &self,
        now: MonoNs,
        about: &About,
        records: &[Record],
        usage: &Usage,
        headers: &mut HeaderSet,
        reply: &mut dyn Reply,
    ) {
        let choices: Vec<Choice<'_>> = (0..)
            .zip(&self.choices)
            .map(|(index, choice)| Choice {
                index,
                text: &choice.text,
                reason: choice.reason.unwrap_or(FinishReason::Length),
            })
            .collect();
        let head =
            ResponseHead { endpoint: self.endpoint, id: self.id, created: self.created, model: &self.model };
        let mut body = Vec::with_capacity(512);
        write_response(&mut body, &head, &choices, usage);
        let mut fields = plain::fields(about, "application/json");
        if let Some(grant) = about.grants.response {
            headers.write_records(grant, records, &about.header_options(now));
            fields.extend(headers.iter());
        }
        reply.send(200, &fields, &body);
    }
}

impl Events {
    fn new(head: &ResponseHead<'_>, usage: UsageChunk, pace: Pace) -> Self {
        Self {
            template: ChunkTemplate::new(head, usage),
            usage,
            begun: false,
            tick: Some(pace.head_until),
            keepalive: pace.keepalive,
            chunk: Vec::with_capacity(1024),
        }
    }

    /// Something leaves now: the next comment is due an interval later.
    fn rest(&mut self, now: MonoNs) {
        self.tick = self.keepalive.map(|interval| now.saturating_add(interval));
    }

    /// Sends the head, once. A granted stream's clock header goes with it: its event comes too late for a handshake
    /// (UF 1.9).
    fn begin(&mut self, now: MonoNs, about: &About, reply: &mut dyn Reply) {
        if self.begun {
            return;
        }
        self.begun = true;
        let mut stamp = Vec::new();
        let mut fields = plain::fields(about, "text/event-stream; charset=utf-8");
        fields.push(("Cache-Control", b"no-cache"));
        if about.grants.response.is_some() {
            about.stamp(now).write_value(&mut stamp);
            fields.push((&about.clock_header, &stamp));
        }
        reply.begin(200, &fields, Framing::Chunked);
    }
}

impl About {
    fn stamp(&self, now: MonoNs) -> ClockStamp {
        ClockStamp { receive: self.clock.to_reference(self.head_at), transmit: self.clock.to_reference(now) }
    }

    fn header_options(&self, now: MonoNs) -> WriteOptions {
        WriteOptions {
            budget: self.budgets.headers,
            tokens: self.budgets.tokens,
            clock: Some(self.stamp(now)),
        }
    }

    fn event_options(&self) -> WriteOptions {
        WriteOptions { budget: self.budgets.event, tokens: self.budgets.tokens, clock: None }
    }
}
