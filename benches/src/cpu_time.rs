//! CPU time of a process and of its threads, from the scheduler's own count (`/proc/PID/task/TID/schedstat`).

use std::fs;

/// CPU time used so far, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// All threads alive.
    pub process_ns: u64,
    /// The threads whose name begins with the given prefix.
    pub named_ns: u64,
}

impl CpuTime {
    /// Reads it; threads that end meanwhile are left out.
    #[must_use]
    pub fn of(pid: u32, name_prefix: &str) -> Self {
        let mut time = Self::default();
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return time };
        for task in tasks.flatten().map(|task| task.path()) {
            let read = |file: &str| fs::read_to_string(task.join(file)).unwrap_or_default();
            let ns = read("schedstat").split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            time.process_ns += ns;
            if read("comm").starts_with(name_prefix) {
                time.named_ns += ns;
            }
        }
        time
    }

    /// The time used between an earlier reading and this one.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            process_ns: self.process_ns.saturating_sub(earlier.process_ns),
            named_ns: self.named_ns.saturating_sub(earlier.named_ns),
        }
    }
}

/// Returns the id of a process's first thread of this name.
#[must_use]
pub fn thread_named(pid: u32, name: &str) -> Option<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let has_name = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    let task = tasks.flatten().find(has_name)?;
    task.file_name().to_str()?.parse().ok()
}
