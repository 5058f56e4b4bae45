//! The connections of one ring thread, and the service's way to answer on them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use uring_serve_core::http1::{Framing, Next, ResponseHead};
use uring_serve_core::time::MonoNs;

use super::date::Date;
use crate::conn::{BACKLOG_BYTES_MAX, Conn};
use crate::counters::Counters;
use crate::service::{ExchangeId, Gone, Replies, Reply};
use crate::slots::Slots;
use crate::token::Key;

/// Everything about connections that needs no ring.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) worker: u16,
    pub(crate) conns: Slots<Conn>,
    /// Slots to settle before the turn ends; each once, by `Conn::dirty`.
    pub(crate) dirty: Vec<u32>,
    /// Slots whose input may hold another request.
    pub(crate) resumable: VecDeque<Key>,
    /// Exchanges that ended without their response, to be told to the service.
    pub(crate) gone: Vec<(ExchangeId, Gone)>,
    /// Serial of the last request.
    pub(crate) serial: u64,
    pub(crate) date: Date,
    /// Output buffers between two sends; connections that are silent own none.
    spares: Spares,
    pub(crate) counters: Arc<Counters>,
}

impl Table {
    pub(crate) fn new(worker: u16, connections_max: u32, date: Date, counters: Arc<Counters>) -> Self {
        Self {
            worker,
            conns: Slots::with_capacity(connections_max),
            dirty: Vec::new(),
            resumable: VecDeque::new(),
            gone: Vec::new(),
            serial: 0,
            date,
            spares: Spares::default(),
            counters,
        }
    }

    /// Puts a slot on the list of those to settle.
    pub(crate) fn mark_dirty(&mut self, index: u32) {
        if let Some((_, conn)) = self.conns.tenant(index)
            && !std::mem::replace(&mut conn.dirty, true)
        {
            self.dirty.push(index);
        }
    }

    /// Ends a connection at once; the service hears of its exchanges at the turn's end.
    pub(crate) fn lose(&mut self, key: Key, why: Gone) {
        let Self { conns, gone, worker, counters, .. } = self;
        let Some(conn) = conns.find(key) else { return };
        let before = gone.len();
        conn.abort(why, |serial| {
            gone.push((ExchangeId { worker: *worker, slot: key.index, serial }, why));
        });
        match why {
            Gone::Client if gone.len() > before => counters.clients_gone.add(1),
            Gone::SlowReader => counters.slow_readers.add(1),
            Gone::Client | Gone::Shutdown => {}
        }
        self.mark_dirty(key.index);
    }

    /// Makes the connection's output ready to be appended to.
    pub(crate) fn lend_output(&mut self, key: Key) -> Option<&mut Conn> {
        let conn = self.conns.find(key)?;
        self.spares.lend(&mut conn.out);
        Some(conn)
    }

    /// The same for an exchange that is still open; its connection goes on the list of those to settle.
    fn lend_open(&mut self, key: Key, serial: u64) -> Option<&mut Conn> {
        let conn = self.conns.find(key)?;
        conn.exchange.as_ref().filter(|exchange| exchange.serial == serial)?;
        self.spares.lend(&mut conn.out);
        if !std::mem::replace(&mut conn.dirty, true) {
            self.dirty.push(key.index);
        }
        Some(conn)
    }

    /// Keeps a buffer for another send.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        self.spares.keep(buffer);
    }
}

/// Output buffers between two sends, bounded by the memory that they hold.
#[derive(Debug, Default)]
struct Spares {
    buffers: Vec<Vec<u8>>,
    /// Their capacities, in all.
    bytes: usize,
}

impl Spares {
    /// Gives `out` a buffer if it has none.
    fn lend(&mut self, out: &mut Vec<u8>) {
        if out.capacity() == 0
            && let Some(buffer) = self.buffers.pop()
        {
            self.bytes -= buffer.capacity();
            *out = buffer;
        }
    }

    /// Keeps a buffer, unless it is large or there are enough.
    fn keep(&mut self, mut buffer: Vec<u8>) {
        let capacity = buffer.capacity();
        if capacity <= SPARE_BYTES_MAX && self.bytes + capacity <= SPARES_BYTES_MAX {
            buffer.clear();
            self.bytes += capacity;
            self.buffers.push(buffer);
        }
    }
}

/// Points at one exchange of the table: the service's [`Reply`] and [`Replies`].
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    pub(crate) table: &'a mut Table,
    pub(crate) now: MonoNs,
    pub(crate) key: Key,
    pub(crate) serial: u64,
}

impl<'a> Cursor<'a> {
    /// Points at nothing, until [`Replies::reply`] is asked.
    pub(crate) const fn nowhere(table: &'a mut Table, now: MonoNs) -> Self {
        Self { table, now, key: Key::fixed(u32::MAX), serial: 0 }
    }

