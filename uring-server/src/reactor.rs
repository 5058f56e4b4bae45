//! The loop of one ring thread: wait, take completions, drain queues, read the clock, act, submit once.

mod accept;
mod date;
mod front;
mod table;

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use uring_serve_core::http1;
use uring_serve_core::time::MonoNs;

use self::accept::{Acceptor, Room};
use self::front::Front;
use self::table::{Cursor, Table};
use crate::bufs::Shape;
use crate::clock::Clock;
use crate::conn::{Conn, Fin, Phase, Reading};
use crate::counters::Counters;
use crate::ring::{Completion, Outgoing, Ring, RingError, RingShape, Wait};
use crate::service::{ExchangeId, Gone, Service};
use crate::token::{Key, Op, Token};
use crate::waker::{Asked, Handle};
use crate::wheel::Wheel;

/// Sizes and limits of one ring thread.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of the thread, from 0: part of every [`ExchangeId`].
    pub worker: u16,
    /// Connections at once; at this number accepting rests. The table is sized by it. See
    /// [`connections_max`](crate::nofile::connections_max).
    pub connections_max: u32,
    /// Limits of the protocol.
    pub http: http1::Limits,
    /// Receive buffers; a power of two, at most 32,768.
    pub buffer_count: u16,
    /// Bytes of a receive buffer.
    pub buffer_bytes: u32,
    /// Submission queue entries. A fuller turn submits more than once.
    pub sq_entries: u32,
    /// Completion queue entries, at least `sq_entries`. More at once wait in the kernel.
    pub cq_entries: u32,
    /// What tests break.
    pub faults: Faults,
}

impl Default for Options {
    /// 8 MiB of receive buffers, of which only the used part is ever resident, and 320 KiB of queues. At 4,096 busy
    /// connections 256 to 1,024 buffers and 256 to 16,384 queue entries were measured to make no difference.
    fn default() -> Self {
        Self {
            worker: 0,
            connections_max: 16_384,
            http: http1::Limits::default(),
            buffer_count: 1024,
            buffer_bytes: 8192,
            sq_entries: 1024,
            cq_entries: 16_384,
            faults: Faults::default(),
        }
    }
}

/// Faults for tests to inject. The default injects none.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Most bytes of one send.
    pub send_bytes_max: Option<u32>,
    /// Sends with MSG_DONTWAIT, so that a full socket is EAGAIN.
    pub send_dont_wait: bool,
    /// Is asked for each completion, with the count of such completions before it, and may replace the result by an
    /// error number.
    pub replace_result: Option<fn(FaultPoint, u64) -> Option<i32>>,
    /// Delivers each receive a second time under another generation.
    pub repeat_stale: bool,
}

/// Where a fault can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPoint {
    /// A completed accept.
    Accept,
    /// A completed receive.
    Recv,
    /// A completed send.
    Send,
}

/// One ring thread: its sockets, its connections and its service. Made and run on the same thread.
pub struct Reactor<S, C> {
    ring: Ring,
    front: Front<S>,
    acceptor: Acceptor,
    wheel: Wheel,
    clock: C,
    handle: Handle,
    counters: Arc<Counters>,
    options: Options,
    /// Completions of this turn and those that the last one left, and whether the queue holds more.
    batch: VecDeque<Completion>,
    more: bool,
    /// Connections whose receive found no buffer, in that order.
    starved: VecDeque<Key>,
    fired: Vec<u32>,
    /// The clock, as this turn read it.
    now: MonoNs,
    date_until: MonoNs,
    lifetime: Lifetime,
    /// Completions seen, by [`FaultPoint`]; counted only while faults are injected.
    seen: [u64; 3],
    /// The kernel takes submissions from the thread that made the ring only.
    not_send: PhantomData<*const ()>,
}

/// How long the reactor goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifetime {
    /// Until a drain begins.
    Open,
    /// Until no connection is left, or then.
    Draining(MonoNs),
    /// Until the last completions are in, or then.
    Ending(MonoNs),
}

