//! The only file that reads a clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use uring_serve_core::time::MonoNs;

/// A monotonic clock that a thread owns. Ring and engine threads read it once per turn and step boundary.
pub trait Clock: Send + Sync {
    /// Returns the current point.
    fn now(&self) -> MonoNs;

    /// Blocks until `deadline`; a virtual clock moves there instead.
    fn wait_until(&self, deadline: MonoNs);

    /// Returns wall-clock time since the UNIX epoch: for `Date`, `created` and file names, never for a duration.
    fn wall_since_epoch(&self) -> Duration;

    /// Returns the same in whole seconds.
    fn wall_seconds(&self) -> u64 {
        self.wall_since_epoch().as_secs()
    }
}

/// `CLOCK_MONOTONIC`, and `CLOCK_REALTIME` for the wall.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> MonoNs {
        let now = clock_gettime(ClockId::Monotonic);
        MonoNs::from_raw(now.tv_sec as u64 * NS_PER_SECOND + now.tv_nsec as u64)
    }

    fn wait_until(&self, deadline: MonoNs) {
        while let Some(left) = deadline.checked_since(self.now()).filter(|left| *left > Duration::ZERO) {
            std::thread::sleep(left);
        }
    }

    fn wall_since_epoch(&self) -> Duration {
        let now = clock_gettime(ClockId::Realtime);
        // A wall clock set before 1970 reads as 1970: the value is a label.
        Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), now.tv_nsec as u32)
    }
}

/// A clock that stands still until it is moved. Clones share one time.
///
/// ```
/// use std::time::Duration;
/// use uring_serve::clock::{Clock, VirtualClock};
///
/// let clock = VirtualClock::new(1_700_000_000);
/// let start = clock.now();
/// clock.clone().wait_until(start.saturating_add(Duration::from_secs(2)));
/// assert_eq!(clock.now().checked_since(start), Some(Duration::from_secs(2)));
/// assert_eq!(clock.wall_seconds(), 1_700_000_002);
/// ```
#[derive(Clone, Debug)]
pub struct VirtualClock {
    now_ns: Arc<AtomicU64>,
    wall_start: u64,
}

impl VirtualClock {
    /// Creates a clock that reads one second: a zero would hide a time that was never set. `wall_start` is the wall
    /// time at that point, in seconds since the UNIX epoch.
    #[must_use]
    pub fn new(wall_start: u64) -> Self {
        Self { now_ns: Arc::new(AtomicU64::new(NS_PER_SECOND)), wall_start }
    }

    /// Moves the clock forward, saturating at the end of its range.
    pub fn advance(&self, by: Duration) {
        self.wait_until(self.now().saturating_add(by));
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> MonoNs {
        MonoNs::from_raw(self.now_ns.load(Ordering::Acquire))
    }

    fn wait_until(&self, deadline: MonoNs) {
        self.now_ns.fetch_max(deadline.as_raw(), Ordering::AcqRel);
    }

    fn wall_since_epoch(&self) -> Duration {
        Duration::from_secs(self.wall_start) + Duration::from_nanos(self.now().as_raw() - NS_PER_SECOND)
    }
}

/// Counts the monotonic reads of the clock inside it. Clones of a shared `Arc` of it share the count.
#[derive(Debug, Default)]
pub struct CountingClock<C> {
    clock: C,
    reads: AtomicU64,
}

impl<C: Clock> CountingClock<C> {
    /// Wraps `clock`, starting at no reads.
    pub const fn new(clock: C) -> Self {
        Self { clock, reads: AtomicU64::new(0) }
    }

    /// Returns how often [`Clock::now`] was called. Waits and wall readings do not count.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl<C: Clock> Clock for CountingClock<C> {
    fn now(&self) -> MonoNs {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.clock.now()
    }

    fn wait_until(&self, deadline: MonoNs) {
        self.clock.wait_until(deadline);
    }

    fn wall_since_epoch(&self) -> Duration {
        self.clock.wall_since_epoch()
    }
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> MonoNs {
        (**self).now()
    }

    fn wait_until(&self, deadline: MonoNs) {
        (**self).wait_until(deadline);
    }

