//! One timer per slot in a hierarchical timing wheel: arming, disarming and firing are O(1).

use std::time::Duration;

use uring_serve_core::time::MonoNs;

/// Timers by slot index. A timer never fires early, and late by at most one tick (about 1 ms) plus the caller's turn.
#[derive(Debug)]
pub(crate) struct Wheel {
    /// Every timer due at or before this tick has been moved to `fired`.
    tick: u64,
    /// First node of each bucket's list.
    heads: [[u32; BUCKETS]; LEVELS],
    /// Which buckets of a level hold anything, one bit each.
    occupied: [u64; LEVELS],
    nodes: Vec<Node>,
}

/// Invariant: linked exactly if `armed`; then it is in the list of bucket `place`.
#[derive(Clone, Copy, Debug)]
struct Node {
    due: u64,
    previous: u32,
    next: u32,
    level: u8,
    bucket: u8,
    armed: bool,
}

impl Wheel {
    /// Creates a wheel for slot indices below `capacity`, starting at `now`.
    pub(crate) fn new(capacity: u32, now: MonoNs) -> Self {
        Self {
            tick: now.as_raw() >> TICK_BITS,
            heads: [[NONE; BUCKETS]; LEVELS],
            occupied: [0; LEVELS],
            nodes: Vec::with_capacity(capacity as usize),
        }
    }

    /// Arms the timer of `index` for `at`, or moves it there.
    pub(crate) fn arm(&mut self, index: u32, at: MonoNs) {
        if self.nodes.len() <= index as usize {
            self.nodes.resize(index as usize + 1, IDLE);
        }
        self.disarm(index);
        // Rounded up, so that the tick's end, not its begin, is past `at`.
        let due = (at.as_raw() >> TICK_BITS).saturating_add(1).max(self.tick + 1);
        self.link(index, due);
    }

    /// Disarms the timer of `index`, if it is armed.
    pub(crate) fn disarm(&mut self, index: u32) {
        let Some(node) = self.nodes.get(index as usize).copied().filter(|node| node.armed) else { return };
        let (level, bucket) = (usize::from(node.level), usize::from(node.bucket));
        if node.previous == NONE {
            self.heads[level][bucket] = node.next;
            if node.next == NONE {
                self.occupied[level] &= !(1 << bucket);
            }
        } else {
            self.nodes[node.previous as usize].next = node.next;
        }
        if node.next != NONE {
            self.nodes[node.next as usize].previous = node.previous;
        }
        self.nodes[index as usize].armed = false;
    }

    /// Moves time to `now` and appends the indices whose timers are due to `fired`; each is disarmed.
    pub(crate) fn poll_fired(&mut self, now: MonoNs, fired: &mut Vec<u32>) {
        let target = now.as_raw() >> TICK_BITS;
        while let Some(tick) = self.next_tick().filter(|tick| *tick <= target) {
            self.tick = tick;
            // All levels whose bucket opens at this tick, coarse ones first: they refill the finer ones.
            for level in (0..LEVELS).rev() {
                if tick.trailing_zeros() >= level as u32 * BUCKET_BITS {
                    self.open(level, fired);
                }
            }
        }
        self.tick = self.tick.max(target);
    }

    /// Returns how long after `now` [`Self::poll_fired`] has something to do; `None` when nothing is armed.
    pub(crate) fn poll_wait(&self, now: MonoNs) -> Option<Duration> {
        let tick = self.next_tick()?;
        let at = MonoNs::from_raw(tick << TICK_BITS);
        Some(at.checked_since(now).unwrap_or(Duration::ZERO))
    }

    /// Returns the tick at which the next occupied bucket opens.
    fn next_tick(&self) -> Option<u64> {
        let opens = |level: usize| {
            let shift = level as u32 * BUCKET_BITS;
            let unit = self.tick >> shift;
            // The bucket after the current one comes first; the current one itself is a whole round away.
            let turned = self.occupied[level].rotate_right((unit as u32 + 1) % BUCKETS as u32);
            (turned != 0).then(|| (unit + 1 + u64::from(turned.trailing_zeros())) << shift)
        };
        (0..LEVELS).filter_map(opens).min()
    }