impl<S: Service, C: Clock> Reactor<S, C> {
    /// Makes the ring on the calling thread. `handle` is the one that other threads wake and stop it by.
    ///
    /// # Errors
    /// [`RingError`] says why there can be no ring.
    pub fn new(
        options: Options,
        listeners: Vec<TcpListener>,
        handle: Handle,
        clock: C,
        service: S,
    ) -> Result<Self, RingError> {
        let counters = handle.counters();
        let shape = RingShape {
            sq_entries: options.sq_entries,
            cq_entries: options.cq_entries,
            sends: options.connections_max,
            buffers: Shape { count: options.buffer_count, bytes: options.buffer_bytes },
        };
        let mut ring = Ring::new(shape, Arc::clone(&counters))?;
        ring.poll_waker(handle.waker().raw_fd());
        let now = clock.now();
        let date = date::format_date(Duration::ZERO);
        let table = Table::new(options.worker, options.connections_max, date, Arc::clone(&counters));
        let mut reactor = Self {
            ring,
            front: Front { service, table },
            acceptor: Acceptor::new(listeners),
            wheel: Wheel::new(options.connections_max, now),
            clock,
            handle,
            counters,
            options,
            batch: VecDeque::with_capacity(BATCH_MAX),
            more: false,
            starved: VecDeque::new(),
            fired: Vec::new(),
            now,
            date_until: now,
            lifetime: Lifetime::Open,
            seen: [0; 3],
            not_send: PhantomData,
        };
        reactor.settle_accept(now);
        Ok(reactor)
    }

    /// Serves until a drain is complete or a stop is asked for.
    ///
    /// # Errors
    /// [`RingError::Failed`] when the kernel gives the ring up.
    pub fn run(&mut self) -> Result<(), RingError> {
        while self.turn()? {}
        Ok(())
    }

    /// Runs one turn; `false` when there is nothing left to serve.
    fn turn(&mut self) -> Result<bool, RingError> {
        let wait = if self.handle.waker().begin_sleep() { self.poll_wait() } else { Wait::Never };
        let entered = self.ring.submit_and_wait(wait);
        self.handle.waker().end_sleep();
        entered?;
        let room = BATCH_MAX - self.batch.len();
        self.more = self.ring.take_completions(&mut self.batch, room);
        self.front.service.drain_queues();
        // Read after the drain: no stamp of this turn is earlier than the stamp of its cause.
        let now = self.clock.now();
        self.now = now;
        self.counters.turns.add(1);
        self.refresh_date(now);
        self.handle_control(now);
        self.act(now);
        self.settle_dirty(now);
        self.settle_accept(now);
        Ok(!self.is_done(now))
    }

    fn act(&mut self, now: MonoNs) {
        while !self.front.service.is_spent()
            && let Some(completion) = self.batch.pop_front()
        {
            self.handle_completion(now, completion);
        }
        let mut cursor = Cursor::nowhere(&mut self.front.table, now);
        self.front.service.handle_queues(now, &mut cursor);
        self.wheel.poll_fired(now, &mut self.fired);
        while let Some(index) = self.fired.pop() {
            self.front.handle_due(now, index);
        }
        for _ in 0..self.front.table.resumable.len() {
            if !self.front.service.is_spent()
                && let Some(key) = self.front.table.resumable.pop_front()
            {
                self.front.resume(now, key);
            }
        }
        // Leases are back, except those of completions left to the next turn: one that finds no buffer comes again.
        let count = self.starved.len().min(usize::from(self.options.buffer_count));
        for key in self.starved.drain(..count) {
            if let Some(conn) = self.front.table.conns.find(key) {
                conn.reading = Reading::Off;
                self.front.table.mark_dirty(key.index);
            }
        }
    }

