//! The JSONL thread: records in over a bounded queue, whole lines out to one file (product contract 5.6, UF 2).
//!
//! A ring thread never waits here: a full queue drops the new record and counts it. Every loss shows in the file,
//! because the next line written says how many records are missing before it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};

use uring_serve_core::gate::FileGrant;
use uring_serve_core::jsonl::{self, Extras};
use uring_serve_core::metrics::Record;

use crate::clock::{Clock, Utc};

/// A record that can write itself as one line.
pub trait Line: Send + 'static {
    /// Appends the record as one JSON object and one `\n`, its only one. `dropped_before` counts the records lost since
    /// the last line written; unless it is 0, the line carries `"dropped_before": n`.
    fn write_line(self, dropped_before: u64, out: &mut Vec<u8>);
}

/// A request's record, with the proof that it may go to the file.
#[derive(Debug)]
pub struct Entry {
    /// The proof.
    pub grant: FileGrant,
    /// The record.
    pub record: Record,
}

impl Line for Entry {
    fn write_line(self, dropped_before: u64, out: &mut Vec<u8>) {
        jsonl::write_line(self.grant, &self.record, Extras { dropped_before }, out);
    }
}

/// The running thread. Owned by whoever starts and ends the server; rings hold a [`JournalHandle`].
pub struct Journal<L: Line> {
    handle: JournalHandle<L>,
    clock: Arc<dyn Clock>,
    path: PathBuf,
    /// Disconnects when the thread has ended.
    ended: Receiver<()>,
}

impl<L: Line> Journal<L> {
    /// Creates `dir` with its parents, opens `perf_metrics-<kind>-<host>-<pid>-<UTC>.jsonl` in it and starts the
    /// thread. A directory or file that cannot be made is an error in the log, not here: serving goes on, and
    /// writing begins when the file can be opened.
    ///
    /// # Errors
    /// The operating system refused the thread.
    pub fn start(dir: &Path, kind: &str, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let (store, opened) = FileStore::create(dir, kind, clock.wall_seconds());
        let path = store.path.clone();
        let counters = Arc::new(JournalCounters::default());
        match opened {
            Ok(()) => tracing::info!(path = %path.display(), "writing per-request metrics"),
            Err(error) => counters.count_error(&error, 0),
        }
        Self::start_with(store, path, counters, clock)
    }

    fn start_with(
        store: impl Store,
        path: PathBuf,
        counters: Arc<JournalCounters>,
        clock: Arc<dyn Clock>,
    ) -> io::Result<Self> {
        let (sender, receiver) = bounded(QUEUE_RECORDS_MAX);
        let (end, ended) = bounded(0);
        let writer = Writer::new(store, Arc::clone(&counters), Arc::clone(&clock));
        thread::Builder::new().name("journal".into()).spawn(move || {
            // `run` drops the receiver before this end: who waited for the end finds the queue closed.
            let _end: Sender<()> = end;
            run(writer, receiver);
        })?;
        Ok(Self { handle: JournalHandle { sender, counters }, clock, path, ended })
    }

    /// Returns a handle for a thread that makes records.
    #[must_use]
    pub fn handle(&self) -> JournalHandle<L> {
        self.handle.clone()
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what is queued and ends the thread, waiting at most 5 s. Returns whether everything was written out
    /// in that time. Records submitted afterwards are dropped and counted.
    pub fn close(self) -> bool {
        let begin = self.clock.now();
        // An error means that the queue stayed full for the whole wait, or that the thread is gone.
        let told = self.handle.sender.send_timeout(Message::Close, CLOSE_WAIT_MAX).is_ok();
        let spent = self.clock.now().checked_since(begin).unwrap_or_default();
        let waited = self.ended.recv_timeout(CLOSE_WAIT_MAX.saturating_sub(spent));
        let flushed = told && waited == Err(RecvTimeoutError::Disconnected);
        let (written, dropped) = (self.handle.counters.written(), self.handle.counters.dropped());
        if flushed {
            tracing::info!(written, dropped, "per-request metrics are closed");
        } else {
            tracing::warn!(written, dropped, "per-request metrics did not end within 5 s; the rest is lost");
        }
        flushed
    }
}

/// The sending side, one for each thread that makes records.
#[derive(Debug)]
pub struct JournalHandle<L> {
    sender: Sender<Message<L>>,
    counters: Arc<JournalCounters>,
}

impl<L> Clone for JournalHandle<L> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), counters: Arc::clone(&self.counters) }
    }
}

