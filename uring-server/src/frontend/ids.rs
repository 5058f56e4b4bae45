//! Response ids and sampling seeds: unpredictable enough to be unique, from one seed so that a test can replay them. And
//! the hash of exchange serials.

use std::hash::Hasher;

/// A splitmix64 generator (Steele, Lea, Flood 2014).
#[derive(Debug)]
pub(super) struct IdSource {
    state: u64,
}

impl IdSource {
    /// Starts at a seed; two rings of one process must not get the same.
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns the number behind the next response's id.
    pub(super) fn next_id(&mut self) -> u128 {
        u128::from(self.next()) << 64 | u128::from(self.next())
    }

    /// Returns the seed of a request that names none.
    pub(super) fn next_seed(&mut self) -> u64 {
        self.next()
    }

    /// Returns an `x-request-id`.
    pub(super) fn next_request_id(&mut self) -> [u8; 16] {
        let number = self.next();
        std::array::from_fn(|at| b"0123456789abcdef"[(number >> (60 - 4 * at)) as usize & 15])
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// Hashes exchange serials, which this process counts up itself: nobody can choose ones that collide.
#[derive(Debug, Default)]
pub(super) struct SerialHasher(u64);

impl Hasher for SerialHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, serial: u64) {
        self.0 = (self.0 ^ serial).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        // A table looks at the lowest bits and at the highest seven.
        self.0 ^ (self.0 >> 32)
    }
}
