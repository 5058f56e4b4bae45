use core::ops::Range;

use super::head::{BodyKind, is_token_byte, is_value_byte};
use super::{Cursor, PeerError};
use crate::limits::{CHUNK_FRAMING_BYTES_MAX, CHUNK_LINE_BYTES_MAX, HEADER_COUNT_MAX, TRAILER_BYTES_MAX};

/// Finds the end of a body as its bytes come.
#[derive(Debug)]
pub(super) enum Body {
    Chunked(Chunked),
    Length {
        /// In the driver's buffer.
        end: usize,
    },
}

impl Body {
    /// Starts at `at`, the end of the head.
    pub(super) fn begin(kind: BodyKind, at: usize, limit: u32) -> Result<Self, PeerError> {
        match kind {
            BodyKind::Chunked => Ok(Self::Chunked(Chunked::new(at, limit))),
            BodyKind::Length(length) => match usize::try_from(length) {
                Ok(length) if length <= limit as usize => Ok(Self::Length { end: at.saturating_add(length) }),
                _ => Err(PeerError::BodyTooLarge { limit }),
            },
        }
    }

    /// Goes on from `cursor.scanned` and returns the body's range once it is complete; `cursor.parsed` is then the end
    /// of the message.
    pub(super) fn read(
        &mut self,
        cursor: &mut Cursor,
        buffer: &mut [u8],
    ) -> Result<Option<Range<usize>>, PeerError> {
        match self {
            Self::Chunked(chunked) => chunked.read(cursor, buffer),
            Self::Length { end } => {
                cursor.scanned = buffer.len().min(*end);
                if cursor.scanned < *end {
                    return Ok(None);
                }
                let body = cursor.parsed..*end;
                cursor.parsed = *end;
                Ok(Some(body))
            }
        }
    }
}

/// Decodes a chunked body in place (RFC 9112 §7.1): the data of later chunks moves down to that of the first, each byte
/// at most once and that of the first chunk never.
#[derive(Debug)]
pub(super) struct Chunked {
    wait: Wait,
    /// Decoded bytes lie here.
    data: Range<usize>,
    /// Size of the chunk under way, then what of it is still to come, in bytes.
    left: u64,
    size_digits: u32,
    framing_bytes: u32,
    trailer_bytes: u32,
    trailer_fields: usize,
    limit: u32,
}

/// What part of the grammar the next byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// chunk-size, at least one digit missing.
    Size,
    /// chunk-size, more digits possible.
    SizeMore,
    /// Whitespace that only `;` may end.
    ExtensionMark,
    ExtensionName,
    ExtensionNameMore,
    /// Whitespace that `=` or `;` may end.
    ExtensionEqual,
    ExtensionValue,
    ExtensionToken,
    ExtensionQuoted,
    ExtensionEscape,
    ExtensionQuotedEnd,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    /// A trailer field or the end.
    Trailer,
    TrailerName,
    TrailerValue,
    TrailerLf,
    EndLf,
    /// Nothing more.
    Done,
}

impl Wait {
    const fn is_trailer(self) -> bool {
        matches!(self, Self::Trailer | Self::TrailerName | Self::TrailerValue | Self::TrailerLf | Self::EndLf)
    }
}

impl Chunked {
    const fn new(at: usize, limit: u32) -> Self {
        Self {
            wait: Wait::Size,
            data: at..at,
            left: 0,
            size_digits: 0,
            framing_bytes: 0,
            trailer_bytes: 0,
            trailer_fields: 0,
            limit,
        }
    }

    fn read(&mut self, cursor: &mut Cursor, buffer: &mut [u8]) -> Result<Option<Range<usize>>, PeerError> {
        while self.wait != Wait::Done && cursor.scanned < buffer.len() {
            if self.wait == Wait::Data {
                self.take_data(cursor, buffer);
                continue;
            }
            let byte = buffer[cursor.scanned];
            cursor.scanned += 1;
            let before = self.wait;
            self.wait = self.take_framing(byte)?;
            self.count_framing(before, cursor.scanned - cursor.parsed)?;
            if self.wait == Wait::Data && self.data.is_empty() {
                self.data = cursor.scanned..cursor.scanned;
            }
            if matches!(self.wait, Wait::Size | Wait::Trailer | Wait::Done) {
                cursor.parsed = cursor.scanned;
            }
        }
        Ok((self.wait == Wait::Done).then(|| self.data.clone()))
    }

    fn take_data(&mut self, cursor: &mut Cursor, buffer: &mut [u8]) {
        let here = buffer.len() - cursor.scanned;
        let count = usize::try_from(self.left).unwrap_or(usize::MAX).min(here);
        if self.data.end != cursor.scanned {
            buffer.copy_within(cursor.scanned..cursor.scanned + count, self.data.end);
        }
        self.data.end += count;
        cursor.scanned += count;
        self.left -= count as u64;
        if self.left == 0 {
            self.wait = Wait::DataCr;
        }
    }

    /// Accounts for one byte that belonged to `part`; `line_bytes` is the length of its line so far.
    fn count_framing(&mut self, part: Wait, line_bytes: usize) -> Result<(), PeerError> {
        if part.is_trailer() {
            self.trailer_bytes += 1;
            let fits = self.trailer_bytes <= TRAILER_BYTES_MAX && self.trailer_fields <= HEADER_COUNT_MAX;
            return if fits { Ok(()) } else { Err(PeerError::TrailerTooLarge) };
        }
        self.framing_bytes += 1;
        if self.framing_bytes > CHUNK_FRAMING_BYTES_MAX {
            return Err(PeerError::ChunkFramingTooLarge);
        }
        let in_size_line = !matches!(part, Wait::DataCr | Wait::DataLf);
        if in_size_line && line_bytes > CHUNK_LINE_BYTES_MAX as usize {
            return Err(PeerError::ChunkLineTooLong);
        }
        Ok(())
    }

