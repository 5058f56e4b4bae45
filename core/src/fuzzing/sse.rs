//! The event stream, read twice: by the parser in pieces, and plainly as a whole text.

use alloc::vec::Vec;

use crate::sse::{End, EventTooLarge, Item, Parser};

/// An item with its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Owned {
    Comment(Vec<u8>),
    Event { name: Vec<u8>, data: Vec<u8>, id: Vec<u8> },
}

impl Owned {
    /// Returns what the reader sees of a written event.
    pub(super) fn event(name: &[u8], payload: &[u8]) -> Self {
        Self::Event { name: name.into(), data: unify_line_ends(payload), id: Vec::new() }
    }

    /// Returns what the reader sees of a written comment: one for each line, behind the writer's space.
    pub(super) fn comments(text: &str) -> Vec<Self> {
        let text = unify_line_ends(text.as_bytes());
        if text.is_empty() {
            return [Self::Comment(Vec::new())].into();
        }
        text.split(|&byte| byte == b'\n').map(|line| Self::Comment([b" ", line].concat())).collect()
    }

    /// Returns its length in bytes.
    pub(super) const fn len(&self) -> usize {
        match self {
            Self::Comment(text) => text.len(),
            Self::Event { name, data, id: _ } => name.len() + data.len(),
        }
    }
}

/// All that a stream came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stream {
    pub(super) items: Vec<Owned>,
    pub(super) last_event_id: Vec<u8>,
    pub(super) retry_ms: Option<u64>,
    pub(super) end: Result<End, EventTooLarge>,
}

pub(super) fn read_pieces(limit: u32, pieces: &[&[u8]]) -> Stream {
    let mut parser = Parser::new(limit);
    let mut items = Vec::new();
    let mut read = |piece: &[u8]| {
        let mut input = piece;
        while let Some(item) = parser.next_item(&mut input)? {
            let (name, data) = match item {
                Item::Comment(text) => {
                    items.push(Owned::Comment(text.into()));
                    continue;
                }
                Item::Event(event) => (event.name.into(), event.data.into()),
            };
            items.push(Owned::Event { name, data, id: parser.last_event_id().into() });
        }
        assert!(input.is_empty(), "bytes are left without an item");
        Ok(())
    };
    let read = pieces.iter().try_for_each(|piece| read(piece));
    let (last_event_id, retry_ms) = (parser.last_event_id().into(), parser.retry_ms());
    if read.is_err() {
        assert_eq!(parser.next_item(&mut b"\n\n".as_slice()), Err(EventTooLarge), "read on behind the limit");
    }
    Stream { items, last_event_id, retry_ms, end: read.map(|()| parser.finish()) }
}

/// Reads a whole text as WHATWG HTML §9.2.6 words it. Returns items, last event id and reconnection time.
pub(super) fn read_whole(stream: &[u8]) -> (Vec<Owned>, Vec<u8>, Option<u64>) {
    let text = unify_line_ends(stream.strip_prefix(b"\xef\xbb\xbf").unwrap_or(stream));
    let mut lines: Vec<&[u8]> = text.split(|&byte| byte == b'\n').collect();
    // Behind the last line end stands a line that has not ended.
    lines.pop();
    let (mut items, mut last_event_id, mut retry_ms) = (Vec::new(), [].as_slice(), None);
    let (mut name, mut data, mut id) = ([].as_slice(), Vec::new(), [].as_slice());
    for line in lines {
        if line.is_empty() {
            last_event_id = id;
            if !data.is_empty() {
                items.push(Owned::Event {
                    name: name.into(),
                    data: data.join(b"\n".as_slice()),
                    id: id.into(),
                });
            }
            (name, data) = (&[], Vec::new());
            continue;
        }
        let colon = line.iter().position(|&byte| byte == b':').unwrap_or(line.len());
        let value = line.get(colon + 1..).unwrap_or_default();
        let stripped = value.strip_prefix(b" ").unwrap_or(value);
        match &line[..colon] {
            b"" => items.push(Owned::Comment(value.into())),
            b"data" => data.push(stripped),
            b"event" => name = stripped,
            b"id" if !stripped.contains(&0) => id = stripped,
            b"retry" if stripped.iter().all(u8::is_ascii_digit) => {
                let digits = str::from_utf8(stripped).expect("digits are ASCII");
                retry_ms = digits.parse().ok().or(retry_ms);
            }
            _ => {}
        }
    }
    (items, last_event_id.into(), retry_ms)
}

/// Returns the text with CR, and CR with LF, as LF.
fn unify_line_ends(text: &[u8]) -> Vec<u8> {
    let mut unified = Vec::with_capacity(text.len());
    let mut before = 0;
    for &byte in text {
        match (before, byte) {
            (b'\r', b'\n') => {}
            (_, b'\r') => unified.push(b'\n'),
            (_, byte) => unified.push(byte),
        }
        before = byte;
    }
    unified
}
