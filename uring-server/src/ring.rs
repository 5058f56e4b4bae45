//! One io_uring: set-up with the reason of a failure, typed submissions and completions, one system call per turn.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

use crate::bufs::{BufRing, Lease, Shape};
use crate::counters::Counters;
use crate::token::{Key, Op, Token};

/// Sizes of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingShape {
    /// Submission queue entries.
    pub(crate) sq_entries: u32,
    /// Completion queue entries.
    pub(crate) cq_entries: u32,
    /// Connections, each with at most one send in flight.
    pub(crate) sends: u32,
    /// Receive buffers.
    pub(crate) buffers: Shape,
}

/// How long a turn waits for its first completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// As long as it takes.
    Forever,
    /// Not at all.
    Never,
    /// At most that long.
    UpTo(Duration),
}

/// One completion, with what it hands over.
#[derive(Debug)]
pub(crate) struct Completion {
    /// What it answers.
    pub(crate) token: Token,
    /// Bytes or events, or the error number.
    pub(crate) result: Result<u32, i32>,
    /// The operation is still armed and will complete again.
    pub(crate) more: bool,
    /// The received bytes; give it back.
    pub(crate) lease: Option<Lease>,
    /// The accepted socket.
    pub(crate) accepted: Option<OwnedFd>,
}

/// Bytes to send: `buffer[from..]`, at most `limit` of them.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) buffer: Vec<u8>,
    pub(crate) from: usize,
    pub(crate) limit: u32,
    /// Beside MSG_NOSIGNAL.
    pub(crate) flags: i32,
}

/// An io_uring that this thread alone submits to.
pub(crate) struct Ring {
    io: IoUring,
    /// Dropped by `drop` alone, once the kernel has let go of it.
    bufs: ManuallyDrop<BufRing>,
    /// Buffers of sends in flight with their generation, by connection slot. The kernel reads them until the send's
    /// completion.
    sends: Vec<Option<(u32, Vec<u8>)>>,
    /// Submissions for which the queue had no room although it was submitted (EBUSY).
    overflow: VecDeque<squeue::Entry>,
    counters: Arc<Counters>,
}

impl Ring {
    /// Makes the ring, checks what the kernel offers, and registers the receive buffers.
    ///
    /// The calling thread must be the one that submits.
    pub(crate) fn new(shape: RingShape, counters: Arc<Counters>) -> Result<Self, RingError> {
        let io: IoUring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_submit_all()
            .setup_cqsize(shape.cq_entries)
            .build(shape.sq_entries)
            .map_err(|error| RingError::from_setup(&error, disabled_sysctl()))?;
        if !io.params().is_feature_ext_arg() || !io.params().is_feature_nodrop() {
            return Err(RingError::OldKernel);
        }
        let mut probe = Probe::new();
        io.submitter().register_probe(&mut probe).map_err(|_| RingError::OldKernel)?;
        if let Some((name, _)) = REQUIRED.iter().find(|(_, code)| !probe.is_supported(*code)) {
            return Err(RingError::MissingOperation(name));
        }
        let bufs = BufRing::new(&io.submitter(), shape.buffers)
            .map_err(|error| RingError::Failed { what: "register receive buffers", error })?;
        let sends = std::iter::repeat_with(|| None).take(shape.sends as usize).collect();
        let mut ring = Self { io, bufs: ManuallyDrop::new(bufs), sends, overflow: VecDeque::new(), counters };
        // A kernel that refuses it costs 2 % of a request, no more.
        let _ = ring.io.split().0.register_ring_fd();
        Ok(ring)
    }

    /// Submits what is queued and waits for a completion: the one system call of a turn.
    pub(crate) fn submit_and_wait(&mut self, wait: Wait) -> Result<(), RingError> {
        self.push_overflow();
        let ready = !self.io.completion().is_empty();
        let queued = self.io.submission().len();
        if ready && queued == 0 {
            return Ok(());
        }
        self.counters.enters.add(1);
        let submitter = self.io.submitter();
        let entered = match wait {
            _ if ready => submitter.submit(),
            Wait::Forever => submitter.submit_and_wait(1),
            // SAFETY: no pointer is passed: neither signal set nor arguments.
            Wait::Never => unsafe {
                submitter.enter::<libc::sigset_t>(queued as u32, 0, ENTER_GETEVENTS, None)
            },
            Wait::UpTo(limit) => {
                let limit = Timespec::from(limit);
                submitter.submit_with_args(1, &SubmitArgs::new().timespec(&limit))
            }
        };
        let refused = entered.err().map_or(Ok(false), |error| match error.raw_os_error() {
            // The wait's own ends: a timeout, a signal.
            Some(libc::ETIME | libc::EINTR) => Ok(false),
            // Completions must be taken first, or memory is short: what was not submitted stays queued.
            Some(libc::EBUSY | libc::EAGAIN) => Ok(true),
            _ => Err(RingError::Failed { what: "enter the ring", error }),
        })?;
        if refused {
            self.counters.enters_refused.add(1);
        }
        if self.io.submission().cq_overflow() {
            self.counters.cq_overflow.add(1);
        }
        Ok(())
    }