impl<L: Line> JournalHandle<L> {
    /// Queues a record, or drops and counts it when the queue is full. Never blocks.
    pub fn submit(&self, record: L) {
        match self.sender.try_send(Message::Record(record)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.counters.count_dropped("the queue is full"),
            Err(TrySendError::Disconnected(_)) => self.counters.count_dropped("the journal is closed"),
        }
    }

    /// Returns the counters, for `/metrics`.
    #[must_use]
    pub fn counters(&self) -> &Arc<JournalCounters> {
        &self.counters
    }
}

/// What the journal has done so far. Readable from any thread.
#[derive(Debug, Default)]
pub struct JournalCounters {
    written: AtomicU64,
    dropped: AtomicU64,
    errors: AtomicU64,
    last_write: AtomicU64,
}

impl JournalCounters {
    /// Returns the lines written whole.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Returns the records lost, to a full queue or to failed writes.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Acquire)
    }

    /// Returns the failed attempts to open the file or write to it.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Returns the wall time of the last complete write, in seconds since the UNIX epoch, or `None` before the first.
    #[must_use]
    pub fn last_write(&self) -> Option<u64> {
        Some(self.last_write.load(Ordering::Relaxed)).filter(|seconds| *seconds > 0)
    }

    fn count_dropped(&self, why: &str) {
        let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
        if is_worth_logging(dropped) {
            tracing::warn!(dropped, "a metrics record was dropped: {why}");
        }
    }

    fn count_error(&self, error: &io::Error, lost: u64) {
        let errors = self.errors.fetch_add(1, Ordering::Relaxed) + 1;
        self.dropped.fetch_add(lost, Ordering::Release);
        if is_worth_logging(errors) {
            tracing::error!(errors, dropped = self.dropped(), "cannot write per-request metrics: {error}");
        }
    }
}

#[derive(Debug)]
enum Message<L> {
    Close,
    Record(L),
}

fn run<L: Line, S: Store>(mut writer: Writer<S>, receiver: Receiver<Message<L>>) {
    let mut batch = Vec::with_capacity(BATCH_LINES_MAX);
    let mut open = true;
    while open {
        match receiver.recv() {
            Ok(Message::Record(record)) => batch.push(record),
            Ok(Message::Close) | Err(_) => break,
        }
        while open && batch.len() < BATCH_LINES_MAX {
            match receiver.try_recv() {
                Ok(Message::Record(record)) => batch.push(record),
                Ok(Message::Close) => open = false,
                Err(_) => break,
            }
        }
        let emptied = batch.len() < BATCH_LINES_MAX;
        writer.write_batch(&mut batch);
        // A thread that does not wait in the queue costs its senders no wake-up.
        if open && emptied {
            thread::sleep(GATHER);
        }
    }
    for _late in receiver.try_iter() {
        writer.counters.count_dropped("the journal is closed");
    }
    drop(receiver);
}

/// Turns batches into whole lines on disk.
///
/// Invariant: `bytes[0]` is a newline and every line ends with one, so the byte before any line is a newline. A write
/// that has to begin with one, because the last write may have left a torn line, starts one byte earlier.
struct Writer<S> {
    store: S,
    counters: Arc<JournalCounters>,
    clock: Arc<dyn Clock>,
    bytes: Vec<u8>,
    /// End of each line in `bytes`.
    ends: Vec<usize>,
    /// Losses that a written line has told of.
    dropped_told: u64,
    /// The file may end inside a line.
    torn: bool,
}

impl<S: Store> Writer<S> {
    fn new(store: S, counters: Arc<JournalCounters>, clock: Arc<dyn Clock>) -> Self {
        let (bytes, ends) = (vec![b'\n'], Vec::with_capacity(BATCH_LINES_MAX));
        Self { store, counters, clock, bytes, ends, dropped_told: 0, torn: false }
    }

