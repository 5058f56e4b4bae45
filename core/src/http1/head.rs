use alloc::vec::Vec;
use core::mem::MaybeUninit;
use core::ops::Range;

use super::{Cursor, PeerError};
use crate::limits::{EMPTY_LINES_MAX, HEADER_COUNT_MAX, METHOD_BYTES_MAX};

/// Finds the end of a head as its bytes come, and refuses what httparse would let pass or would wait on: bare CR and
/// LF, control bytes, folded lines. The verdict falls at the first byte that decides it, so no split changes it.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Where the request line begins: behind the empty lines that were skipped.
    start: usize,
    empty_lines: u32,
    /// Lines that have ended, request line included.
    lines: usize,
}

impl Scan {
    /// Goes on from `cursor.scanned`; `cursor.parsed` is the beginning of the line under way. Returns where the head
    /// lies once its empty line has come.
    pub(super) fn find_end(
        &mut self,
        cursor: &mut Cursor,
        buffer: &[u8],
        head_bytes_max: u32,
    ) -> Result<Option<Range<usize>>, PeerError> {
        loop {
            let window_end = self.start.saturating_add(head_bytes_max as usize);
            let window = &buffer[..buffer.len().min(window_end)];
            let at_line_begin = cursor.scanned == cursor.parsed;
            if at_line_begin && self.lines > 0 && matches!(window.get(cursor.parsed), Some(b' ' | b'\t')) {
                return Err(PeerError::FoldedField);
            }
            let Some(at) = find_control(&window[cursor.scanned..]).map(|ahead| cursor.scanned + ahead) else {
                cursor.scanned = window.len();
                return self.want_more(buffer.len() >= window_end, head_bytes_max);
            };
            match (window[at], window.get(at + 1)) {
                (b'\t', _) => cursor.scanned = at + 1,
                (b'\r', Some(b'\n')) => {
                    let empty = at == cursor.parsed;
                    // What speaks another protocol is told at its first line, not left to wait for the head's end.
                    if !empty && self.lines == 0 && !ends_in_version(&window[self.start..at]) {
                        return Err(PeerError::RequestLine);
                    }
                    *cursor = Cursor { parsed: at + 2, scanned: at + 2 };
                    if self.end_line(empty, at + 2)? {
                        return Ok(Some(self.start..at + 2));
                    }
                }
                (b'\r', None) => {
                    cursor.scanned = at;
                    return self.want_more(buffer.len() >= window_end, head_bytes_max);
                }
                (b'\r', Some(_)) => return Err(PeerError::BareCr),
                (b'\n', _) => return Err(PeerError::BareLf),
                (byte, _) => return Err(PeerError::ControlByte { byte }),
            }
        }
    }

    /// Returns whether a byte of the head itself is there, so that its deadline runs. Empty lines, and the CR that
    /// may become one, belong to the idle time before it.
    pub(super) fn has_begun(&self, buffer: &[u8]) -> bool {
        buffer.get(self.start).is_some_and(|&byte| byte != b'\r')
    }

    /// Returns whether the request line began as a HEAD request: its answer has no body, whatever is wrong with it.
    pub(super) fn is_head_method(&self, buffer: &[u8]) -> bool {
        buffer.get(self.start..).is_some_and(|rest| rest.starts_with(b"HEAD "))
    }

    /// Counts a line that ended before `next`; true if it ended the head.
    fn end_line(&mut self, empty: bool, next: usize) -> Result<bool, PeerError> {
        if empty && self.lines > 0 {
            return Ok(true);
        }
        if empty {
            self.start = next;
            self.empty_lines += 1;
            return if self.empty_lines > EMPTY_LINES_MAX { Err(PeerError::EmptyLines) } else { Ok(false) };
        }
        self.lines += 1;
        if self.lines > 1 + HEADER_COUNT_MAX { Err(PeerError::TooManyFields) } else { Ok(false) }
    }

    fn want_more(&self, full: bool, limit: u32) -> Result<Option<Range<usize>>, PeerError> {
        match (full, self.lines) {
            (false, _) => Ok(None),
            (true, 0) => Err(PeerError::RequestLineTooLong { limit }),
            (true, _) => Err(PeerError::HeadTooLarge { limit }),
        }
    }
}