    /// Moves up to `room` completions into `batch`, and returns whether some are left.
    pub(crate) fn take_completions(&mut self, batch: &mut VecDeque<Completion>, room: usize) -> bool {
        let Self { io, bufs, counters, .. } = self;
        let mut queue = io.completion();
        for entry in queue.by_ref().take(room) {
            match read_completion(&entry, bufs) {
                Some(completion) => batch.push_back(completion),
                None => counters.stale_completions.add(1),
            }
        }
        !queue.is_empty()
    }

    /// Arms a multishot accept.
    pub(crate) fn accept_many(&mut self, listener: RawFd, index: u32) {
        let entry = opcode::AcceptMulti::new(Fd(listener)).flags(libc::SOCK_CLOEXEC).build();
        self.push(entry, Op::Accept, Key::fixed(index));
    }

    /// Cancels a listener's multishot accept.
    pub(crate) fn cancel_accept(&mut self, index: u32) {
        let key = Key::fixed(index);
        let accept = Token { op: Op::Accept, key }.as_raw();
        self.push(opcode::AsyncCancel::new(accept).build(), Op::CancelAccept, key);
    }

    /// Arms a multishot receive into leased buffers.
    pub(crate) fn recv_many(&mut self, socket: RawFd, key: Key) {
        self.push(opcode::RecvMulti::new(Fd(socket), BufRing::GROUP).build(), Op::Recv, key);
    }

    /// Cancels a connection's multishot receive.
    pub(crate) fn cancel_recv(&mut self, key: Key) {
        let recv = Token { op: Op::Recv, key }.as_raw();
        self.push(opcode::AsyncCancel::new(recv).build(), Op::Cancel, key);
    }

    /// Cancels everything of one socket. The socket stays open at least until this completes.
    pub(crate) fn cancel_all(&mut self, socket: RawFd, key: Key) {
        let entry = opcode::AsyncCancel2::new(CancelBuilder::fd(Fd(socket)).all()).build();
        self.push(entry, Op::Cancel, key);
    }

    /// Arms a poll for hang-up and errors, which goes on reporting. It is edge-triggered: io_uring reports RDHUP whether
    /// asked or not, and after the peer's end of stream that stays set, so a poll for one event would end at once.
    pub(crate) fn poll_hang_up(&mut self, socket: RawFd, key: Key) {
        let entry = opcode::PollAdd::new(Fd(socket), libc::POLLRDHUP as u32).multi(true).build();
        self.push(entry, Op::Poll, key);
    }

    /// Arms the poll that a waker triggers: edge-triggered, so the eventfd need not be read.
    pub(crate) fn poll_waker(&mut self, event: RawFd) {
        let events = libc::POLLIN as u32 | libc::EPOLLET as u32;
        let entry = opcode::PollAdd::new(Fd(event), events).multi(true).build();
        self.push(entry, Op::Wake, Key::fixed(0));
    }

    /// Sends. The ring owns the buffer until [`Self::take_sent`].
    pub(crate) fn send(&mut self, socket: RawFd, key: Key, outgoing: Outgoing) {
        let Outgoing { buffer, from, limit, flags } = outgoing;
        let bytes = &buffer[from..];
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(limit);
        let flags = flags | libc::MSG_NOSIGNAL;
        let entry = opcode::Send::new(Fd(socket), bytes.as_ptr(), len).flags(flags).build();
        let flying = &mut self.sends[key.index as usize];
        // Before anything is replaced: the kernel may be reading what is there.
        assert!(flying.is_none(), "one send in flight per connection");
        // The heap block does not move with the `Vec`.
        *flying = Some((key.generation, buffer));
        self.push(entry, Op::Send, key);
    }

    /// Returns the buffer of a send that completed; `None` if that was a former tenant's.
    pub(crate) fn take_sent(&mut self, completion: &Completion) -> Option<Vec<u8>> {
        let Token { op, key } = completion.token;
        debug_assert_eq!(op, Op::Send);
        let flying = self.sends.get_mut(key.index as usize)?;
        flying.take_if(|(generation, _)| *generation == key.generation).map(|(_, buffer)| buffer)
    }

