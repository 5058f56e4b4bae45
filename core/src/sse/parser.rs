//! A peer's bytes, in any split, → events.

use alloc::vec::Vec;
use core::fmt;
use core::mem;

use super::is_line_end;

/// Incremental event-stream parser (WHATWG HTML §9.2.6). What it holds is bounded by its limit.
///
/// It works on bytes: whoever wants text decodes [`Event::data`] leniently, which gives what decoding the stream would.
///
/// ```
/// use uring_serve_core::sse::{End, Event, Item, Parser};
///
/// let mut parser = Parser::new(1024);
/// let mut input = b"data: {}\n\ndata: [DO".as_slice();
/// let event = Event { name: b"", data: b"{}" };
/// assert_eq!(parser.next_item(&mut input), Ok(Some(Item::Event(event))));
/// assert_eq!(parser.next_item(&mut input), Ok(None)); // wants more bytes
/// assert_eq!(parser.finish(), End::InsideEvent);
/// ```
#[derive(Clone, Debug)]
pub struct Parser {
    limit: usize,
    position: Position,
    /// What the last call returned; it is dropped by the next.
    lent: Lent,
    /// The line under way, as far as it came.
    line: Vec<u8>,
    name: Vec<u8>,
    /// The data lines, each ended by a line feed.
    data: Vec<u8>,
    /// The id that counts from the next blank line on.
    id: Option<Vec<u8>>,
    last_event_id: Vec<u8>,
    retry_ms: Option<u64>,
}

/// Where in the stream the next byte stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// Behind a CR: a line feed belongs to it.
    AfterCr,
    /// Past the limit. Nothing is read any more.
    Dead,
    /// In the first line, which may begin with a byte order mark.
    FirstLine,
    /// In any other line.
    Line,
}

/// What the caller may still be looking at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lent {
    /// The line, a comment.
    Comment,
    /// Name and data.
    Event,
    Nothing,
}

impl Parser {
    /// Creates a parser that holds at most `event_bytes_max` bytes of one event, over all its lines.
    #[must_use]
    pub const fn new(event_bytes_max: u32) -> Self {
        Self {
            limit: event_bytes_max as usize,
            position: Position::FirstLine,
            lent: Lent::Nothing,
            line: Vec::new(),
            name: Vec::new(),
            data: Vec::new(),
            id: None,
            last_event_id: Vec::new(),
            retry_ms: None,
        }
    }

