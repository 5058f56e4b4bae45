//! Kernel threads: parked between steps, in step at barriers within one.

use core::hint;
use core::mem;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// A fixed set of threads that run one job at a time together. The caller's thread is lane 0.
///
/// Threads wait for a job at a condition variable and use no CPU there. A lane that panics ends the pool: the others
/// leave at their next barrier, and every later job is refused.
pub(super) struct Pool {
    control: Arc<Control>,
    workers: Vec<JoinHandle<()>>,
}

/// What a job is told of the thread that runs it.
pub(super) struct Lane<'a> {
    /// Which lane, `0..count`.
    pub(super) index: usize,
    count: usize,
    barrier: &'a Barrier,
}

/// What a lane runs.
pub(super) type Work<'a> = dyn Fn(&Lane<'_>) + Sync + 'a;

/// A lane panicked; the pool is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LanePanicked;

impl Pool {
    /// Starts `lanes - 1` threads.
    ///
    /// # Errors
    /// The system's, when a thread cannot be started.
    pub(super) fn new(lanes: usize) -> io::Result<Self> {
        let control = Arc::new(Control {
            posted: Mutex::new(Posted { epoch: 0, call: Call::Idle }),
            changed: Condvar::new(),
            running: AtomicUsize::new(0),
            barrier: Barrier::new(lanes),
        });
        let mut pool = Self { control, workers: Vec::with_capacity(lanes.saturating_sub(1)) };
        for index in 1..lanes {
            let control = Arc::clone(&pool.control);
            let thread = thread::Builder::new().name(format!("kernel-{index}"));
            pool.workers.push(thread.spawn(move || control.work(index))?);
        }
        Ok(pool)
    }

    /// Runs `job` once on every lane and returns when all have ended it. Allocates nothing.
    ///
    /// # Errors
    /// [`LanePanicked`] if the job panicked on any lane, in this call or an earlier one.
    #[expect(
        clippy::needless_pass_by_ref_mut,
        reason = "one job at a time: a second would replace the first"
    )]
    pub(super) fn run(&mut self, job: &Work<'_>) -> Result<(), LanePanicked> {
        if self.is_broken() {
            return Err(LanePanicked);
        }
        self.control.running.store(self.workers.len(), Ordering::Relaxed);
        if !self.workers.is_empty() {
            self.control.post(Call::Job(Job::new(job)));
        }
        self.control.run_lane(0, job);
        // Lanes leave the last barrier together, so this wait is short; it is also what keeps `job` borrowed until no
        // worker can call it any more.
        let mut turns = 0;
        while self.control.running.load(Ordering::Acquire) != 0 {
            relax(&mut turns);
        }
        if self.is_broken() { Err(LanePanicked) } else { Ok(()) }
    }

    /// Returns whether a lane has panicked.
    pub(super) fn is_broken(&self) -> bool {
        self.control.barrier.broken.load(Ordering::Acquire)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.control.post(Call::End);
        for worker in self.workers.drain(..) {
            // A worker catches its job's panics, so it ends only by `Call::End`; there is nobody to tell otherwise.
            let _ = worker.join();
        }
    }
}

impl Lane<'_> {
    /// Returns this lane's part of `0..total`: the parts of all lanes are disjoint, in order, and cover it.
    pub(super) fn share(&self, total: usize) -> Range<usize> {
        total * self.index / self.count..total * (self.index + 1) / self.count
    }

    /// Says whether item `index` of a list dealt out one by one is this lane's.
    pub(super) fn is_dealt(&self, index: usize) -> bool {
        index % self.count == self.index
    }

    /// Waits until every lane is here. What any lane wrote before is visible to all after.
    ///
    /// # Panics
    /// If another lane panicked: it will never arrive.
    pub(super) fn meet(&self) {
        self.barrier.wait();
    }
}

struct Control {
    posted: Mutex<Posted>,
    changed: Condvar,
    /// Workers that have not ended the posted job.
    running: AtomicUsize,
    barrier: Barrier,
}

struct Posted {
    /// Counts posts, so that a worker takes each one once.
    epoch: u64,
    call: Call,
}

#[derive(Clone, Copy)]
enum Call {
    Idle,
    Job(Job),
    End,
}

/// A borrowed job with its lifetime erased.
#[derive(Clone, Copy)]
struct Job(*const Work<'static>);

// SAFETY: the pointee is `Sync`, so a shared reference to it may be used on any thread; how long it lives is argued where
// it is called.
unsafe impl Send for Job {}

impl Job {
    fn new<'a>(job: &Work<'a>) -> Self {
        // SAFETY: only the lifetime in the pointer's type changes; the pointer is used in `Control::work` alone, where
        // it is argued that the job is still borrowed.
        Self(unsafe { mem::transmute::<*const Work<'a>, *const Work<'static>>(job) })
    }
}

impl Control {
    fn post(&self, call: Call) {
        let mut posted = self.posted.lock().unwrap_or_else(PoisonError::into_inner);
        posted.epoch += 1;
        posted.call = call;
        drop(posted);
        self.changed.notify_all();
    }