    /// Returns the receive buffers.
    pub(crate) fn bufs(&mut self) -> &mut BufRing {
        &mut self.bufs
    }

    fn push(&mut self, entry: squeue::Entry, op: Op, key: Key) {
        let entry = entry.user_data(Token { op, key }.as_raw());
        if !self.overflow.is_empty() || !self.try_push(&entry) {
            self.overflow.push_back(entry);
        }
    }

    fn push_overflow(&mut self) {
        while let Some(entry) = self.overflow.pop_front() {
            if !self.try_push(&entry) {
                self.overflow.push_front(entry);
                return;
            }
        }
    }

    /// Queues the entry, submitting first if the queue is full; `false` when that made no room.
    fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        if self.io.submission().is_full() {
            self.counters.sq_full.add(1);
            self.counters.enters.add(1);
            if self.io.submit().is_err() {
                self.counters.enters_refused.add(1);
            }
        }
        // SAFETY: memory that an entry points to is a send buffer, owned by `sends` from `send` until the send's
        // completion lets `take_sent` have it (`drop` leaks those still in flight). All other entries point to none;
        // file descriptors stay open until their last completion (`Conn::in_flight`).
        unsafe { self.io.submission().push(entry).is_ok() }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Sends in flight may still be read from until the kernel has torn the ring down, after this: leak them.
        self.sends.drain(..).flatten().for_each(std::mem::forget);
        if BufRing::unregister(&self.io.submitter()).is_ok() {
            // SAFETY: dropped here and nowhere else. Receives run on this thread, inside `io_uring_enter`: none runs
            // here, and none finds a buffer after `unregister`. Where that failed the memory is leaked.
            unsafe { ManuallyDrop::drop(&mut self.bufs) };
        }
    }
}

/// Why a ring could not be made, or broke.
#[derive(Debug)]
#[non_exhaustive]
pub enum RingError {
    /// The sysctl `kernel.io_uring_disabled` has this value, 1 or 2.
    Disabled(u8),
    /// A system call failed in a way that has no cause of its own here.
    Failed {
        /// What was tried.
        what: &'static str,
        /// How it failed.
        error: io::Error,
    },
    /// The system call is refused although the sysctl allows it: a seccomp profile, or a kernel built without it.
    Forbidden,
    /// Too little memory may be locked.
    Memlock,
    /// The kernel lacks an operation of Linux 6.1.
    MissingOperation(&'static str),
    /// The kernel is older than Linux 6.1.
    OldKernel,
}

impl RingError {
    /// Returns what the operator can do about it, in one sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Disabled(1) => {
                "run as root, add the process to the group of kernel.io_uring_group, or set sysctl kernel.io_uring_disabled=0"
            }
            Self::Disabled(_) => "set sysctl kernel.io_uring_disabled=0 on the host",
            Self::Failed { .. } => "the kernel log (dmesg) may say more",
            Self::Forbidden => {
                "in a container, allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile"
            }
            Self::Memlock => {
                "raise the limit on locked memory, e.g. `ulimit -l unlimited` or LimitMEMLOCK=infinity in the unit"
            }
            Self::MissingOperation(_) | Self::OldKernel => "uring-serve needs Linux 6.1 or newer",
        }
    }

    /// Classifies a failed set-up; `sysctl` is the value of `kernel.io_uring_disabled`, if there is one.
    fn from_setup(error: &io::Error, sysctl: Option<u8>) -> Self {
        match (error.raw_os_error(), sysctl) {
            (Some(libc::EPERM), Some(value @ 1..)) => Self::Disabled(value),
            (Some(libc::EPERM | libc::EACCES | libc::ENOSYS), _) => Self::Forbidden,
            (Some(libc::ENOMEM | libc::ENOBUFS), _) => Self::Memlock,
            (Some(libc::EINVAL), _) => Self::OldKernel,
            (code, _) => Self::Failed {
                what: "set up the ring",
                error: code.map_or_else(|| error.kind().into(), io::Error::from_raw_os_error),
            },
        }
    }
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disabled(value) => {
                write!(f, "io_uring is disabled here (kernel.io_uring_disabled={value})")
            }
            Self::Failed { what, error } => write!(f, "io_uring: cannot {what}: {error}"),
            Self::Forbidden => {
                f.write_str("io_uring is forbidden here by a seccomp profile, or not built in")
            }
            Self::Memlock => f.write_str("io_uring may not lock enough memory (RLIMIT_MEMLOCK)"),
            Self::MissingOperation(name) => write!(f, "this kernel's io_uring has no {name}"),
            Self::OldKernel => f.write_str("this kernel's io_uring is too old"),
        }
    }
}

