//! What travels in `user_data`: operation, slot and generation, so that a late completion is recognised.

/// Which operation a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Multishot accept; the slot is the listener's index.
    Accept,
    /// Cancellation of a connection's operations.
    Cancel,
    /// Cancellation of a listener's accept.
    CancelAccept,
    /// Hang-up poll of a connection.
    Poll,
    /// Multishot receive.
    Recv,
    /// Send.
    Send,
    /// Poll of the waker's eventfd.
    Wake,
}

impl Op {
    const ALL: [Self; 7] =
        [Self::Accept, Self::Cancel, Self::CancelAccept, Self::Poll, Self::Recv, Self::Send, Self::Wake];
}

/// A slot and the generation of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// Index into the table.
    pub(crate) index: u32,
    /// Counts the tenants of that slot, modulo 2^24.
    pub(crate) generation: u32,
}

impl Key {
    /// Generations wrap here: a completion would have to be late by 16 million tenants of one slot to be mistaken.
    pub(crate) const GENERATIONS: u32 = 1 << 24;

    /// Names something that has no generations: a listener, the waker.
    pub(crate) const fn fixed(index: u32) -> Self {
        Self { index, generation: 0 }
    }
}

/// The decoded `user_data` of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// What was asked of the kernel.
    pub(crate) op: Op,
    /// For whom.
    pub(crate) key: Key,
}

impl Token {
    /// Returns the 64 bits for the submission: operation (8), generation (24), slot (32).
    pub(crate) fn as_raw(self) -> u64 {
        debug_assert!(self.key.generation < Key::GENERATIONS);
        (self.op as u64) << 56 | u64::from(self.key.generation) << 32 | u64::from(self.key.index)
    }

    /// Reads what [`Self::as_raw`] made; `None` for bits it cannot have made (the kernel is a caller too).
    pub(crate) fn from_raw(raw: u64) -> Option<Self> {
        let op = *Op::ALL.get((raw >> 56) as usize)?;
        let generation = (raw >> 32) as u32 & (Key::GENERATIONS - 1);
        Some(Self { op, key: Key { index: raw as u32, generation } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_survives_user_data() {
        for op in Op::ALL {
            for index in [0, 1, 0x8000_0000, u32::MAX] {
                for generation in [0, 1, Key::GENERATIONS - 1] {
                    let token = Token { op, key: Key { index, generation } };
                    assert_eq!(Token::from_raw(token.as_raw()), Some(token));
                }
            }
        }
    }

    #[test]
    fn an_unknown_operation_is_no_token() {
        let last = Op::ALL.len() as u64 - 1;
        assert!(Token::from_raw(last << 56).is_some());
        assert_eq!(Token::from_raw((last + 1) << 56), None);
        assert_eq!(Token::from_raw(u64::MAX), None);
    }
}