/// How the body of a request is delimited (RFC 9112 §6.3). No framing field means no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyKind {
    Chunked,
    /// In bytes.
    Length(u64),
}

/// What one parsed head said, as offsets into the driver's buffer. Kept from request to request for its allocation.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) fields: Vec<Field>,
    pub(super) method: Span,
    pub(super) path: Span,
    pub(super) query: Span,
    pub(super) body: BodyKind,
    pub(super) http11: bool,
    /// The request wants the connection to go on.
    pub(super) keep_alive: bool,
    /// The answer has no body bytes.
    pub(super) is_head_method: bool,
    /// The peer waits for `100 Continue`.
    pub(super) expects_continue: bool,
}

impl Head {
    pub(super) const fn new() -> Self {
        Self {
            fields: Vec::new(),
            method: Span::EMPTY,
            path: Span::EMPTY,
            query: Span::EMPTY,
            body: BodyKind::Length(0),
            http11: true,
            keep_alive: false,
            is_head_method: false,
            expects_continue: false,
        }
    }

    /// Reads the head at `at`, which [`Scan::find_end`] found complete.
    pub(super) fn parse(&mut self, buffer: &[u8], at: Range<usize>) -> Result<(), PeerError> {
        let bytes = &buffer[at];
        let mut slots = [const { MaybeUninit::uninit() }; HEADER_COUNT_MAX];
        let mut request = httparse::Request::new(&mut []);
        match request.parse_with_uninit_headers(bytes, &mut slots) {
            Ok(httparse::Status::Complete(count)) if count == bytes.len() => {}
            // The scan and httparse disagree about the end: refuse, never wait for more.
            Ok(_) => return Err(PeerError::RequestLine),
            Err(error) => return Err(blame(error, bytes)),
        }
        let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version)
        else {
            return Err(PeerError::RequestLine);
        };
        if method.len() > METHOD_BYTES_MAX as usize {
            return Err(PeerError::MethodTooLong);
        }
        let (path, query) = split_target(method, target)?;
        self.method = Span::of(buffer, method.as_bytes());
        self.path = Span::of(buffer, path);
        self.query = Span::of(buffer, query);
        self.http11 = minor == 1;
        self.is_head_method = method == "HEAD";

        let mut facts = Facts::default();
        self.fields.clear();
        for header in request.headers.iter() {
            let name = header.name.as_bytes();
            self.fields.push(Field { name: Span::of(buffer, name), value: Span::of(buffer, header.value) });
            facts.note(name, header.value);
        }
        facts.check_host(self.http11)?;
        self.body = facts.body(self.http11)?;
        if facts.other_expectation && self.http11 {
            return Err(PeerError::Expectation);
        }
        self.keep_alive = !facts.close && (self.http11 || facts.keep_alive);
        self.expects_continue = facts.expects_continue && self.http11 && self.body != BodyKind::Length(0);
        Ok(())
    }
}

/// A header field, as offsets into the driver's buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub(super) name: Span,
    pub(super) value: Span,
}

/// A range of the driver's buffer. `u32`, as a head ends below `HEAD_BYTES_CEILING` plus the skipped lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    start: u32,
    end: u32,
}

impl Span {
    const EMPTY: Self = Self { start: 0, end: 0 };

    /// Locates `part`, a piece of `buffer`. A piece of anything else gives a span that [`Self::bytes`] does not find.
    fn of(buffer: &[u8], part: &[u8]) -> Self {
        if part.is_empty() {
            return Self::EMPTY;
        }
        let start = part.as_ptr().addr().wrapping_sub(buffer.as_ptr().addr());
        let narrow = |offset: usize| u32::try_from(offset).unwrap_or(u32::MAX);
        Self { start: narrow(start), end: narrow(start.wrapping_add(part.len())) }
    }

    /// Returns the bytes, or `None` if this is not the buffer that was parsed.
    pub(super) fn bytes(self, buffer: &[u8]) -> Option<&[u8]> {
        buffer.get(self.start as usize..self.end as usize)
    }
}

