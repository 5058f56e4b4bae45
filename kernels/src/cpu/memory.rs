//! Large zeroed arrays, and the one way in which the threads of a step share them.

use core::marker::PhantomData;
use core::ops::{Deref, DerefMut, Range};
use core::slice;
use std::io;

use memmap2::{MmapMut, MmapRaw};

use super::kernels::Block;

/// A fixed array of zeros at first, aligned to a page, that costs no memory until it is written.
///
/// The memory is an anonymous mapping: an allocator clears a zeroed block by hand when its alignment is above 16, which
/// would make an unused KV cache resident.
pub(super) struct Zeroed<T> {
    map: MmapRaw,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Plain> Zeroed<T> {
    /// Reserves `len` zeros.
    ///
    /// # Errors
    /// The system's, when the address space or the commit limit does not hold them.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // The system refuses a mapping of no bytes.
        let map = MmapMut::map_anon(bytes.max(1))?;
        Ok(Self { map: map.into(), len, values: PhantomData })
    }
}

impl<T: Plain> Deref for Zeroed<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `map` owns `len * size_of::<T>()` bytes (`new`), page-aligned and initialised to zero, until it is
        // dropped; `Plain` lets any bytes be a `T`; the result borrows `self`, and only `deref_mut` writes.
        unsafe { slice::from_raw_parts(self.map.as_ptr().cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Zeroed<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the result borrows `self` mutably, so nothing else sees the memory meanwhile.
        unsafe { slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.len) }
    }
}

/// A [`Zeroed`] array that several threads read and write in parts, kept apart by the callers' split of the work and by
/// the barrier between two operations.
pub(super) struct Shared<T> {
    array: Zeroed<T>,
}

impl<T: Plain> Shared<T> {
    /// Reserves `len` zeros.
    ///
    /// # Errors
    /// Those of [`Zeroed::new`].
    pub(super) fn new(len: usize) -> io::Result<Self> {
        Ok(Self { array: Zeroed::new(len)? })
    }

    /// Returns a part for reading.
    ///
    /// # Safety
    /// Until the result's last use, no thread writes inside `range`.
    ///
    /// # Panics
    /// If `range` is not inside the array.
    pub(super) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.array.len, "a part lies inside its array");
        // SAFETY: the assertion keeps the part inside the mapping, which `self.array` owns for as long as the result
        // borrows `self`; `Plain` lets any bytes be a `T`; that nobody writes it is the caller's promise.
        unsafe { slice::from_raw_parts(self.base().add(range.start), range.len()) }
    }

    /// Returns a part for writing.
    ///
    /// # Safety
    /// Until the result's last use, no thread reads or writes inside `range` but through it.
    ///
    /// # Panics
    /// If `range` is not inside the array.
    #[expect(
        clippy::mut_from_ref,
        reason = "threads share the array in parts; the caller proves its part its own"
    )]
    pub(super) unsafe fn write(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.array.len, "a part lies inside its array");
        // SAFETY: as in `read`; that the part is not aliased is the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.base().add(range.start), range.len()) }
    }

    /// Writes one value, for arrays whose neighbours belong to different threads.
    ///
    /// # Safety
    /// No other thread reads or writes the value at `index` at the same time.
    ///
    /// # Panics
    /// If there is no such value.
    pub(super) unsafe fn set(&self, index: usize, value: T) {
        assert!(index < self.array.len, "a value lies inside its array");
        // SAFETY: the assertion keeps the write inside the mapping, which `self.array` owns; that nobody else uses the
        // value is the caller's promise.
        unsafe { self.base().add(index).write(value) }
    }

    fn base(&self) -> *mut T {
        self.array.map.as_mut_ptr().cast()
    }
}

/// Types that every bit pattern is a value of.
///
/// # Safety
/// No padding, no invalid bit pattern, no destructor, and an alignment of at most a page.
pub(super) unsafe trait Plain: Copy + Send + Sync {}

// SAFETY: every byte is a number.
unsafe impl Plain for u8 {}
// SAFETY: every bit pattern is a number.
unsafe impl Plain for u16 {}
// SAFETY: every bit pattern is a number or a NaN.
unsafe impl Plain for f32 {}
// SAFETY: `repr(C)` of eight `i32` and two `f32`, all of alignment 4: no padding, and every bit pattern is a value.
unsafe impl Plain for Block {}