    /// Returns what follows `byte`. Every delimiter is compared; nothing is skipped unread.
    fn take_framing(&mut self, byte: u8) -> Result<Wait, PeerError> {
        match (self.wait, byte) {
            (Wait::Size | Wait::SizeMore, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => self.take_digit(byte),
            (Wait::SizeLf, b'\n') => self.end_size_line(),
            (Wait::DataCr, b'\r') => Ok(Wait::DataLf),
            (Wait::DataLf, b'\n') => {
                self.size_digits = 0;
                Ok(Wait::Size)
            }
            (Wait::DataCr | Wait::DataLf, _) => Err(PeerError::ChunkEnd),
            (
                Wait::SizeMore | Wait::ExtensionNameMore | Wait::ExtensionToken | Wait::ExtensionQuotedEnd,
                b'\r',
            ) => Ok(Wait::SizeLf),
            (Wait::SizeMore, b';') => Ok(Wait::ExtensionName),
            (Wait::SizeMore, b' ' | b'\t') => Ok(Wait::ExtensionMark),
            (Wait::Size | Wait::SizeMore | Wait::SizeLf, _) => Err(PeerError::ChunkSize),
            (wait, _) if wait.is_trailer() => self.take_trailer(byte),
            (wait, _) => extend(wait, byte).ok_or(PeerError::ChunkExtension),
        }
    }

    /// RFC 9112 §7.1 sets no bound on leading zeros; 16 digits are all that `u64` holds.
    fn take_digit(&mut self, byte: u8) -> Result<Wait, PeerError> {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            _ => (byte | 0x20) - b'a' + 10,
        };
        self.size_digits += 1;
        if self.size_digits > SIZE_DIGITS_MAX {
            return Err(PeerError::ChunkSize);
        }
        let shifted = self.left.checked_mul(16).ok_or(PeerError::ChunkSize)?;
        self.left = shifted | u64::from(digit);
        Ok(Wait::SizeMore)
    }

    fn end_size_line(&self) -> Result<Wait, PeerError> {
        let room = (self.limit as usize).saturating_sub(self.data.len());
        match self.left {
            0 => Ok(Wait::Trailer),
            size if size > room as u64 => Err(PeerError::BodyTooLarge { limit: self.limit }),
            _ => Ok(Wait::Data),
        }
    }

    /// Trailer fields are checked and dropped: none of them may change framing or routing (RFC 9110 §6.5.1).
    fn take_trailer(&mut self, byte: u8) -> Result<Wait, PeerError> {
        match (self.wait, byte) {
            (Wait::Trailer, b'\r') => Ok(Wait::EndLf),
            (Wait::EndLf, b'\n') => Ok(Wait::Done),
            (Wait::Trailer, byte) if is_token_byte(byte) => {
                self.trailer_fields += 1;
                Ok(Wait::TrailerName)
            }
            (Wait::TrailerName, b':') => Ok(Wait::TrailerValue),
            (Wait::TrailerName, byte) if is_token_byte(byte) => Ok(Wait::TrailerName),
            (Wait::TrailerValue, b'\r') => Ok(Wait::TrailerLf),
            (Wait::TrailerValue, byte) if is_value_byte(byte) => Ok(Wait::TrailerValue),
            (Wait::TrailerLf, b'\n') => Ok(Wait::Trailer),
            _ => Err(PeerError::Trailer),
        }
    }
}

/// `chunk-ext = *( BWS ";" BWS name [ BWS "=" BWS ( token / quoted-string ) ] )` (RFC 9112 §7.1.1), without the CR that
/// ends the line.
const fn extend(wait: Wait, byte: u8) -> Option<Wait> {
    match (wait, byte) {
        (Wait::ExtensionQuoted, b'"') => Some(Wait::ExtensionQuotedEnd),
        (Wait::ExtensionQuoted, b'\\') => Some(Wait::ExtensionEscape),
        (Wait::ExtensionQuoted | Wait::ExtensionEscape, _) if is_value_byte(byte) => {
            Some(Wait::ExtensionQuoted)
        }
        (
            Wait::ExtensionMark
            | Wait::ExtensionNameMore
            | Wait::ExtensionEqual
            | Wait::ExtensionToken
            | Wait::ExtensionQuotedEnd,
            b';',
        ) => Some(Wait::ExtensionName),
        (Wait::ExtensionNameMore | Wait::ExtensionEqual, b'=') => Some(Wait::ExtensionValue),
        (Wait::ExtensionMark | Wait::ExtensionToken | Wait::ExtensionQuotedEnd, b' ' | b'\t') => {
            Some(Wait::ExtensionMark)
        }
        (Wait::ExtensionName, b' ' | b'\t') => Some(Wait::ExtensionName),
        (Wait::ExtensionNameMore | Wait::ExtensionEqual, b' ' | b'\t') => Some(Wait::ExtensionEqual),
        (Wait::ExtensionValue, b' ' | b'\t') => Some(Wait::ExtensionValue),
        (Wait::ExtensionValue, b'"') => Some(Wait::ExtensionQuoted),
        (Wait::ExtensionName | Wait::ExtensionNameMore, _) if is_token_byte(byte) => {
            Some(Wait::ExtensionNameMore)
        }
        (Wait::ExtensionValue | Wait::ExtensionToken, _) if is_token_byte(byte) => Some(Wait::ExtensionToken),
        _ => None,
    }
}

const SIZE_DIGITS_MAX: u32 = u64::BITS / 4;
