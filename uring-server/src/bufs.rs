//! The provided buffer ring: memory that the kernel fills, lent to this thread one buffer at a time.

use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::Submitter;
use io_uring::types::BufRingEntry;

/// Sizes of a buffer ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// How many buffers; a power of two, at most 32,768.
    pub(crate) count: u16,
    /// Bytes of each, at least 1.
    pub(crate) bytes: u32,
}

/// A filled buffer. It belongs to the holder until [`BufRing::give_back`]; there is one lease per buffer.
#[derive(Debug)]
#[must_use = "a lease that is dropped is lost to the kernel"]
pub(crate) struct Lease {
    id: u16,
    len: u32,
}

/// All buffers of one ring, group 0.
#[derive(Debug)]
pub(crate) struct BufRing {
    /// `count` entries shared with the kernel, which reads them up to the tail.
    entries: Map,
    /// `count` times `bytes`.
    memory: Map,
    shape: Shape,
    tail: u16,
    /// Which buffers are leased; all others are the kernel's.
    leased: Vec<bool>,
}

impl BufRing {
    /// The buffer group of every receive.
    pub(crate) const GROUP: u16 = 0;

    /// Maps the memory, registers it and gives every buffer to the kernel.
    pub(crate) fn new(submitter: &Submitter<'_>, shape: Shape) -> io::Result<Self> {
        let count = usize::from(shape.count);
        if !shape.count.is_power_of_two() || shape.bytes == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let entries = Map::new(count * size_of::<BufRingEntry>())?;
        let memory = Map::new(count * shape.bytes as usize)?;
        let address = entries.start.as_ptr() as u64;
        // SAFETY: `entries` is a page-aligned mapping of that many entries. This value owns it until `unregister`,
        // which `Ring::drop` calls before any field of the ring is dropped.
        unsafe { submitter.register_buf_ring_with_flags(address, shape.count, Self::GROUP, 0)? };
        let mut bufs = Self { entries, memory, shape, tail: 0, leased: vec![false; count] };
        for id in 0..shape.count {
            bufs.push(id);
        }
        bufs.publish();
        Ok(bufs)
    }

    /// Takes the memory back from the kernel.
    pub(crate) fn unregister(submitter: &Submitter<'_>) -> io::Result<()> {
        submitter.unregister_buf_ring(Self::GROUP)
    }

    /// Leases the buffer that a completion names; `None` when it cannot be so (the kernel is a caller too).
    pub(crate) fn lease(&mut self, id: u16, len: u32) -> Option<Lease> {
        let leased = self.leased.get_mut(usize::from(id)).filter(|leased| !**leased)?;
        if len > self.shape.bytes {
            return None;
        }
        *leased = true;
        Some(Lease { id, len })
    }

    /// Returns the received bytes.
    pub(crate) fn bytes_mut(&mut self, lease: &Lease) -> &mut [u8] {
        let offset = usize::from(lease.id) * self.shape.bytes as usize;
        debug_assert!(self.leased[usize::from(lease.id)]);
        // SAFETY: the mapping is ours. `lease` checked the id and length against it and marked the buffer as taken
        // from the kernel, which writes there again only after `give_back`; that consumes the lease, so not while
        // it is borrowed here. `&mut self` excludes a second slice.
        unsafe {
            let start = self.memory.start.as_ptr().add(offset);
            std::slice::from_raw_parts_mut(start, lease.len as usize)
        }
    }

    /// Gives the buffer to the kernel again.
    pub(crate) fn give_back(&mut self, lease: Lease) {
        self.leased[usize::from(lease.id)] = false;
        self.push(lease.id);
        self.publish();
    }

    fn push(&mut self, id: u16) {
        let position = usize::from(self.tail & (self.shape.count - 1));
        let offset = usize::from(id) * self.shape.bytes as usize;
        // SAFETY: `position < count` by the mask, so the entry lies in our mapping. The kernel does not read it until
        // `publish` moves the tail past it; at most `count` entries are ever unread, since each id is pushed only
        // when it is not the kernel's (`leased`). The tail, which shares entry 0, is not written by the setters.
        unsafe {
            let entry = &mut *self.entries.start.as_ptr().cast::<BufRingEntry>().add(position);
            entry.set_addr(self.memory.start.as_ptr().add(offset) as u64);
            entry.set_len(self.shape.bytes);
            entry.set_bid(id);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        // SAFETY: the tail lies in entry 0 of our mapping, aligned to 2 bytes, alive as long as `self`. Only this
        // thread writes it (the kernel reads), and no reference to the entry is alive here.
        let tail =
            unsafe { AtomicU16::from_ptr(BufRingEntry::tail(self.entries.start.as_ptr().cast()).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

/// An anonymous, zeroed, private mapping.
#[derive(Debug)]
struct Map {
    start: NonNull<u8>,
    bytes: usize,
}

impl Map {
    fn new(bytes: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping, at an address that the kernel chooses: it overlaps nothing. This value
        // owns it until `drop` unmaps it.
        let start = unsafe {
            libc::mmap(null_mut(), bytes, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping of exactly these bytes is ours since `new`. The kernel has let go of it: `Ring::drop`
        // unregisters the buffers first, and does not get here where that failed; where `BufRing::new` fails, the
        // kernel was never given it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
