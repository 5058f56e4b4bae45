//! Received bytes to requests, requests to the service.

use std::ops::Range;

use uring_serve_core::http1::{Error, Event, Framing, PeerError, ResponseHead};
use uring_serve_core::time::MonoNs;

use super::table::{Cursor, Table};
use crate::conn::{Conn, Exchange, Fin, Phase};
use crate::service::{ExchangeId, Gone, Refusal, Request, Service};
use crate::token::Key;

/// The service and the connections that it answers on: all of the reactor that needs no ring.
#[derive(Debug)]
pub(crate) struct Front<S> {
    pub(crate) service: S,
    pub(crate) table: Table,
}

impl<S: Service> Front<S> {
    /// Takes in received bytes. They are shown to the connection where they lie, unless some are kept from before.
    pub(crate) fn handle_bytes(&mut self, now: MonoNs, key: Key, bytes: &mut [u8]) {
        let Some(conn) = self.table.conns.find(key) else { return };
        match conn.phase {
            Phase::Open if conn.input.is_empty() && conn.takes_requests() => {
                let used = self.advance(now, key, bytes);
                if let Some(conn) = self.table.conns.find(key).filter(|conn| conn.phase == Phase::Open) {
                    conn.input.extend_from_slice(&bytes[used..]);
                }
            }
            Phase::Open => {
                conn.input.extend_from_slice(bytes);
                self.resume(now, key);
            }
            Phase::Flushing | Phase::Lingering(_) => {
                conn.discard_left = conn.discard_left.saturating_sub(bytes.len() as u32);
            }
            Phase::Dying => {}
        }
    }

    /// Reads on in the connection's own input, and closes it if that and the peer's stream are at their ends.
    pub(crate) fn resume(&mut self, now: MonoNs, key: Key) {
        let Some(conn) = self.table.conns.find(key) else { return };
        if !conn.input.is_empty() && conn.takes_requests() {
            let mut input = std::mem::take(&mut conn.input);
            let used = self.advance(now, key, &mut input);
            if let Some(conn) = self.table.conns.find(key).filter(|conn| conn.phase == Phase::Open)
                && used < input.len()
            {
                input.drain(..used);
                conn.input = input;
            }
        }
        self.close_at_end(key);
    }

    /// Takes in what is known of the peer's end of stream.
    pub(crate) fn handle_fin(&mut self, key: Key, fin: Fin) {
        let Some(conn) = self.table.conns.find(key) else { return };
        conn.fin = conn.fin.max(fin);
        let leaves = |exchange: &Exchange| exchange.end_at_fin && !exchange.http11;
        if conn.exchange.as_ref().is_some_and(leaves) {
            self.table.lose(key, Gone::Client);
        } else {
            self.close_at_end(key);
        }
    }

    /// Tells the connection and the service which of their deadlines have come.
    pub(crate) fn handle_due(&mut self, now: MonoNs, index: u32) {
        let Some((key, conn)) = self.table.conns.tenant(index) else { return };
        conn.armed_for = None;
        let due = |at: &MonoNs| *at <= now;
        if let Some(exchange) = &mut conn.exchange
            && exchange.timer.take_if(|at| due(at)).is_some()
        {
            let serial = exchange.serial;
            let id = ExchangeId { worker: self.table.worker, slot: index, serial };
            let mut cursor = Cursor { table: &mut self.table, now, key, serial };
            self.service.handle_timer(now, id, &mut cursor);
        }
        if let Some(conn) = self.table.conns.find(key)
            && conn.phase == Phase::Open
            && conn.sent.is_none()
        {
            if conn.is_idle() && conn.close_at.as_ref().is_some_and(due) {
                conn.close();
            } else if let Err(error) = conn.http.handle_timeout(now) {
                self.refuse(key, error);
            }
        }
        self.table.mark_dirty(index);
    }

    /// Tells the service which exchanges ended without their response.
    pub(crate) fn report_gone(&mut self, now: MonoNs) {
        for (id, why) in self.table.gone.drain(..) {
            self.service.handle_gone(now, id, why);
        }
    }