    /// Consumes the front of `input` up to the end of the next event or comment and returns it, or consumes all of
    /// `input` and returns `None`. Any split of the stream gives the same items.
    ///
    /// # Errors
    /// [`EventTooLarge`] past the limit, and from then on.
    pub fn next_item(&mut self, input: &mut &[u8]) -> Result<Option<Item<'_>>, EventTooLarge> {
        self.take_back();
        while self.take_line(input)? {
            match self.line.first() {
                None => {
                    if self.end_event() {
                        self.lent = Lent::Event;
                        break;
                    }
                }
                Some(b':') => {
                    self.lent = Lent::Comment;
                    break;
                }
                Some(_) => self.handle_field(),
            }
            self.line.clear();
        }
        Ok(match self.lent {
            Lent::Comment => Some(Item::Comment(&self.line[1..])),
            // An event has at least one data line, and the last one's line feed is not part of it.
            Lent::Event => {
                Some(Item::Event(Event { name: &self.name, data: &self.data[..self.data.len() - 1] }))
            }
            Lent::Nothing => None,
        })
    }

    /// Ends the stream: says whether it stopped between events. A partial event is dropped, as the standard asks, but
    /// the caller is told.
    #[must_use]
    pub fn finish(mut self) -> End {
        self.take_back();
        let open = [&self.line, &self.name, &self.data].into_iter().any(|held| !held.is_empty())
            || self.id.is_some();
        if open { End::InsideEvent } else { End::BetweenEvents }
    }

    /// Returns the id that counts since the last blank line; empty if none.
    #[must_use]
    pub fn last_event_id(&self) -> &[u8] {
        &self.last_event_id
    }

    /// Returns the last valid `retry`, in milliseconds.
    #[must_use]
    pub const fn retry_ms(&self) -> Option<u64> {
        self.retry_ms
    }

    /// Drops what the last call returned.
    fn take_back(&mut self) {
        match mem::replace(&mut self.lent, Lent::Nothing) {
            Lent::Comment => self.line.clear(),
            Lent::Event => {
                self.name.clear();
                self.data.clear();
            }
            Lent::Nothing => {}
        }
    }

    /// Moves bytes from `input` to the line under way. Returns whether it is complete.
    fn take_line(&mut self, input: &mut &[u8]) -> Result<bool, EventTooLarge> {
        match self.position {
            Position::AfterCr => self.skip_line_feed(input),
            Position::Dead => return Err(EventTooLarge),
            Position::FirstLine | Position::Line => {}
        }
        let end = input.iter().position(|&byte| is_line_end(byte));
        let (piece, rest) = input.split_at(end.unwrap_or(input.len()));
        let held = self.line.len() + self.name.len() + self.data.len() + self.id.as_ref().map_or(0, Vec::len);
        if held + piece.len() > self.limit {
            self.position = Position::Dead;
            return Err(EventTooLarge);
        }
        self.line.extend_from_slice(piece);
        *input = rest;
        let Some((&line_end, rest)) = rest.split_first() else { return Ok(false) };
        *input = rest;
        if self.position == Position::FirstLine && self.line.starts_with(b"\xef\xbb\xbf") {
            self.line.drain(..3);
        }
        self.position = Position::Line;
        if line_end == b'\r' {
            self.position = Position::AfterCr;
            self.skip_line_feed(input);
        }
        Ok(true)
    }

    fn skip_line_feed(&mut self, input: &mut &[u8]) {
        if let Some((first, rest)) = input.split_first() {
            self.position = Position::Line;
            if *first == b'\n' {
                *input = rest;
            }
        }
    }

    fn handle_field(&mut self) {
        let colon = self.line.iter().position(|&byte| byte == b':');
        let (field, value) = match colon {
            Some(colon) => (&self.line[..colon], &self.line[colon + 1..]),
            None => (self.line.as_slice(), [].as_slice()),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                self.data.extend_from_slice(value);
                self.data.push(b'\n');
            }
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            b"id" if !value.contains(&0) => self.id = Some(value.into()),
            b"retry" => self.retry_ms = read_digits(value).or(self.retry_ms),
            _ => {}
        }
    }

    /// Handles a blank line. Returns whether it dispatches an event: without data it only ends one.
    fn end_event(&mut self) -> bool {
        if let Some(id) = self.id.take() {
            self.last_event_id = id;
        }
        if self.data.is_empty() {
            self.name.clear();
        }
        !self.data.is_empty()
    }
}

/// Reads a number of digits only; `None` for anything else, and out of range.
fn read_digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |n, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        n.checked_mul(10)?.checked_add(digit)
    })
}

/// What a stream brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item<'a> {
    /// A comment line, without its colon.
    Comment(&'a [u8]),
    /// A dispatched event.
    Event(Event<'a>),
}

/// One dispatched event. `[DONE]` is data like any other: the caller compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    /// The `event` field; empty means `message`.
    pub name: &'a [u8],
    /// The `data` lines joined with line feeds.
    pub data: &'a [u8],
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// After a blank line.
    BetweenEvents,
    /// Inside an event: the peer was cut off.
    InsideEvent,
}

/// An event outgrew the limit. The stream cannot be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventTooLarge;

impl fmt::Display for EventTooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event is longer than its limit")
    }
}