impl std::error::Error for RingError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed { error, .. } => Some(error),
            Self::Disabled(_)
            | Self::Forbidden
            | Self::Memlock
            | Self::MissingOperation(_)
            | Self::OldKernel => None,
        }
    }
}

/// Tells whether this process can make a ring of the needed kind, by making a small one.
///
/// # Errors
/// What a server's own ring would fail with.
pub fn check_platform() -> Result<(), RingError> {
    let buffers = Shape { count: 1, bytes: 1 };
    let shape = RingShape { sq_entries: 8, cq_entries: 16, sends: 0, buffers };
    Ring::new(shape, Arc::default()).map(drop)
}

/// Makes a non-blocking eventfd.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed; a result that is not negative is a new descriptor, owned by nobody else.
    unsafe {
        match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Takes the completion's buffer or socket into its own hands; `None` for one that answers nothing of ours.
fn read_completion(entry: &cqueue::Entry, bufs: &mut BufRing) -> Option<Completion> {
    let result = u32::try_from(entry.result()).map_err(|_| entry.result().wrapping_neg());
    let token = Token::from_raw(entry.user_data())?;
    let lease = cqueue::buffer_select(entry.flags()).and_then(|id| bufs.lease(id, result.unwrap_or(0)));
    let accepted = match (token.op, result) {
        // SAFETY: the descriptor is new, made for this completion, which is read once: nobody else owns it.
        (Op::Accept, Ok(fd)) => Some(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }),
        _ => None,
    };
    Some(Completion { token, result, more: cqueue::more(entry.flags()), lease, accepted })
}

/// Reads the sysctl that can forbid io_uring; `None` on kernels before 6.6, which have none.
fn disabled_sysctl() -> Option<u8> {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?.trim().parse().ok()
}

const REQUIRED: [(&str, u8); 5] = [
    ("accept", opcode::AcceptMulti::CODE),
    ("cancel", opcode::AsyncCancel2::CODE),
    ("poll", opcode::PollAdd::CODE),
    ("receive", opcode::RecvMulti::CODE),
    ("send", opcode::Send::CODE),
];

/// `IORING_ENTER_GETEVENTS`: also run deferred work.
const ENTER_GETEVENTS: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_set_up_names_its_cause() {
        type Check = fn(&RingError) -> bool;
        let table: [(&str, i32, Option<u8>, Check); 8] = [
            ("sysctl for all", libc::EPERM, Some(2), |e| matches!(e, RingError::Disabled(2))),
            ("sysctl for the unprivileged", libc::EPERM, Some(1), |e| matches!(e, RingError::Disabled(1))),
            ("seccomp with EPERM", libc::EPERM, Some(0), |e| matches!(e, RingError::Forbidden)),
            ("no such sysctl", libc::EPERM, None, |e| matches!(e, RingError::Forbidden)),
            ("seccomp with ENOSYS", libc::ENOSYS, Some(0), |e| matches!(e, RingError::Forbidden)),
            ("locked memory", libc::ENOMEM, Some(0), |e| matches!(e, RingError::Memlock)),
            ("no DEFER_TASKRUN", libc::EINVAL, None, |e| matches!(e, RingError::OldKernel)),
            ("files", libc::EMFILE, Some(0), |e| matches!(e, RingError::Failed { .. })),
        ];
        for (name, errno, sysctl, expected) in table {
            let error = RingError::from_setup(&io::Error::from_raw_os_error(errno), sysctl);
            assert!(expected(&error), "{name}: {error:?}");
            assert!(!error.to_string().contains('\n') && !error.hint().is_empty());
        }
    }

    #[test]
    fn this_platform_has_a_ring() {
        check_platform().unwrap();
    }

    #[test]
    fn a_wait_ends_by_its_timeout() {
        let buffers = Shape { count: 1, bytes: 1 };
        let shape = RingShape { sq_entries: 8, cq_entries: 16, sends: 0, buffers };
        let mut ring = Ring::new(shape, Arc::default()).unwrap();
        ring.submit_and_wait(Wait::UpTo(Duration::from_millis(1))).unwrap();
        ring.submit_and_wait(Wait::Never).unwrap();
        let mut batch = VecDeque::new();
        assert!(!ring.take_completions(&mut batch, 8));
        assert!(batch.is_empty());
    }
}