    /// Empties the bucket of `level` that opens at the present tick.
    fn open(&mut self, level: usize, fired: &mut Vec<u32>) {
        let bucket = (self.tick >> (level as u32 * BUCKET_BITS)) as usize % BUCKETS;
        let mut index = self.heads[level][bucket];
        while index != NONE {
            let Node { next, due, .. } = self.nodes[index as usize];
            self.disarm(index);
            if due <= self.tick {
                fired.push(index);
            } else {
                self.link(index, due);
            }
            index = next;
        }
    }

    fn link(&mut self, index: u32, due: u64) {
        let distance = due - self.tick;
        let level = (0..LEVELS - 1)
            .find(|level| distance >> ((level + 1) as u32 * BUCKET_BITS) == 0)
            .unwrap_or(LEVELS - 1);
        let shift = level as u32 * BUCKET_BITS;
        // Past the last level's range: opened once a round, and linked again from there.
        let unit = (due >> shift).min((self.tick >> shift) + BUCKETS as u64);
        let bucket = unit as usize % BUCKETS;
        let next = self.heads[level][bucket];
        if next != NONE {
            self.nodes[next as usize].previous = index;
        }
        self.heads[level][bucket] = index;
        self.occupied[level] |= 1 << bucket;
        self.nodes[index as usize] =
            Node { due, previous: NONE, next, level: level as u8, bucket: bucket as u8, armed: true };
    }
}

const NONE: u32 = u32::MAX;
const IDLE: Node = Node { due: 0, previous: NONE, next: NONE, level: 0, bucket: 0, armed: false };
/// A tick is 2^20 ns, about 1.05 ms.
const TICK_BITS: u32 = 20;
const BUCKET_BITS: u32 = 6;
const BUCKETS: usize = 1 << BUCKET_BITS;
/// Reach of the levels: 67 ms, 4.3 s, 4.6 min, 4.9 h.
const LEVELS: usize = 4;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const TICK: u64 = 1 << TICK_BITS;

    #[test]
    fn a_timer_fires_once_and_not_early() {
        for after in [0, 1, TICK - 1, TICK, 63 * TICK, 64 * TICK, 65 * TICK, 5000 * TICK, 20_000_000 * TICK] {
            let start = 12_345_678_901;
            let mut wheel = Wheel::new(1, MonoNs::from_raw(start));
            wheel.arm(0, MonoNs::from_raw(start + after));
            let (mut now, mut fired) = (start, Vec::new());
            for _ in 0..200 {
                let wait = wheel.poll_wait(MonoNs::from_raw(now)).unwrap();
                now += wait.as_nanos() as u64;
                wheel.poll_fired(MonoNs::from_raw(now), &mut fired);
                if !fired.is_empty() {
                    break;
                }
            }
            assert_eq!(fired, [0], "after {after}");
            assert!(
                now >= start + after && now <= start + after + 2 * TICK,
                "after {after}: {}",
                now - start
            );
            assert_eq!(wheel.poll_wait(MonoNs::from_raw(now)), None);
        }
    }

    #[test]
    fn it_agrees_with_a_sorted_map() {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let mut now = 77 * TICK + 5;
        let mut wheel = Wheel::new(64, MonoNs::from_raw(now));
        let mut model: BTreeMap<u32, u64> = BTreeMap::new();
        for _ in 0..20_000 {
            let index = (random() % 64) as u32;
            match random() % 4 {
                0 => {
                    wheel.disarm(index);
                    model.remove(&index);
                }
                1 | 2 => {
                    let reach = [10, 100, 10_000, 1_000_000, 40_000_000][(random() % 5) as usize];
                    let at = now + random() % (reach * TICK);
                    wheel.arm(index, MonoNs::from_raw(at));
                    model.insert(index, at);
                }
                _ => {
                    now += random() % (TICK << (random() % 16));
                    let mut fired = Vec::new();
                    wheel.poll_fired(MonoNs::from_raw(now), &mut fired);
                    for index in &fired {
                        let at = model.remove(index).expect("fired only what is armed");
                        assert!(at <= now, "fired early");
                    }
                    assert!(model.values().all(|at| at + TICK > now), "a due timer was kept");
                }
            }
            let wait = wheel.poll_wait(MonoNs::from_raw(now)).map(|wait| now + wait.as_nanos() as u64);
            let first = model.values().min().map(|at| at + TICK);
            assert!(wait.is_none() == first.is_none());
            assert!(wait <= first, "sleeps past a timer");
        }
    }
}