    fn handle_completion(&mut self, now: MonoNs, mut completion: Completion) {
        self.inject_fault(&mut completion);
        let key = completion.token.key;
        match completion.token.op {
            Op::Accept => self.acceptor.handle_accepted(now, completion, &self.counters),
            Op::Cancel => self.end_operation(key),
            Op::CancelAccept => {}
            Op::Poll => self.handle_poll(&completion),
            Op::Recv => {
                self.handle_recv(now, completion);
                if self.options.faults.repeat_stale {
                    let generation = (key.generation + Key::GENERATIONS - 1) % Key::GENERATIONS;
                    let token = Token { op: Op::Recv, key: Key { generation, ..key } };
                    let stale = Completion { token, result: Ok(0), more: false, lease: None, accepted: None };
                    self.handle_recv(now, stale);
                }
            }
            Op::Send => self.handle_sent(&completion),
            Op::Wake if completion.more => {}
            Op::Wake => self.ring.poll_waker(self.handle.waker().raw_fd()),
        }
    }

    fn handle_recv(&mut self, now: MonoNs, mut completion: Completion) {
        let (key, lease) = (completion.token.key, completion.lease.take());
        let Some(conn) = self.front.table.conns.find(key) else {
            self.counters.stale_completions.add(1);
            if let Some(lease) = lease {
                self.ring.bufs().give_back(lease);
            }
            return;
        };
        if !completion.more {
            conn.end_operation();
            conn.reading = Reading::Off;
        }
        match (completion.result, &lease) {
            (Ok(0), _) => self.front.handle_fin(key, Fin::Read),
            (Ok(count), Some(lease)) => {
                self.counters.bytes_received.add(u64::from(count));
                self.front.handle_bytes(now, key, self.ring.bufs().bytes_mut(lease));
            }
            (Err(libc::ENOBUFS), _) => {
                conn.reading = Reading::Starved;
                self.starved.push_back(key);
                self.counters.recv_no_buffers.add(1);
            }
            // Ended by us, or for now: settling arms it again if it is wanted.
            (Err(libc::ECANCELED | libc::EINTR | libc::EAGAIN), _) => {}
            // An error, or bytes without the buffer they are in.
            (Err(_), _) | (Ok(_), None) => self.front.table.lose(key, Gone::Client),
        }
        if let Some(lease) = lease {
            self.ring.bufs().give_back(lease);
        }
        self.front.table.mark_dirty(key.index);
    }

    fn handle_sent(&mut self, completion: &Completion) {
        let key = completion.token.key;
        let (buffer, flags) = (self.ring.take_sent(completion), self.send_flags());
        let (Some(conn), Some(buffer)) = (self.front.table.conns.find(key), buffer) else {
            self.counters.stale_completions.add(1);
            return;
        };
        conn.end_operation();
        let before = conn.sent.take().unwrap_or(0);
        let (progress, flags) = match completion.result {
            Ok(count) => (Ok(before + count as usize), flags),
            // Without a flag the kernel waits until the socket takes bytes.
            Err(libc::EAGAIN | libc::EINTR) => (Ok(before), 0),
            Err(_) => (Err(()), 0),
        };
        self.counters.bytes_sent.add(u64::from(completion.result.unwrap_or(0)));
        match progress {
            Ok(sent) if sent < buffer.len() && conn.phase != Phase::Dying => {
                self.counters.short_sends.add(1);
                self.submit_send(key, buffer, sent, flags);
            }
            Ok(_) => {
                if conn.fin == Fin::Read || !conn.input.is_empty() {
                    self.front.table.resumable.push_back(key);
                }
                self.front.table.recycle(buffer);
            }
            Err(()) => self.front.table.lose(key, Gone::Client),
        }
        self.front.table.mark_dirty(key.index);
    }

    fn handle_poll(&mut self, completion: &Completion) {
        let key = completion.token.key;
        let Some(conn) = self.front.table.conns.find(key) else {
            self.counters.stale_completions.add(1);
            return;
        };
        if !completion.more {
            conn.end_operation();
            conn.polling = false;
        }
        let broken = (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) as u32;
        match completion.result {
            _ if conn.phase != Phase::Open => {}
            Ok(events) if events & broken != 0 => self.front.table.lose(key, Gone::Client),
            Ok(_) => self.front.handle_fin(key, Fin::Seen),
            Err(_) => {}
        }
        self.front.table.mark_dirty(key.index);
    }