    /// Takes requests out of `buffer`, all of the connection's unconsumed bytes, until one is not answered at once.
    /// Returns how many bytes are used up.
    fn advance(&mut self, now: MonoNs, key: Key, buffer: &mut [u8]) -> usize {
        let mut used = 0;
        while let Some(conn) = self.table.conns.find(key).filter(|conn| conn.takes_requests()) {
            if self.service.is_spent() {
                self.table.resumable.push_back(key);
                break;
            }
            let rest = &mut buffer[used..];
            match conn.http.poll_event(now, rest) {
                Ok(None) => break,
                Ok(Some(Event::Head)) => self.judge_head(now, key, rest),
                Ok(Some(Event::ExpectContinue)) => {
                    if let Some(conn) = self.table.lend_output(key) {
                        // Refused only after the response has begun; then the peer reads that.
                        let _ = conn.http.send_continue(&mut conn.out);
                    }
                }
                Ok(Some(Event::Body { body })) => used += self.serve(now, key, rest, body),
                Err(error) => self.refuse(key, error),
            }
        }
        self.table.mark_dirty(key.index);
        used
    }

    /// Lets the service refuse a request by its head.
    fn judge_head(&mut self, now: MonoNs, key: Key, buffer: &[u8]) {
        let Some(conn) = self.table.conns.find(key) else { return };
        conn.head_at = now;
        let Some(head) = conn.http.request(buffer) else { return };
        let Some(refusal) = self.service.handle_head(now, &head) else { return };
        let date = self.table.date;
        let Some(conn) = self.table.lend_output(key) else { return };
        if let Err(error) = send_refusal(now, conn, &refusal, &date) {
            tracing::error!(?error, "a refusal breaks its own framing");
            self.table.counters.misuse.add(1);
        }
        conn_close(&mut self.table, key);
    }

    /// Hands a complete request to the service and returns the message's length.
    fn serve(&mut self, now: MonoNs, key: Key, buffer: &mut [u8], body: Range<usize>) -> usize {
        let table = &mut self.table;
        let Some(conn) = table.conns.find(key) else { return 0 };
        let (Some(end), Some(lent)) = (conn.http.message_end(), conn.http.lend_head()) else { return 0 };
        let head_at = conn.head_at;
        table.serial += 1;
        let serial = table.serial;
        // The head lies before the body, if there is one.
        let (front, rest) = buffer.split_at_mut(if body.is_empty() { buffer.len() } else { body.start });
        if let Some(head) = lent.request(front) {
            conn.exchange = Some(Exchange::new(serial, head.http11, now));
            table.counters.requests.add(1);
            let id = ExchangeId { worker: table.worker, slot: key.index, serial };
            let request = Request { id, head_at, head, body: &mut rest[..body.len()] };
            let resumable = table.resumable.len();
            let mut cursor = Cursor { table, now, key, serial };
            self.service.handle_request(now, request, &mut cursor);
            // Answered at once: the caller goes on by itself.
            self.table.resumable.truncate(resumable);
        }
        if let Some(conn) = self.table.conns.find(key) {
            conn.http.return_head(lent);
        }
        end
    }

    /// Answers a peer's error, if it can be answered, and closes.
    fn refuse(&mut self, key: Key, error: Error) {
        let date = self.table.date;
        let Some(conn) = self.table.lend_output(key) else { return };
        match error {
            Error::Peer(error) => {
                conn.http.send_error(error, &date, &mut conn.out);
                if error != PeerError::IdleTimeout {
                    self.table.counters.peer_errors.add(1);
                }
            }
            Error::Misuse(misuse) => {
                tracing::error!(?misuse, "the reactor breaks the protocol machine's rules");
                self.table.counters.misuse.add(1);
            }
        }
        conn_close(&mut self.table, key);
    }

    fn close_at_end(&mut self, key: Key) {
        let Some(conn) = self.table.conns.find(key) else { return };
        if conn.fin == Fin::Read && conn.takes_requests() {
            if conn.http.handle_eof().is_err() {
                self.table.counters.peer_errors.add(1);
            }
            conn_close(&mut self.table, key);
        }
    }
}

fn conn_close(table: &mut Table, key: Key) {
    if let Some(conn) = table.conns.find(key) {
        conn.close();
        table.mark_dirty(key.index);
    }
}

fn send_refusal(now: MonoNs, conn: &mut Conn, refusal: &Refusal, date: &[u8; 29]) -> Result<(), Error> {
    let headers: Vec<_> = refusal.headers.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    let head = ResponseHead { status: refusal.status, headers: &headers, date };
    let out = &mut conn.out;
    conn.http.send_head(&head, Framing::Length(refusal.body.len() as u64), out)?;
    conn.http.send_body(&refusal.body, out)?;
    conn.http.finish(now, out).map(drop)
}