    /// Writes the batch in one write where the file system takes it so. What a short write left is tried again for
    /// as long as each attempt brings a whole line to disk; the rest is lost and counted.
    fn write_batch<L: Line>(&mut self, batch: &mut Vec<L>) {
        let dropped = self.counters.dropped();
        let mut gap = dropped - self.dropped_told;
        self.bytes.truncate(1);
        self.ends.clear();
        for record in batch.drain(..) {
            record.write_line(mem::take(&mut gap), &mut self.bytes);
            self.ends.push(self.bytes.len());
        }
        let mut done = 0;
        while done < self.ends.len() {
            match self.write_from(done) {
                Ok(lines) => {
                    self.counters.written.fetch_add(lines as u64, Ordering::Relaxed);
                    done += lines;
                    // The batch's first line is on disk, and with it the count it carries.
                    self.dropped_told = dropped;
                }
                Err(error) => {
                    self.torn = true;
                    return self.counters.count_error(&error, (self.ends.len() - done) as u64);
                }
            }
        }
        self.counters.last_write.store(self.clock.wall_seconds(), Ordering::Relaxed);
        if self.bytes.capacity() > KEPT_BYTES_MAX {
            self.bytes = vec![b'\n'];
        }
    }

    /// Writes the lines from number `done` on, and returns how many of them are whole on disk: at least one.
    fn write_from(&mut self, done: usize) -> io::Result<usize> {
        if self.store.ensure_open()? == Opened::Fresh {
            self.torn = false;
        }
        let line_start = if done == 0 { 1 } else { self.ends[done - 1] };
        let start = line_start - usize::from(self.torn);
        let end = start + self.store.write(&self.bytes[start..])?;
        let whole = self.ends[done..].partition_point(|line_end| *line_end <= end);
        self.torn = end < self.bytes.len();
        if whole == 0 {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "the file system took less than one line"));
        }
        Ok(whole)
    }
}

/// What the journal asks of the file system. Tests inject faults here.
trait Store: Send + 'static {
    /// Makes sure that the next write goes to the file that has the journal's name.
    fn ensure_open(&mut self) -> io::Result<Opened>;

    /// Writes once, perhaps less than everything.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
}

/// What [`Store::ensure_open`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opened {
    /// Opened now, and empty: no earlier write can have left a torn line in it.
    Fresh,
    /// Open since before, or opened now with bytes in it.
    Used,
}

/// The real file, in append mode.
struct FileStore {
    path: PathBuf,
    file: Option<File>,
}

impl FileStore {
    /// Creates directory and file. The store can be used in any case: it tries the file again at each write.
    fn create(dir: &Path, kind: &str, wall_seconds: u64) -> (Self, io::Result<()>) {
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy().replace(['/', '\0'], "_");
        let path_at = |second| dir.join(file_name(kind, &host, std::process::id(), second));
        let opened = fs::create_dir_all(dir).and_then(|()| {
            // In containers a restarted server can have its predecessor's host and pid, and come within the same
            // second. Nobody touches another process's file: take the next free second.
            let mut second = wall_seconds;
            loop {
                let path = path_at(second);
                match OpenOptions::new().append(true).create_new(true).open(&path) {
                    Err(error)
                        if error.kind() == io::ErrorKind::AlreadyExists && second < wall_seconds + 60 =>
                    {
                        second += 1;
                    }
                    opened => return opened.map(|file| (path, file)),
                }
            }
        });
        match opened {
            Ok((path, file)) => (Self { path, file: Some(file) }, Ok(())),
            Err(error) => (Self { path: path_at(wall_seconds), file: None }, Err(error)),
        }
    }

    /// Returns whether the open file is still the one that the path names.
    fn is_current(&self) -> bool {
        let Some(open) = self.file.as_ref().and_then(|file| file.metadata().ok()) else { return false };
        fs::metadata(&self.path).is_ok_and(|named| (named.dev(), named.ino()) == (open.dev(), open.ino()))
    }
}