    fn wall_since_epoch(&self) -> Duration {
        (**self).wall_since_epoch()
    }
}

/// A calendar date and time of day in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc {
    /// Year, from 1970.
    pub year: u64,
    /// Month, 1 to 12.
    pub month: u8,
    /// Day of the month, 1 to 31.
    pub day: u8,
    /// Hour, 0 to 23.
    pub hour: u8,
    /// Minute, 0 to 59.
    pub minute: u8,
    /// Second, 0 to 59: UNIX time has no leap seconds.
    pub second: u8,
    /// Day of the week, 0 is Sunday.
    pub weekday: u8,
}

impl Utc {
    /// Splits `seconds` since the UNIX epoch into a date of the proleptic Gregorian calendar.
    #[must_use]
    pub const fn from_unix_seconds(seconds: u64) -> Self {
        let days = seconds / 86_400;
        let of_day = seconds % 86_400;
        // Count from 1 March 0000, so that the leap day is the last day of a year and every 400 years are alike.
        let shifted = days + DAYS_TO_1970;
        let era = shifted / DAYS_PER_ERA;
        let day_of_era = shifted % DAYS_PER_ERA;
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // Months from March alternate 31 and 30 days, which (153 m + 2) / 5 follows.
        let month_from_march = (5 * day_of_year + 2) / 153;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        Self {
            year: era * 400 + year_of_era + (month <= 2) as u64,
            month: month as u8,
            day: (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u8,
            hour: (of_day / 3_600) as u8,
            minute: (of_day / 60 % 60) as u8,
            second: (of_day % 60) as u8,
            weekday: ((days + 4) % 7) as u8,
        }
    }
}

const NS_PER_SECOND: u64 = 1_000_000_000;
const DAYS_PER_ERA: u64 = 146_097;
/// From 1 March 0000 to 1 January 1970.
const DAYS_TO_1970: u64 = 719_468;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_at_the_edges_of_the_calendar() {
        // (seconds, y-m-d h:m:s weekday), from `date -u -d @SECONDS +'%F %T %w'`.
        let rows = [
            (0, "1970-01-01 00:00:00 4"),
            (86_399, "1970-01-01 23:59:59 4"),
            (951_782_399, "2000-02-28 23:59:59 1"),
            (951_782_400, "2000-02-29 00:00:00 2"),
            (951_868_800, "2000-03-01 00:00:00 3"),
            (1_709_164_800, "2024-02-29 00:00:00 4"),
            (1_735_689_599, "2024-12-31 23:59:59 2"),
            (1_735_689_600, "2025-01-01 00:00:00 3"),
            (4_107_542_400, "2100-03-01 00:00:00 1"),
        ];
        for (seconds, expected) in rows {
            let Utc { year, month, day, hour, minute, second, weekday } = Utc::from_unix_seconds(seconds);
            let got = format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} {weekday}");
            assert_eq!(got, expected, "{seconds}");
        }
    }

    #[test]
    fn a_virtual_clock_never_goes_back_and_its_clones_share_time() {
        let clock = VirtualClock::new(100);
        let other = clock.clone();
        other.advance(Duration::from_millis(1_500));
        let late = clock.now();
        assert_eq!(clock.wall_seconds(), 101);
        clock.wait_until(MonoNs::from_raw(5));
        assert_eq!(clock.now(), late);
    }

    #[test]
    fn a_counting_clock_counts_reads_of_the_monotonic_clock_only() {
        let clock = CountingClock::new(VirtualClock::new(0));
        assert_eq!(clock.reads(), 0);
        let now = clock.now();
        clock.wait_until(now.saturating_add(Duration::from_secs(1)));
        let _ = clock.wall_seconds();
        assert_eq!(clock.reads(), 1);
    }

    #[test]
    fn the_system_clock_waits_until_the_deadline() {
        let deadline = SystemClock.now().saturating_add(Duration::from_millis(2));
        SystemClock.wait_until(deadline);
        assert!(SystemClock.now() >= deadline);
        assert!(SystemClock.wall_seconds() > 1_700_000_000);
    }
}