/// What the fields that matter to framing said, gathered over the whole head: no rule depends on their order.
#[derive(Default)]
struct Facts<'b> {
    hosts: u32,
    host: &'b [u8],
    lengths: u32,
    length: &'b [u8],
    codings: u32,
    coding: &'b [u8],
    close: bool,
    keep_alive: bool,
    expects_continue: bool,
    other_expectation: bool,
}

impl<'b> Facts<'b> {
    fn note(&mut self, name: &[u8], value: &'b [u8]) {
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => {
                self.hosts += 1;
                self.host = value;
            }
            6 if name.eq_ignore_ascii_case(b"expect") => {
                for member in list_members(value) {
                    let known = member.eq_ignore_ascii_case(b"100-continue");
                    self.expects_continue |= known;
                    self.other_expectation |= !known;
                }
            }
            10 if name.eq_ignore_ascii_case(b"connection") => {
                for option in list_members(value) {
                    self.close |= option.eq_ignore_ascii_case(b"close");
                    self.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                }
            }
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                self.lengths += 1;
                self.length = value;
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                self.codings += 1;
                self.coding = value;
            }
            _ => {}
        }
    }

    /// RFC 9112 §3.2: exactly one in HTTP/1.1, at most one before.
    fn check_host(&self, http11: bool) -> Result<(), PeerError> {
        match self.hosts {
            0 if http11 => Err(PeerError::HostMissing),
            0 => Ok(()),
            1 if is_authority(self.host) => Ok(()),
            1 => Err(PeerError::Host),
            2.. => Err(PeerError::HostRepeated),
        }
    }

    fn body(&self, http11: bool) -> Result<BodyKind, PeerError> {
        match (self.codings, self.lengths) {
            (0, 0) => Ok(BodyKind::Length(0)),
            (0, 1) => decimal(self.length).map(BodyKind::Length).ok_or(PeerError::ContentLength),
            (0, 2..) => Err(PeerError::LengthRepeated),
            (1.., 1..) => Err(PeerError::LengthAndCoding),
            (2.., 0) => Err(PeerError::TransferCodingRepeated),
            (1, 0) if !http11 => Err(PeerError::TransferCodingHttp10),
            (1, 0) if self.coding.eq_ignore_ascii_case(b"chunked") => Ok(BodyKind::Chunked),
            (1, 0) => Err(blame_coding(self.coding)),
        }
    }
}

/// Says what is wrong with a `Transfer-Encoding` that is not exactly `chunked`. RFC 9112 §6.1 and §6.3: a coding we
/// do not know is 501, but only where a final, single `chunked` still tells where the body ends.
fn blame_coding(coding: &[u8]) -> PeerError {
    let is_chunked = |member: &&[u8]| member.eq_ignore_ascii_case(b"chunked");
    let ends_in_chunked = list_members(coding).last().as_ref().is_some_and(is_chunked);
    let known_only = list_members(coding).all(|member| is_chunked(&member));
    let once = list_members(coding).filter(is_chunked).count() == 1;
    if ends_in_chunked && once && !known_only {
        PeerError::TransferCoding
    } else {
        PeerError::TransferCodingFraming
    }
}

fn blame(error: httparse::Error, head: &[u8]) -> PeerError {
    match error {
        httparse::Error::HeaderName => PeerError::FieldName,
        httparse::Error::HeaderValue => PeerError::FieldValue,
        httparse::Error::TooManyHeaders => PeerError::TooManyFields,
        httparse::Error::Version if has_three_parts(head) => PeerError::Version,
        httparse::Error::NewLine
        | httparse::Error::Status
        | httparse::Error::Token
        | httparse::Error::Version => PeerError::RequestLine,
    }
}