    /// Counts down an operation's last completion.
    fn end_operation(&mut self, key: Key) {
        match self.front.table.conns.find(key) {
            Some(conn) => {
                conn.end_operation();
                self.front.table.mark_dirty(key.index);
            }
            None => self.counters.stale_completions.add(1),
        }
    }

    fn submit_send(&mut self, key: Key, buffer: Vec<u8>, sent: usize, flags: i32) {
        let Some(conn) = self.front.table.conns.find(key) else { return };
        conn.sent = Some(sent);
        conn.in_flight += 1;
        let limit = self.options.faults.send_bytes_max.unwrap_or(u32::MAX);
        self.ring.send(conn.raw_fd(), key, Outgoing { buffer, from: sent, limit, flags });
    }

    const fn send_flags(&self) -> i32 {
        if self.options.faults.send_dont_wait { libc::MSG_DONTWAIT } else { 0 }
    }

    /// Brings every connection that was touched to where the kernel and the wheel should have it.
    fn settle_dirty(&mut self, now: MonoNs) {
        self.front.report_gone(now);
        // Settling marks none, so this ends.
        while let Some(index) = self.front.table.dirty.pop() {
            self.settle(now, index);
        }
    }

    fn settle(&mut self, now: MonoNs, index: u32) {
        let Some((key, conn)) = self.front.table.conns.tenant(index) else { return };
        conn.dirty = false;
        if conn.send_probe(now) {
            self.counters.probes.add(1);
        }
        if conn.sent.is_none() && !conn.out.is_empty() {
            self.begin_send(now, key);
        }
        let Some(conn) = self.front.table.conns.find(key) else { return };
        conn.step_close(now);
        if conn.phase == Phase::Dying && conn.in_flight == 0 {
            self.front.table.conns.remove(key);
            self.wheel.disarm(index);
            self.acceptor.handle_closed();
            self.counters.closed.add(1);
            return;
        }
        settle_operations(&mut self.ring, key, conn);
        if let Some(at) = conn.due()
            && conn.armed_for.is_none_or(|armed| at < armed)
        {
            self.wheel.arm(index, at);
            conn.armed_for = Some(at);
        }
    }

    /// Sends what has gathered; exchanges that end in it are complete.
    fn begin_send(&mut self, now: MonoNs, key: Key) {
        let table = &mut self.front.table;
        let Some(conn) = table.conns.find(key) else { return };
        for serial in conn.finished.drain(..) {
            let id = ExchangeId { worker: table.worker, slot: key.index, serial };
            self.front.service.handle_submitted(now, id);
        }
        let buffer = std::mem::take(&mut conn.out);
        let flags = self.send_flags();
        self.submit_send(key, buffer, 0, flags);
    }

    fn settle_accept(&mut self, now: MonoNs) {
        self.admit(now);
        let room = match self.lifetime {
            Lifetime::Draining(_) | Lifetime::Ending(_) => Room::Draining,
            Lifetime::Open if self.front.table.conns.is_full() => Room::Full,
            Lifetime::Open => Room::Some,
        };
        self.acceptor.settle(now, room, &mut self.ring, &self.counters);
        self.admit(now);
    }

    /// Gives slots to accepted sockets.
    fn admit(&mut self, now: MonoNs) {
        while !self.front.table.conns.is_full()
            && let Some(socket) = self.acceptor.poll_accepted()
        {
            let mut conn = Conn::new(socket.into(), http1::Connection::new(self.options.http, now), now);
            match self.lifetime {
                Lifetime::Open => {}
                Lifetime::Draining(_) => conn.drain(now),
                Lifetime::Ending(_) => continue,
            }
            if let Ok(key) = self.front.table.conns.insert(conn) {
                self.counters.accepted.add(1);
                self.settle(now, key.index);
            }
        }
    }

