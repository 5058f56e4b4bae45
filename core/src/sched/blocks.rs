//! Which KV block is whose: a free list, and the running sequences' tables one after the other.

use alloc::vec::Vec;
use core::ops::Range;

use super::BlockId;

/// All blocks of the device. Each is either free or in exactly one table.
///
/// The tables lie in one vector in the order in which their sequences started, so a table is known by where it lies
/// and only its length, which the sequence's sizes give, is needed to walk them. Invariant:
/// `free.len() + held.len() == block_count`; neither vector ever grows past what [`Self::new`] reserved.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Taken from the end, so that the block freed last, likely still in a cache, is used first.
    free: Vec<BlockId>,
    held: Vec<BlockId>,
}

impl Blocks {
    pub(super) fn new(block_count: u32) -> Self {
        Self {
            free: (0..block_count).rev().map(BlockId).collect(),
            held: Vec::with_capacity(block_count as usize),
        }
    }

    /// Appends a table of `count` blocks, or changes nothing if fewer are free.
    pub(super) fn take(&mut self, count: u32) -> bool {
        let Some(rest) = self.free.len().checked_sub(count as usize) else {
            return false;
        };
        self.held.extend(self.free.drain(rest..).rev());
        true
    }

    /// Starts a walk over all tables, first to last, that keeps some and frees the others.
    pub(super) fn sweep(&mut self) -> Sweep<'_> {
        Sweep { blocks: self, read: 0, kept: 0 }
    }

    /// Returns part of the tables' vector.
    pub(super) fn table(&self, at: Range<usize>) -> &[BlockId] {
        &self.held[at]
    }

    /// Returns where the next table will begin.
    pub(super) fn held_count(&self) -> usize {
        self.held.len()
    }

    pub(super) fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    #[cfg(test)]
    pub(super) fn capacities(&self) -> (usize, usize) {
        (self.free.capacity(), self.held.capacity())
    }
}

/// A walk in progress. `kept <= read <= held.len()`; tables not visited are kept.
pub(super) struct Sweep<'a> {
    blocks: &'a mut Blocks,
    read: usize,
    kept: usize,
}

impl Sweep<'_> {
    /// Keeps the next `count` blocks.
    pub(super) fn keep(&mut self, count: u32) {
        let end = self.read + count as usize;
        self.blocks.held.copy_within(self.read..end, self.kept);
        self.kept += count as usize;
        self.read = end;
    }

    /// Frees the next `count` blocks.
    pub(super) fn free(&mut self, count: u32) {
        let end = self.read + count as usize;
        self.blocks.free.extend(self.blocks.held[self.read..end].iter().rev());
        self.read = end;
    }
}

impl Drop for Sweep<'_> {
    fn drop(&mut self) {
        self.blocks.held.drain(self.kept..self.read);
    }
}