impl core::error::Error for EventTooLarge {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn end_after(bytes: &[u8]) -> End {
        let mut parser = Parser::new(100);
        let mut input = bytes;
        while parser.next_item(&mut input).expect("small").is_some() {}
        assert!(input.is_empty());
        parser.finish()
    }

    #[test]
    fn an_end_inside_an_event_is_reported() {
        let between: [&[u8]; 7] =
            [b"", b"\n", b"data: a\n\n", b"data: a\r\r", b"data: a\r\n\r", b": hi\n", b"event: x\n\n"];
        for bytes in between {
            assert_eq!(end_after(bytes), End::BetweenEvents, "{bytes:?}");
        }
        let inside: [&[u8]; 6] =
            [b"d", b"data: a", b"data: a\n", b"event: a\n", b"id: 1\n", b"data: a\n\ndata"];
        for bytes in inside {
            assert_eq!(end_after(bytes), End::InsideEvent, "{bytes:?}");
        }
    }

    #[test]
    fn the_limit_counts_all_lines_of_an_event() {
        // (name, bytes, most that is held): `data: ab` is 8 bytes, and `ab` with its line feed is 3.
        let rows: [(&str, &[u8], u32); 4] = [
            ("one line", b"data: ab\n\n", 8),
            ("two lines", b"data: ab\ndata: ab\n\n", 11),
            ("a line that is skipped", b"unknown: x\n\n", 10),
            ("events do not add up", b"data: ab\n\ndata: ab\n\n: comment\n\ndata: ab\n\n", 9),
        ];
        for (name, bytes, held) in rows {
            let run = |limit| {
                let mut parser = Parser::new(limit);
                let mut input = bytes;
                while parser.next_item(&mut input)?.is_some() {}
                Ok(())
            };
            assert_eq!(run(held), Ok(()), "{name}");
            assert_eq!(run(held - 1), Err(EventTooLarge), "{name}");
        }
    }

    #[test]
    fn too_large_is_for_good() {
        let mut parser = Parser::new(4);
        assert_eq!(parser.next_item(&mut b"data: too long".as_slice()), Err(EventTooLarge));
        assert_eq!(parser.next_item(&mut b"\n\n".as_slice()), Err(EventTooLarge));
    }

    #[test]
    fn an_event_is_consumed_with_its_line_end() {
        let mut parser = Parser::new(100);
        let mut input = b"data: a\r\n\r\ndata: b\r\n\r\n".as_slice();
        assert!(matches!(parser.next_item(&mut input), Ok(Some(Item::Event(_)))));
        assert_eq!(input, b"data: b\r\n\r\n");
    }

    #[test]
    fn a_comment_inside_an_event_leaves_it_whole() {
        let mut parser = Parser::new(100);
        let mut input = b"event: e\ndata: a\n:c\ndata: b\n\n".as_slice();
        assert_eq!(parser.next_item(&mut input), Ok(Some(Item::Comment(b"c"))));
        let event = Event { name: b"e", data: b"a\nb" };
        assert_eq!(parser.next_item(&mut input), Ok(Some(Item::Event(event))));
        assert_eq!(parser.next_item(&mut input), Ok(None));
    }

    #[test]
    fn what_the_writer_writes_reads_back_in_any_split() {
        let payloads: [&[u8]; 5] = [b"", b"{\"a\":1}", b"two\nlines", b" space", b"\xef\xbb\xbf: colon"];
        let mut stream = vec![];
        for payload in payloads {
            super::super::write_data(payload, &mut stream);
        }
        for cut in 0..=stream.len() {
            let mut parser = Parser::new(100);
            let mut read: Vec<Vec<u8>> = vec![];
            for mut piece in [&stream[..cut], &stream[cut..]] {
                while let Some(item) = parser.next_item(&mut piece).expect("small") {
                    let Item::Event(event) = item else { panic!("no comments") };
                    read.push(event.data.into());
                }
            }
            assert_eq!(read, payloads, "cut at {cut}");
        }
    }
}