    /// Returns the connection if the exchange is still open on it.
    fn open(&mut self) -> Option<&mut Conn> {
        let serial = self.serial;
        self.table
            .conns
            .find(self.key)
            .filter(|conn| conn.exchange.as_ref().is_some_and(|exchange| exchange.serial == serial))
    }

    /// Runs one command of the service. A command in the wrong state breaks the response, so the connection ends.
    fn command<T, E: std::fmt::Debug>(
        &mut self,
        name: &'static str,
        run: impl FnOnce(&mut Conn, &Date, MonoNs) -> Result<T, E>,
    ) -> Option<T> {
        let (now, date) = (self.now, self.table.date);
        // After a misuse or a lost client the rest of the service's calls is expected, and does nothing.
        let conn = self.table.lend_open(self.key, self.serial)?;
        match run(conn, &date, now) {
            Ok(value) => Some(value),
            Err(error) => {
                tracing::error!(?error, command = name, "the response breaks its own framing");
                self.table.counters.misuse.add(1);
                self.table.lose(self.key, Gone::Client);
                None
            }
        }
    }
}

impl Reply for Cursor<'_> {
    fn id(&self) -> ExchangeId {
        ExchangeId { worker: self.table.worker, slot: self.key.index, serial: self.serial }
    }

    fn send(&mut self, status: u16, headers: &[(&str, &[u8])], body: &[u8]) {
        self.begin(status, headers, Framing::Length(body.len() as u64));
        self.body(body);
        self.finish();
    }

    fn begin(&mut self, status: u16, headers: &[(&str, &[u8])], framing: Framing) {
        self.command("begin", |conn, date, now| {
            conn.http.send_head(&ResponseHead { status, headers, date }, framing, &mut conn.out)?;
            if let Some(exchange) = &mut conn.exchange {
                exchange.begun = true;
                exchange.event_stream = is_event_stream(headers);
                exchange.wrote_at = now;
            }
            Ok::<_, uring_serve_core::http1::Error>(())
        });
    }

    fn body(&mut self, data: &[u8]) {
        let behind = |conn: &mut Conn| conn.sent.is_some() && conn.out.len() > BACKLOG_BYTES_MAX;
        if !data.is_empty() && self.open().is_some_and(behind) {
            self.table.lose(self.key, Gone::SlowReader);
            return;
        }
        self.command("body", |conn, _, now| {
            if let Some(exchange) = &mut conn.exchange {
                exchange.wrote_at = now;
            }
            conn.http.send_body(data, &mut conn.out)
        });
    }

    fn finish(&mut self) {
        let serial = self.serial;
        let finished = self.command("finish", |conn, _, now| {
            let next = conn.http.finish(now, &mut conn.out)?;
            conn.exchange = None;
            conn.finished.push(serial);
            conn.used = true;
            match next {
                // The request's bytes were dropped when it was handed over.
                Next::KeepAlive { .. } => {}
                Next::Close => conn.close(),
            }
            Ok::<_, uring_serve_core::http1::Error>(())
        });
        if finished.is_some() {
            self.table.resumable.push_back(self.key);
        }
    }

    fn end_at_fin(&mut self) {
        let ended = self.open().is_some_and(|conn| {
            let http10 = conn.exchange.as_mut().is_some_and(|exchange| {
                exchange.end_at_fin = true;
                !exchange.http11
            });
            http10 && conn.fin != crate::conn::Fin::None
        });
        if ended {
            self.table.lose(self.key, Gone::Client);
        }
    }

    fn set_timer(&mut self, after: Option<Duration>) {
        let at = after.map(|after| self.now.saturating_add(after));
        if let Some(exchange) = self.open().and_then(|conn| conn.exchange.as_mut()) {
            exchange.timer = at;
            self.table.mark_dirty(self.key.index);
        }
    }
}

impl Replies for Cursor<'_> {
    fn reply(&mut self, id: ExchangeId) -> Option<&mut dyn Reply> {
        if id.worker != self.table.worker {
            return None;
        }
        let (key, conn) = self.table.conns.tenant(id.slot)?;
        conn.exchange.as_ref().filter(|exchange| exchange.serial == id.serial)?;
        self.key = key;
        self.serial = id.serial;
        Some(self)
    }
}

fn is_event_stream(headers: &[(&str, &[u8])]) -> bool {
    let is_type = |name: &str| name.eq_ignore_ascii_case("content-type");
    let kind = headers.iter().find(|(name, _)| is_type(name)).map_or(&b""[..], |(_, value)| value);
    kind.get(..EVENT_STREAM.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(EVENT_STREAM))
}

const EVENT_STREAM: &[u8] = b"text/event-stream";
/// Enough for 4,096 connections that answer in one turn, a few KiB each.
const SPARES_BYTES_MAX: usize = 16 << 20;
const SPARE_BYTES_MAX: usize = 64 << 10;
