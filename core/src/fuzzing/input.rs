//! Bytes → cases. A reader that has run dry goes on with zeros, so that every input is a case.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::metrics::{
    BlockCounts, Mark, Phase, Record, Status, StepRecord, StepSpans, StepTrace, Steps, TIMES, Times,
};
use crate::time::{ClockOffset, MonoNs, ReportNs};

/// What is left of an input.
pub(super) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(super) const fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    pub(super) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Returns a number below `limit`, which is at least 1.
    pub(super) fn below(&mut self, limit: u8) -> u8 {
        self.byte() % limit
    }

    pub(super) fn choose<'t, T>(&mut self, choices: &'t [T]) -> &'t T {
        &choices[usize::from(self.byte()) % choices.len()]
    }

    pub(super) fn maybe<T>(&mut self, read: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.flag() { Some(read(self)) } else { None }
    }

    /// Reads a number of 0 to 8 bytes, so that small ones are as likely as large ones, or one at an end of a range.
    pub(super) fn number(&mut self) -> u64 {
        match self.below(11) {
            9 => u64::MAX,
            10 => 1 << 63,
            count => (0..count).fold(0, |n, _| n << 8 | u64::from(self.byte())),
        }
    }

    pub(super) fn moment(&mut self) -> ReportNs {
        ReportNs::from_raw(self.number().cast_signed())
    }

    /// Reads at most 255 bytes.
    pub(super) fn bytes(&mut self) -> &'a [u8] {
        let count = usize::from(self.byte()).min(self.0.len());
        let bytes;
        (bytes, self.0) = self.0.split_at(count);
        bytes
    }

    pub(super) fn text(&mut self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    /// Takes the rest, whole and cut at up to 7 places; without a place, at every byte.
    pub(super) fn split(mut self) -> (&'a [u8], Vec<&'a [u8]>) {
        let count = self.below(8);
        let mut cuts: Vec<usize> =
            (0..count).map(|_| usize::from(u16::from_be_bytes([self.byte(), self.byte()]))).collect();
        let whole = self.0;
        if cuts.is_empty() {
            return (whole, whole.chunks(1).collect());
        }
        cuts.iter_mut().for_each(|cut| *cut %= whole.len() + 1);
        cuts.extend([0, whole.len()]);
        cuts.sort_unstable();
        (whole, cuts.windows(2).map(|pair| &whole[pair[0]..pair[1]]).collect())
    }

    /// Reads all of a record but its steps.
    pub(super) fn record(&mut self) -> Record {
        Record {
            phase: *self.choose(&[Phase::Ctx, Phase::Gen, Phase::Server]),
            request_id: self.maybe(Self::number),
            x_request_id: self.maybe(Self::text),
            // Half of them complete: of the others headers say nothing.
            status: self.maybe(|input| *input.choose(&Status::ALL)).unwrap_or_default(),
            times: self.times(),
            kv_cache_size: self.maybe(Self::number),
            first_iter: self.maybe(Self::number),
            last_iter: self.maybe(Self::number),
            blocks: self.maybe(Self::blocks),
            ctx_request_id: self.maybe(Self::number),
            disagg_request_id: self.maybe(Self::number),
            steps: Steps::default(),
        }
    }

    fn times(&mut self) -> Times {
        let mut times = Times::default();
        for field in &TIMES {
            times[field.mark] = self.maybe(Self::moment);
        }
        // A first token before the arrival is rare in life, and the other order rare in random numbers.
        if self.flag() {
            let after = times.arrival.and_then(|at| at.checked_add(self.number()));
            times[Mark::FirstToken] = after;
        }
        times
    }

    fn blocks(&mut self) -> BlockCounts {
        let mut count = || u32::try_from(self.number()).unwrap_or(u32::MAX);
        BlockCounts { total_allocated: count(), new_allocated: count(), reused: count(), missed: count() }
    }

    /// Reads steps as a worker's headers have them.
    pub(super) fn spans(&mut self) -> Steps {
        Steps::Spans { steps: self.span_list(), chunks: self.span_list() }
    }

    /// Reads a list in which no two neighbours have one number and no entry is empty: headers could not tell them.
    fn span_list(&mut self) -> Vec<StepSpans> {
        let mut list: Vec<StepSpans> = Vec::new();
        for _ in 0..self.below(8) {
            let number = self.number();
            let ns = [(); 4].map(|()| self.maybe(Self::number));
            let is_told = ns.iter().any(Option::is_some);
            if is_told && list.last().is_none_or(|last| last.number != number) {
                list.push(StepSpans { number, ns });
            }
        }
        list
    }

    /// Reads steps as the engine has them: in step order.
    pub(super) fn trace(&mut self) -> Steps {
        let mut iter = 0;
        let mut slices = Vec::new();
        for _ in 0..self.below(4) {
            let count = self.below(8);
            let slice: Arc<[StepRecord]> = (0..count)
                .map(|_| {
                    iter += 1 + u64::from(self.below(3));
                    self.step(iter)
                })
                .collect();
            slices.push(slice);
        }
        let chunk_iters = (0..u64::from(self.below(8))).collect();
        let decode_iters = self.maybe(|input| (input.byte().into(), input.byte().into()));
        let clock = ClockOffset::from_raw(self.number().cast_signed());
        Steps::Shared { trace: StepTrace { slices, chunk_iters, decode_iters }, clock }
    }

    fn step(&mut self, iter: u64) -> StepRecord {
        StepRecord {
            iter,
            forward_start: MonoNs::from_raw(self.number()),
            forward_end: MonoNs::from_raw(self.number()),
            sample_end: MonoNs::from_raw(self.number()),
            gpu_forward_ns: self.maybe(Self::number),
            gpu_sample_ns: self.maybe(Self::number),
        }
    }
}
