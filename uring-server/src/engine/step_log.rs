//! One record per step, shared by every request of the step and never copied.

use std::sync::Arc;

use uring_serve_core::metrics::StepRecord;

/// Steps gathered before they are shared.
const SLICE_STEPS_MAX: usize = 64;

/// The newest steps, not yet shared. A slice is frozen when it is full or when a traced sequence ends; every traced
/// sequence running then gets the same `Arc`.
#[derive(Debug)]
pub(super) struct StepLog {
    open: Vec<StepRecord>,
}

impl Default for StepLog {
    fn default() -> Self {
        Self { open: Vec::with_capacity(SLICE_STEPS_MAX) }
    }
}

impl StepLog {
    /// Adds a finished step.
    pub(super) fn push(&mut self, record: StepRecord) {
        self.open.push(record);
    }

    /// Returns whether the open slice must be frozen before the next step.
    pub(super) fn is_full(&self) -> bool {
        self.open.len() >= SLICE_STEPS_MAX
    }

    /// Forgets the open slice.
    pub(super) fn clear(&mut self) {
        self.open.clear();
    }

    /// Closes the open slice; `None` when it is empty.
    pub(super) fn freeze(&mut self) -> Option<Arc<[StepRecord]>> {
        if self.open.is_empty() {
            return None;
        }
        let slice = Arc::from(self.open.as_slice());
        self.open.clear();
        Some(slice)
    }
}