    /// A worker's life.
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            let call = {
                let posted = self.posted.lock().unwrap_or_else(PoisonError::into_inner);
                let posted = self.changed.wait_while(posted, |posted| posted.epoch == seen);
                let posted = posted.unwrap_or_else(PoisonError::into_inner);
                seen = posted.epoch;
                posted.call
            };
            match call {
                Call::Idle => {}
                Call::Job(job) => {
                    // SAFETY: `Pool::run` borrows the job for its whole call and does not return, nor unwind, before
                    // `running` is 0, which this worker makes so only after its last use of `job`. Each post is taken
                    // once (`seen`), and `run` takes `&mut Pool`, so no later post replaces this one before that.
                    let job = unsafe { &*job.0 };
                    self.run_lane(index, job);
                    self.running.fetch_sub(1, Ordering::Release);
                }
                Call::End => return,
            }
        }
    }

    /// Runs a job on one lane; a panic ends here and breaks the barrier, so that no other lane waits for this one.
    fn run_lane(&self, index: usize, job: &Work<'_>) {
        let lane = Lane { index, count: self.barrier.lanes, barrier: &self.barrier };
        if panic::catch_unwind(AssertUnwindSafe(|| job(&lane))).is_err() {
            self.barrier.broken.store(true, Ordering::Release);
        }
    }
}

/// A barrier that spins briefly, then yields, and can break.
///
/// The spin is short because the server's ring thread shares the cores: a lane that waits for one that was descheduled
/// must give its core away.
struct Barrier {
    lanes: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
    broken: AtomicBool,
}

/// The payload with which a lane leaves a broken barrier; `resume_unwind` prints nothing.
struct BarrierBroken;

impl Barrier {
    fn new(lanes: usize) -> Self {
        Self {
            lanes,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }

    fn wait(&self) {
        if self.lanes == 1 {
            return;
        }
        let generation = self.generation.load(Ordering::Relaxed);
        // Release what this lane wrote; the last to arrive acquires it all and releases it to the others.
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.lanes {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut turns = 0;
        while self.generation.load(Ordering::Acquire) == generation {
            if self.broken.load(Ordering::Acquire) {
                panic::resume_unwind(Box::new(BarrierBroken));
            }
            relax(&mut turns);
        }
    }
}

/// One turn of a wait: a pause at first, then the rest of the time slice.
fn relax(turns: &mut u32) {
    if *turns < SPIN_TURNS {
        *turns += 1;
        hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

/// Some 50 us of pauses: above the length of the longest imbalance between two lanes at one token, below a time slice.
const SPIN_TURNS: u32 = 2_000;

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicUsize, Ordering};
    use std::fs;
    use std::path::Path;
    use std::sync::Mutex;
    use std::thread;

    use super::{LanePanicked, Pool};

    #[test]
    fn shares_cover_every_item_once() {
        for lanes in [1, 2, 3, 5] {
            let mut pool = Pool::new(lanes).unwrap();
            for total in [0, 1, 2, 7, 64] {
                let hits: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
                pool.run(&|lane| {
                    for item in lane.share(total) {
                        hits[item].fetch_add(1, Ordering::Relaxed);
                    }
                    for item in (0..total).filter(|&item| lane.is_dealt(item)) {
                        hits[item].fetch_add(1, Ordering::Relaxed);
                    }
                })
                .unwrap();
                let hits: Vec<usize> = hits.into_iter().map(AtomicUsize::into_inner).collect();
                assert_eq!(hits, vec![2; total], "{lanes} lanes, {total} items");
            }
        }
    }

    #[test]
    fn no_lane_passes_a_barrier_before_all_arrived() {
        let mut pool = Pool::new(3).unwrap();
        let arrived = AtomicUsize::new(0);
        for job in 0..20 {
            pool.run(&|lane| {
                for round in 0..50 {
                    arrived.fetch_add(1, Ordering::Relaxed);
                    lane.meet();
                    assert!(arrived.load(Ordering::Relaxed) >= 3 * (job * 50 + round + 1));
                    lane.meet();
                }
            })
            .unwrap();
        }
        assert_eq!(arrived.into_inner(), 3 * 20 * 50);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn workers_sleep_between_jobs_and_end_with_the_pool() {
        let mut pool = Pool::new(2).unwrap();
        let tasks = Mutex::new(Vec::new());
        pool.run(&|lane| {
            let task = Path::new("/proc").join(fs::read_link("/proc/thread-self").unwrap());
            tasks.lock().unwrap().push((lane.index, task));
        })
        .unwrap();
        let mut tasks = tasks.into_inner().unwrap();
        tasks.sort();
        let [(_, caller), (_, worker)] = &tasks[..] else { panic!("two lanes ran: {tasks:?}") };
        // It may still be on its way from the job to its wait.
        while state_and_ticks(worker).0 != "S" {
            thread::yield_now();
        }
        let before = state_and_ticks(worker);
        let end = state_and_ticks(caller).1 + 10;
        while state_and_ticks(caller).1 < end {}
        assert_eq!(state_and_ticks(worker), before, "while the caller computed for ten ticks");
        drop(pool);
        assert!(!worker.exists());
    }

    /// A thread's state and its CPU time in clock ticks, from `proc_pid_stat(5)`.
    #[cfg(target_os = "linux")]
    fn state_and_ticks(task: &Path) -> (String, u64) {
        let stat = fs::read_to_string(task.join("stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        let ticks = |at: usize| fields[at].parse::<u64>().unwrap();
        (fields[0].to_owned(), ticks(11) + ticks(12))
    }

    #[test]
    fn a_lane_that_panics_is_an_error_and_stays_one() {
        for failing in 0..3 {
            let mut pool = Pool::new(3).unwrap();
            let outcome = pool.run(&|lane| {
                assert!(lane.index != failing, "lane {failing} fails, as this test wants");
                lane.meet();
            });
            assert_eq!(outcome, Err(LanePanicked), "lane {failing}");
            assert_eq!(pool.run(&|_| {}), Err(LanePanicked), "lane {failing}, the next job");
            assert!(pool.is_broken(), "lane {failing}");
        }
    }
}