    /// Acts on what other threads asked for.
    fn handle_control(&mut self, now: MonoNs) {
        let ending = Lifetime::Ending(now.saturating_add(END_TIME_MAX));
        let next = match (self.lifetime, self.handle.asked()) {
            (Lifetime::Open, Asked::Drain(limit)) => Lifetime::Draining(now.saturating_add(limit)),
            (Lifetime::Open | Lifetime::Draining(_), Asked::Stop) => ending,
            (Lifetime::Draining(end), Asked::Drain(_) | Asked::Nothing) if end <= now => ending,
            (lifetime, Asked::Drain(_) | Asked::Nothing | Asked::Stop) => lifetime,
        };
        if next == self.lifetime {
            return;
        }
        self.lifetime = next;
        let table = &mut self.front.table;
        for index in 0..table.conns.index_end() {
            let Some((key, conn)) = table.conns.tenant(index) else { continue };
            match next {
                Lifetime::Ending(_) => table.lose(key, Gone::Shutdown),
                Lifetime::Draining(_) => conn.drain(now),
                Lifetime::Open => {}
            }
            table.mark_dirty(index);
        }
    }

    fn is_done(&self, now: MonoNs) -> bool {
        let empty = self.front.table.conns.len() == 0 && self.front.service.is_settled();
        match self.lifetime {
            Lifetime::Open => false,
            Lifetime::Draining(_) => empty && self.acceptor.is_done(),
            Lifetime::Ending(end) => empty || end <= now,
        }
    }

    fn refresh_date(&mut self, now: MonoNs) {
        if now >= self.date_until {
            let wall = self.clock.wall_since_epoch();
            self.front.table.date = date::format_date(wall);
            let left = Duration::from_secs(1) - Duration::from_nanos(u64::from(wall.subsec_nanos()));
            self.date_until = now.saturating_add(left);
        }
    }

    fn inject_fault(&mut self, completion: &mut Completion) {
        let Some(replace) = self.options.faults.replace_result else { return };
        let point = match completion.token.op {
            Op::Accept => FaultPoint::Accept,
            Op::Recv => FaultPoint::Recv,
            Op::Send => FaultPoint::Send,
            Op::Cancel | Op::CancelAccept | Op::Poll | Op::Wake => return,
        };
        let seen = &mut self.seen[point as usize];
        if let Some(error) = replace(point, *seen) {
            completion.result = Err(error);
        }
        *seen += 1;
    }

    /// Returns how long the coming turn may wait.
    fn poll_wait(&self) -> Wait {
        let front = &self.front.table;
        if self.more || !self.batch.is_empty() || !front.resumable.is_empty() || !self.starved.is_empty() {
            return Wait::Never;
        }
        let now = self.now;
        let until = |at: MonoNs| at.checked_since(now).unwrap_or_default();
        let end = match self.lifetime {
            Lifetime::Open => None,
            Lifetime::Draining(end) | Lifetime::Ending(end) => Some(until(end)),
        };
        let resume = self.acceptor.resume_at().map(until);
        match [self.wheel.poll_wait(now), end, resume].into_iter().flatten().min() {
            Some(limit) => Wait::UpTo(limit),
            None => Wait::Forever,
        }
    }
}

/// Arms or cancels a connection's operations as its state asks.
fn settle_operations(ring: &mut Ring, key: Key, conn: &mut Conn) {
    if conn.phase == Phase::Dying {
        if !std::mem::replace(&mut conn.cancelled, true) {
            ring.cancel_all(conn.raw_fd(), key);
            conn.in_flight += 1;
        }
        return;
    }
    match (conn.reading, conn.wants_read()) {
        (Reading::Off, true) => {
            ring.recv_many(conn.raw_fd(), key);
            conn.reading = Reading::Armed;
            conn.in_flight += 1;
        }
        (Reading::Armed, false) => {
            ring.cancel_recv(key);
            conn.reading = Reading::Cancelling;
            conn.in_flight += 1;
        }
        (Reading::Armed | Reading::Cancelling | Reading::Off | Reading::Starved, _) => {}
    }
    if conn.wants_poll() {
        ring.poll_hang_up(conn.raw_fd(), key);
        conn.polling = true;
        conn.in_flight += 1;
    }
}

/// Completions of one turn. What is left in the queue waits for the next, so no turn is long; the entering that each
/// turn pays is then spread over that many.
const BATCH_MAX: usize = 256;
/// For the last completions once everything is cancelled.
const END_TIME_MAX: Duration = Duration::from_secs(1);
