//! A JSON reader that shares nothing with the writer: RFC 8259, and nothing that it leaves open.

use alloc::string::String;
use alloc::vec::Vec;

/// A member's value: text decoded, all others as they stand.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Value {
    Other(Vec<u8>),
    Text(String),
}

/// Reads one object and returns its members, or `None` if `text` is anything but exactly that.
pub(super) fn read_object(text: &[u8]) -> Option<Vec<(String, Value)>> {
    let mut reader = Reader { rest: text };
    let members = reader.object(0)?;
    reader.rest.is_empty().then_some(members)
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: u32) -> Option<Value> {
        let start = self.rest;
        match start.first()? {
            b'"' => return self.text().map(Value::Text),
            b'{' => drop(self.object(depth)?),
            b'[' => self.list(depth)?,
            b'n' => self.expect(b"null")?,
            b't' => self.expect(b"true")?,
            b'f' => self.expect(b"false")?,
            _ => self.number()?,
        }
        let length = start.len() - self.rest.len();
        Some(Value::Other(start[..length].into()))
    }

    fn object(&mut self, depth: u32) -> Option<Vec<(String, Value)>> {
        let mut members = Vec::new();
        self.items(depth, [b'{', b'}'], |reader| {
            let key = reader.text()?;
            reader.expect(b":")?;
            members.push((key, reader.value(depth + 1)?));
            Some(())
        })?;
        Some(members)
    }

    fn list(&mut self, depth: u32) -> Option<()> {
        self.items(depth, [b'[', b']'], |reader| reader.value(depth + 1).map(drop))
    }

    fn items(
        &mut self,
        depth: u32,
        [open, close]: [u8; 2],
        mut item: impl FnMut(&mut Self) -> Option<()>,
    ) -> Option<()> {
        self.expect(&[open])?;
        if depth == DEPTH_MAX {
            return None;
        }
        if self.expect(&[close]).is_some() {
            return Some(());
        }
        loop {
            item(self)?;
            if self.expect(b",").is_none() {
                return self.expect(&[close]);
            }
        }
    }

    fn text(&mut self) -> Option<String> {
        self.expect(b"\"")?;
        let mut units = Vec::new();
        loop {
            match self.take()? {
                b'"' => return String::from_utf16(&units).ok(),
                b'\\' => units.push(self.escape()?),
                byte @ b' '..=b'~' => units.push(byte.into()),
                _ => return None,
            }
        }
    }

    fn escape(&mut self) -> Option<u16> {
        Some(match self.take()? {
            b'u' => {
                let mut unit = 0;
                for _ in 0..4 {
                    unit = unit << 4 | char::from(self.take()?).to_digit(16)?;
                }
                u16::try_from(unit).ok()?
            }
            b'b' => 0x08,
            b'f' => 0x0c,
            b'n' => 0x0a,
            b'r' => 0x0d,
            b't' => 0x09,
            byte @ (b'"' | b'\\' | b'/') => byte.into(),
            _ => return None,
        })
    }

    /// `[-] int [frac]`; the writer never uses an exponent.
    fn number(&mut self) -> Option<()> {
        let _ = self.expect(b"-");
        let whole = self.digits()?;
        if whole.len() > 1 && whole[0] == b'0' {
            return None;
        }
        if self.expect(b".").is_some() {
            self.digits()?;
        }
        Some(())
    }

    fn digits(&mut self) -> Option<&'a [u8]> {
        let count = self.rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let digits;
        (digits, self.rest) = self.rest.split_at(count);
        (count > 0).then_some(digits)
    }

    fn take(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    fn expect(&mut self, text: &[u8]) -> Option<()> {
        self.rest = self.rest.strip_prefix(text)?;
        Some(())
    }
}

/// Deeper than any line is.
const DEPTH_MAX: u32 = 16;
