//! A worker's headers → record (UF 1.8).

use alloc::vec::Vec;

use super::server_timing::{Metric, read_metrics};
use super::{CTX_CHUNK, CTX_CHUNK_METRICS, SERVER_TIMING, START_END_TIME, STEP, STEP_METRICS};
use crate::metrics::text::{read_milliseconds, read_number, read_seconds};
use crate::metrics::{COUNTS, Phase, Record, SPANS, STEP_ITEMS, StepSpans, Steps, TIMES};
use crate::time::ClockOffset;

/// Reads what a worker tells of a request and makes it the record of `phase`: the four headers, or the members of the
/// event that have their names. `None` if none of the four is there.
///
/// `clock` moves the worker's times to ours. Tokens that begin with `server` or with the phase's own name are read, one
/// by one; all others, and values that are no plain decimal numbers, are passed over. Of a repeated token the last
/// counts. A time that has no token of its own is the start plus its duration: a peer that knows only upstream's tokens
/// gives four of the eight.
pub fn read_phase<'a>(
    fields: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    phase: Phase,
    clock: ClockOffset,
) -> Option<Record> {
    let mut reader =
        Reader { phase, clock, record: Record { phase, ..Record::default() }, ..Reader::default() };
    let mut found = false;
    for (name, value) in fields {
        let handle = HANDLERS.iter().find(|(header, _)| header.eq_ignore_ascii_case(name));
        let Some((_, handle)) = handle else { continue };
        found = true;
        for metric in read_metrics(value) {
            // Not every token is ours: `None` passes over it.
            let _ = handle(&mut reader, metric);
        }
    }
    found.then(|| reader.finish())
}

type Handler = fn(&mut Reader, Metric<'_>) -> Option<()>;

const HANDLERS: [(&str, Handler); 4] = [
    (SERVER_TIMING, Reader::handle_span),
    (START_END_TIME, Reader::handle_point),
    (STEP_METRICS, Reader::handle_step),
    (CTX_CHUNK_METRICS, Reader::handle_chunk),
];

#[derive(Default)]
struct Reader {
    phase: Phase,
    clock: ClockOffset,
    record: Record,
    spans: [Option<u64>; SPANS.len()],
    steps: Vec<StepSpans>,
    chunks: Vec<StepSpans>,
}

impl Reader {
    fn handle_span(&mut self, metric: Metric<'_>) -> Option<()> {
        let name = self.strip_phase(metric.name, b'_')?;
        let index = SPANS.iter().position(|span| span.name.as_bytes() == name)?;
        self.spans[index] = Some(read_milliseconds(&metric.param("dur")?)?);
        Some(())
    }

    fn handle_point(&mut self, metric: Metric<'_>) -> Option<()> {
        let token = self.strip_phase(metric.name, b'-')?;
        let is_token = |text: &str| text.as_bytes() == token;
        if let Some(field) =
            TIMES.iter().find(|field| field.token.is_some_and(|token| is_token(token.text())))
        {
            let at = read_seconds(&metric.param("ts")?)?;
            self.record.times[field.mark] = Some(self.clock.shift(at));
        } else {
            let count = COUNTS.iter().find(|count| is_token(count.token))?;
            (count.set)(&mut self.record, read_number(&metric.param("n")?)?);
        }
        Some(())
    }

    fn handle_step(&mut self, metric: Metric<'_>) -> Option<()> {
        let token = self.strip_phase(metric.name, b'-')?;
        read_step(token, STEP, &metric, &mut self.steps)
    }

    fn handle_chunk(&mut self, metric: Metric<'_>) -> Option<()> {
        let token = self.strip_phase(metric.name, b'-')?;
        read_step(token, CTX_CHUNK, &metric, &mut self.chunks)
    }

    /// Returns the token behind the phase and its separator.
    fn strip_phase<'t>(&self, token: &'t [u8], separator: u8) -> Option<&'t [u8]> {
        let behind = |phase: Phase| token.strip_prefix(phase.name().as_bytes())?.strip_prefix(&[separator]);
        behind(Phase::Server).or_else(|| behind(self.phase))
    }

    fn finish(mut self) -> Record {
        let times = &mut self.record.times;
        for (span, ns) in SPANS.iter().zip(self.spans) {
            if let (None, Some(from), Some(ns)) = (times[span.to], times[span.from], ns) {
                times[span.to] = from.checked_add(ns);
            }
        }
        self.record.steps = Steps::Spans { steps: self.steps, chunks: self.chunks };
        self.record
    }
}

/// Reads `<kind><number>-<item>` into the list's last entry, or into a new one where the number changes.
fn read_step(token: &[u8], kind: &str, metric: &Metric<'_>, list: &mut Vec<StepSpans>) -> Option<()> {
    let rest = token.strip_prefix(kind.as_bytes())?;
    let dash = rest.iter().position(|&byte| byte == b'-')?;
    let number = read_number(&rest[..dash])?;
    let item = STEP_ITEMS.iter().position(|item| item.as_bytes() == &rest[dash + 1..])?;
    let ns = read_milliseconds(&metric.param("dur")?)?;
    match list.last_mut() {
        Some(last) if last.number == number => last.ns[item] = Some(ns),
        _ => {
            let mut entry = StepSpans { number, ..StepSpans::default() };
            entry.ns[item] = Some(ns);
            list.push(entry);
        }
    }
    Some(())
}
