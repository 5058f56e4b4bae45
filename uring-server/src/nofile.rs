//! The limit on open files: each connection is one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises this process's soft limit on open files to the hard limit and returns what holds now: the most files that
/// can be open, or `None` when there is no limit.
pub fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("cannot raise the limit on open files: {error}");
        return limit.current;
    }
    getrlimit(Resource::Nofile).current
}

/// Returns how many connections each of `workers` ring threads may hold, at least 1, when `open_files_max` files can be
/// open: [`FILES_KEPT`] are left for everything else in the process.
#[must_use]
pub fn connections_max(open_files_max: Option<u64>, workers: u16) -> u32 {
    let each = open_files_max.unwrap_or(u64::MAX).saturating_sub(FILES_KEPT) / u64::from(workers.max(1));
    u32::try_from(each).unwrap_or(u32::MAX).clamp(1, CONNECTIONS_CEILING)
}

/// Descriptors that connections leave to rings, listeners, logs, models and control connections.
pub const FILES_KEPT: u64 = 128;
/// A thread's table is sized for its connections at start, 24 bytes and up each.
const CONNECTIONS_CEILING: u32 = 1 << 17;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_others() {
        for (open_files_max, workers, expected) in [
            (Some(0), 1, 1),
            (Some(FILES_KEPT), 1, 1),
            (Some(FILES_KEPT + 2), 1, 2),
            (Some(20_000), 1, 19_872),
            (Some(20_000), 4, 4968),
            (Some(20_000), 0, 19_872),
            (None, 2, CONNECTIONS_CEILING),
        ] {
            assert_eq!(
                connections_max(open_files_max, workers),
                expected,
                "{open_files_max:?}, {workers} workers"
            );
        }
    }

    #[test]
    fn the_soft_limit_becomes_the_hard_limit() {
        let hard = getrlimit(Resource::Nofile).maximum;
        assert_eq!(raise(), hard);
        assert_eq!(raise(), hard, "again changes nothing");
    }
}