impl Store for FileStore {
    fn ensure_open(&mut self) -> io::Result<Opened> {
        if self.is_current() {
            return Ok(Opened::Used);
        }
        // The file was rotated or its directory removed. The directory is not made again: where a volume was
        // unmounted, that would fill the disk below it.
        self.file = None;
        let file = OpenOptions::new().append(true).create(true).open(&self.path)?;
        let is_empty = file.metadata()?.len() == 0;
        self.file = Some(file);
        Ok(if is_empty { Opened::Fresh } else { Opened::Used })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.file {
            Some(file) => file.write(bytes),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// UF 2.1.
fn file_name(kind: &str, host: &str, pid: u32, wall_seconds: u64) -> String {
    let Utc { year, month, day, hour, minute, second, weekday: _ } = Utc::from_unix_seconds(wall_seconds);
    let utc = format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z");
    format!("perf_metrics-{kind}-{host}-{pid}-{utc}.jsonl")
}

/// The first and every 1000th of a kind of event go to the log: enough to see, too little to fill the disk again.
const fn is_worth_logging(count: u64) -> bool {
    count == 1 || count.is_multiple_of(1_000)
}

const QUEUE_RECORDS_MAX: usize = 1_024;
const BATCH_LINES_MAX: usize = 64;
/// How long records gather for the next write. The queue has room for what 500,000 requests a second end meanwhile.
const GATHER: Duration = Duration::from_millis(2);
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(5);
/// A batch of long step traces may need more; that memory is given back after it.
const KEPT_BYTES_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use super::*;
    use crate::clock::VirtualClock;

    #[test]
    fn the_file_name_is_that_of_uf_2_1() {
        assert_eq!(
            file_name("server", "node-1", 42, 1_735_689_599),
            "perf_metrics-server-node-1-42-20241231T235959Z.jsonl"
        );
    }

    #[test]
    fn faults_cost_what_they_must_and_leave_whole_lines() {
        use Fault::{Error, Fresh, None as Good, Short};
        // (name, fault of each attempt in turn, batches, file afterwards, dropped, errors)
        type Row = (&'static str, &'static [Fault], &'static [&'static [u32]], &'static str, u64, u64);
        let rows: &[Row] = &[
            ("a batch is one write", &[Good], &[&[1, 2]], "1\n2\n", 0, 0),
            ("a short write is mended", &[Short(3), Good], &[&[1, 2]], "1\n2\n2\n", 0, 0),
            ("a short write at a line's end", &[Short(2), Good], &[&[1, 2]], "1\n\n2\n", 0, 0),
            ("nothing whole is a loss", &[Short(1), Good], &[&[1, 2], &[3]], "1\n3<2\n", 2, 1),
            ("a failed batch is told of", &[Error, Good], &[&[1, 2], &[3, 4]], "\n3<2\n4\n", 2, 1),
            ("losses add up", &[Error, Error, Good], &[&[1], &[2, 3], &[4]], "\n4<3\n", 3, 2),
            ("each loss is told once", &[Error, Good, Good], &[&[1], &[2], &[3]], "\n2<1\n3\n", 1, 1),
            ("short, then failed", &[Short(3), Error, Good], &[&[1, 2, 3], &[4]], "1\n2\n4<2\n", 2, 1),
            (
                "short, with the count whole",
                &[Error, Short(6), Good],
                &[&[1], &[2, 3]],
                "\n2<1\n3\n3\n",
                1,
                1,
            ),
            ("a new file has no torn line", &[Error, Fresh], &[&[1], &[2]], "2<1\n", 1, 1),
        ];
        for (name, faults, batches, expected, dropped, errors) in rows {
            let store = FaultStore { faults: faults.iter().copied().collect(), ..FaultStore::default() };
            let file = Arc::clone(&store.file);
            let counters = Arc::new(JournalCounters::default());
            let clock = Arc::new(VirtualClock::new(7));
            let mut writer = Writer::new(store, Arc::clone(&counters), clock);
            for batch in *batches {
                writer.write_batch(&mut batch.iter().map(|n| Number(*n)).collect());
            }
            assert_eq!(String::from_utf8_lossy(&file.lock().unwrap()), *expected, "{name}");
            assert_eq!((counters.dropped(), counters.errors()), (*dropped, *errors), "{name}");
            let submitted: usize = batches.iter().map(|batch| batch.len()).sum();
            assert_eq!(counters.written() + dropped, submitted as u64, "{name}");
            assert_eq!(counters.last_write(), Some(7), "{name}");
        }
    }

    #[test]
    fn a_full_queue_drops_the_new_record_and_the_next_line_says_so() {
        let (entered, wait_entered) = bounded(1);
        let (release, wait_release) = bounded(0);
        let store = FaultStore { gate: Some((entered, wait_release)), ..FaultStore::default() };
        let file = Arc::clone(&store.file);
        let counters = Arc::new(JournalCounters::default());
        let clock = Arc::new(VirtualClock::new(0));
        let journal = Journal::start_with(store, PathBuf::new(), Arc::clone(&counters), clock).unwrap();
        let handle = journal.handle();
        handle.submit(Number(0));
        wait_entered.recv().unwrap();
        for n in 1..=QUEUE_RECORDS_MAX as u32 {
            handle.submit(Number(n));
        }
        assert_eq!(counters.dropped(), 0, "the queue holds 1024 while one batch is being written");
        for n in 0..3 {
            handle.submit(Number(9_000 + n));
        }
        assert_eq!(counters.dropped(), 3);
        drop(release);
        drop(wait_entered);
        assert!(journal.close());
        let text = String::from_utf8(file.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + QUEUE_RECORDS_MAX);
        assert_eq!((lines[0], lines[1], lines[2], lines[1_024]), ("0", "1<3", "2", "1024"));
        handle.submit(Number(1));
        assert_eq!((counters.written(), counters.dropped()), (1_025, 4), "a closed journal counts too");
    }

    #[test]
    fn a_full_disk_loses_lines_and_writing_resumes_after_it() {
        let dir = std::env::temp_dir().join(format!("uring-serve-journal-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("full.jsonl");
        let _ = fs::remove_file(&path);
        // The device that is always full stands in for the disk: its error is the kernel's own ENOSPC.
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let counters = Arc::new(JournalCounters::default());
        let store = FileStore { path: path.clone(), file: None };
        let mut writer = Writer::new(store, Arc::clone(&counters), Arc::new(VirtualClock::new(0)));
        writer.write_batch(&mut vec![Number(1), Number(2)]);
        assert_eq!((counters.written(), counters.dropped(), counters.errors()), (0, 2, 1));
        fs::remove_file(&path).unwrap();
        writer.write_batch(&mut vec![Number(3)]);
        writer.write_batch(&mut vec![Number(4)]);
        assert_eq!(fs::read_to_string(&path).unwrap(), "3<2\n4\n");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_file_of_the_same_second_is_left_alone() {
        let dir = std::env::temp_dir().join(format!("uring-serve-journal-same-{}", std::process::id()));
        let (first, opened) = FileStore::create(&dir, "server", 1_000);
        opened.unwrap();
        let (second, opened) = FileStore::create(&dir, "server", 1_000);
        opened.unwrap();
        assert!(first.path.to_string_lossy().ends_with("-19700101T001640Z.jsonl"));
        assert!(second.path.to_string_lossy().ends_with("-19700101T001641Z.jsonl"));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_first_and_every_thousandth_event_is_logged() {
        for (count, expected) in
            [(1, true), (2, false), (999, false), (1_000, true), (1_001, false), (2_000, true)]
        {
            assert_eq!(is_worth_logging(count), expected, "{count}");
        }
    }

    /// Writes as its number, followed by `<n` when n records are missing before it.
    struct Number(u32);

    impl Line for Number {
        fn write_line(self, dropped_before: u64, out: &mut Vec<u8>) {
            match dropped_before {
                0 => writeln!(out, "{}", self.0).unwrap(),
                lost => writeln!(out, "{}<{lost}", self.0).unwrap(),
            }
        }
    }

    #[derive(Clone, Copy)]
    enum Fault {
        Error,
        Fresh,
        None,
        Short(usize),
    }

    #[derive(Default)]
    struct FaultStore {
        faults: VecDeque<Fault>,
        file: Arc<Mutex<Vec<u8>>>,
        gate: Option<(Sender<()>, Receiver<()>)>,
    }

    impl Store for FaultStore {
        fn ensure_open(&mut self) -> io::Result<Opened> {
            Ok(if matches!(self.faults.front(), Some(Fault::Fresh)) { Opened::Fresh } else { Opened::Used })
        }

        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if let Some((entered, release)) = &self.gate {
                let _ = entered.try_send(());
                let _ = release.recv();
            }
            let taken = match self.faults.pop_front().unwrap_or(Fault::None) {
                Fault::Error => return Err(io::ErrorKind::StorageFull.into()),
                Fault::Fresh | Fault::None => bytes.len(),
                Fault::Short(taken) => taken,
            };
            self.file.lock().unwrap().extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }
    }
}