/// Whether a request line's last part is ` HTTP/` and a version of RFC 9112 §2.3, any one.
fn ends_in_version(line: &[u8]) -> bool {
    matches!(line.last_chunk(), Some([b' ', b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9']))
}

/// Whether the version is what httparse refused (505), not a third space before it (400).
fn has_three_parts(head: &[u8]) -> bool {
    head.iter().take_while(|&&byte| byte != b'\r').filter(|&&byte| byte == b' ').count() == 2
}

/// Splits a request target (RFC 9112 §3.2) into path and query. An absolute form without a path has an empty one.
fn split_target<'t>(method: &str, target: &'t str) -> Result<(&'t [u8], &'t [u8]), PeerError> {
    let target = target.as_bytes();
    if method == "CONNECT" {
        return Err(PeerError::Connect);
    }
    if target == b"*" && method == "OPTIONS" {
        return Ok((target, b""));
    }
    // httparse has refused spaces and control bytes. What else RFC 3986 excludes (`"<>\^{|}` and the backquote) is
    // let through, since browsers send it; a fragment and raw non-ASCII are not.
    if target.iter().any(|&byte| byte == b'#' || !byte.is_ascii()) {
        return Err(PeerError::Target);
    }
    let local = if target.starts_with(b"/") { target } else { strip_origin(target)? };
    match local.iter().position(|&byte| byte == b'?') {
        Some(mark) => Ok((&local[..mark], &local[mark + 1..])),
        None => Ok((local, b"")),
    }
}

/// Removes scheme and authority from an absolute form (RFC 9112 §3.2.2).
fn strip_origin(target: &[u8]) -> Result<&[u8], PeerError> {
    let rest = [b"http://".as_slice(), b"https://"].into_iter().find_map(|scheme| {
        let (head, rest) = target.split_at_checked(scheme.len())?;
        head.eq_ignore_ascii_case(scheme).then_some(rest)
    });
    let rest = rest.ok_or(PeerError::Target)?;
    let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?')).unwrap_or(rest.len());
    let (authority, local) = rest.split_at(end);
    if authority.is_empty() || !is_authority(authority) { Err(PeerError::Target) } else { Ok(local) }
}

/// Whether this is `uri-host [ ":" port ]` (RFC 9110 §7.2), which may be empty. No user information. Nothing is looked
/// up by it, so an IP literal is judged by its alphabet only, and a port by its digits.
fn is_authority(value: &[u8]) -> bool {
    let (host, port) = match value {
        [b'[', rest @ ..] => {
            let Some(end) = rest.iter().position(|&byte| byte == b']') else { return false };
            let (literal, after) = (&rest[..end], &rest[end + 1..]);
            if literal.is_empty() || !literal.iter().all(|&byte| is_host_byte(byte) || byte == b':') {
                return false;
            }
            (b"".as_slice(), after)
        }
        _ => value.split_at(value.iter().position(|&byte| byte == b':').unwrap_or(value.len())),
    };
    let port_fits = match port {
        [] => true,
        [b':', digits @ ..] => digits.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    port_fits && is_registered_name(host)
}

/// RFC 3986 §3.2.2 `reg-name`, which IPv4 addresses are spelled in too.
fn is_registered_name(mut name: &[u8]) -> bool {
    loop {
        name = match name {
            [] => return true,
            [b'%', high, low, rest @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => rest,
            [byte, rest @ ..] if is_host_byte(*byte) => rest,
            _ => return false,
        };
    }
}

/// RFC 3986 §2.2 and §2.3: `unreserved / sub-delims`.
const fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'-' | b'.'
                | b'_'
                | b'~'
                | b'!'
                | b'$'
                | b'&'
                | b'\''
                | b'('
                | b')'
                | b'*'
                | b'+'
                | b','
                | b';'
                | b'='
        )
}

/// Reads `1*DIGIT`. A number beyond `u64` saturates: it is over every limit, and a valid one.
fn decimal(value: &[u8]) -> Option<u64> {
    if value.is_empty() {
        return None;
    }
    value.iter().try_fold(0_u64, |number, &byte| {
        byte.is_ascii_digit().then(|| number.saturating_mul(10).saturating_add(u64::from(byte - b'0')))
    })
}

/// Returns the members of a comma-separated list, empty ones left out (RFC 9110 §5.6.1).
fn list_members(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&byte| byte == b',').map(trim_ows).filter(|member| !member.is_empty())
}

/// Removes SP and HTAB, nothing else, from both ends.
fn trim_ows(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// Whether `byte` may be part of a token (RFC 9110 §5.6.2).
pub(super) const fn is_token_byte(byte: u8) -> bool {
    TOKEN_BYTES[byte as usize]
}

/// Whether `byte` may be part of a field value (RFC 9110 §5.5): visible, space, tab, or beyond ASCII.
pub(super) const fn is_value_byte(byte: u8) -> bool {
    !is_control(byte) || byte == b'\t'
}

const fn is_control(byte: u8) -> bool {
    byte < b' ' || byte == 0x7f
}

/// Finds the first control byte, eight bytes at a time: a byte below 0x20 borrows into its top bit, as a byte equal to
/// 0x7f does after the exclusive or. Borrows spread upwards only, so the lowest mark is exact.
pub(super) fn find_control(bytes: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    const TOPS: u64 = ONES << 7;
    let (words, tail) = bytes.as_chunks::<8>();
    for (index, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let deletes = word ^ (ONES * 0x7f);
        let low = word.wrapping_sub(ONES * 0x20) & !word;
        let marks = (low | (deletes.wrapping_sub(ONES) & !deletes)) & TOPS;
        if marks != 0 {
            return Some(index * 8 + marks.trailing_zeros() as usize / 8);
        }
    }
    let found = tail.iter().position(|&byte| is_control(byte))?;
    Some(words.len() * 8 + found)
}

const TOKEN_BYTES: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 128_u8 {
        let delimiter = matches!(
            byte,
            b'"' | b'(' | b')' | b',' | b'/' | b':'..=b'@' | b'[' | b'\\' | b']' | b'{' | b'}'
        );
        table[byte as usize] = byte > b' ' && byte < 0x7f && !delimiter;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_control_agrees_with_a_plain_search_at_every_offset() {
        for byte in 0..=u8::MAX {
            for at in 0..20 {
                for fill in [b' ', b'~', 0x80, 0xff] {
                    let mut bytes = [fill; 20];
                    bytes[at] = byte;
                    let plain = bytes.iter().position(|&byte| byte < 0x20 || byte == 0x7f);
                    assert_eq!(find_control(&bytes), plain, "byte {byte:#x} at {at} in {fill:#x}");
                    bytes[19] = 0;
                    let plain = bytes.iter().position(|&byte| byte < 0x20 || byte == 0x7f);
                    assert_eq!(find_control(&bytes), plain, "byte {byte:#x} at {at} before NUL");
                }
            }
        }
    }

    #[test]
    fn token_bytes_are_those_of_rfc_9110() {
        for byte in 0..=u8::MAX {
            let expected = byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            assert_eq!(is_token_byte(byte), expected, "{byte:#x}");
        }
    }

    #[test]
    fn authorities() {
        let rows: [(&[u8], bool); 22] = [
            (b"", true),
            (b"a", true),
            (b"a.b-c_d~e", true),
            (b"a:80", true),
            (b"a:", true),
            (b"a:99999999999", true),
            (b"127.0.0.1:8000", true),
            (b"[::1]", true),
            (b"[::1]:8000", true),
            (b"[v1.a:b]", true),
            (b"a%20b", true),
            (b"a%2", false),
            (b"a%zz", false),
            (b"a b", false),
            (b"a, b", false),
            (b"a/b", false),
            (b"user@a", false),
            (b"a:b", false),
            (b"a:1:2", false),
            (b"[]", false),
            (b"[::1", false),
            (b"[::1]x", false),
        ];
        for (value, expected) in rows {
            assert_eq!(is_authority(value), expected, "{}", value.escape_ascii());
        }
    }

    #[test]
    fn decimals() {
        let rows: [(&[u8], Option<u64>); 9] = [
            (b"0", Some(0)),
            (b"003", Some(3)),
            (b"18446744073709551615", Some(u64::MAX)),
            (b"18446744073709551616", Some(u64::MAX)),
            (b"", None),
            (b"+5", None),
            (b"5 ", None),
            (b"0x5", None),
            (b"5,5", None),
        ];
        for (value, expected) in rows {
            assert_eq!(decimal(value), expected, "{}", value.escape_ascii());
        }
    }
}
