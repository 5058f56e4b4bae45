//! Points and offsets as values, handed in by whoever owns a clock.
//!
//! A [`MonoNs`] is a reading of this process' own clock. A [`ReportNs`] is what is told to others: such a reading moved
//! by the process' [`ClockOffset`]. The two do not compare, so two hosts' clocks cannot be mixed by accident.

use core::time::Duration;

/// A point on the driver's monotonic clock, in nanoseconds since that clock's own epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonoNs(u64);

impl MonoNs {
    /// Wraps a raw reading, in nanoseconds.
    #[must_use]
    pub const fn from_raw(ns: u64) -> Self {
        Self(ns)
    }

    /// Returns the raw reading, in nanoseconds.
    #[must_use]
    pub const fn as_raw(self) -> u64 {
        self.0
    }

    /// Returns the time from `earlier` to `self`, or `None` if `earlier` is the later one.
    #[must_use]
    pub const fn checked_since(self, earlier: Self) -> Option<Duration> {
        match self.0.checked_sub(earlier.0) {
            Some(ns) => Some(Duration::from_nanos(ns)),
            None => None,
        }
    }

    /// Returns the point `after` later, saturating at the end of the clock's range.
    #[must_use]
    pub const fn saturating_add(self, after: Duration) -> Self {
        let ns = after.as_nanos();
        let ns = if ns > u64::MAX as u128 { u64::MAX } else { ns as u64 };
        Self(self.0.saturating_add(ns))
    }
}

/// A reported point: nanoseconds on the clock that the readers of a record share.
///
/// Signed, because an offset may move a point before that clock's zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReportNs(i64);

impl ReportNs {
    /// Wraps a raw value, in nanoseconds.
    #[must_use]
    pub const fn from_raw(ns: i64) -> Self {
        Self(ns)
    }

    /// Returns the raw value, in nanoseconds.
    #[must_use]
    pub const fn as_raw(self) -> i64 {
        self.0
    }

    /// Converts seconds, as JSON carries them, to the nearest nanosecond. `None` for what is not finite or out of range.
    ///
    /// A point within 97 days of the clock's zero (2^23 s) comes back unchanged; a later one may differ by the `f64`'s
    /// own spacing, which is 1.9 ns up to 194 days.
    #[must_use]
    pub fn from_seconds(seconds: f64) -> Option<Self> {
        nanoseconds(seconds).map(Self)
    }

    /// Returns the time from `earlier` to `self` in nanoseconds, or `None` if `earlier` is the later one.
    #[must_use]
    pub const fn checked_since(self, earlier: Self) -> Option<u64> {
        if self.0 < earlier.0 { None } else { Some(self.0.abs_diff(earlier.0)) }
    }

    /// Returns the point `ns` nanoseconds later, or `None` past the end of the range.
    #[must_use]
    pub const fn checked_add(self, ns: u64) -> Option<Self> {
        match self.0.checked_add_unsigned(ns) {
            Some(ns) => Some(Self(ns)),
            None => None,
        }
    }
}

/// What is added to a clock to get another one, in signed nanoseconds. The default is no offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffset(i64);

impl ClockOffset {
    /// Wraps a raw offset, in nanoseconds.
    #[must_use]
    pub const fn from_raw(ns: i64) -> Self {
        Self(ns)
    }

    /// Returns the raw offset, in nanoseconds.
    #[must_use]
    pub const fn as_raw(self) -> i64 {
        self.0
    }

    /// Converts the seconds of `POST /steady_clock_offset`. `None` for what is not finite or out of range.
    #[must_use]
    pub fn from_seconds(seconds: f64) -> Option<Self> {
        nanoseconds(seconds).map(Self)
    }

    /// Returns the reported point of a reading of this process' clock (UF 1.9), saturating at the range's ends.
    #[must_use]
    pub const fn to_reference(self, at: MonoNs) -> ReportNs {
        let ns = if at.0 > i64::MAX as u64 { i64::MAX } else { at.0 as i64 };
        ReportNs(ns.saturating_add(self.0))
    }

    /// Moves a point that a peer reported, saturating at the range's ends.
    #[must_use]
    pub const fn shift(self, at: ReportNs) -> ReportNs {
        ReportNs(at.0.saturating_add(self.0))
    }
}

/// The four times of one request to a peer that reports its own two (UF 1.9 and 4.10; RFC 5905 §8 has the formula).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockExchange {
    /// We sent the request, on our clock.
    pub originate: ReportNs,
    /// The peer received it, on its clock.
    pub receive: ReportNs,
    /// The peer sent the response's head, on its clock.
    pub transmit: ReportNs,
    /// The head arrived here, on our clock.
    pub destination: ReportNs,
}

impl ClockExchange {
    /// Returns what turns the peer's times into ours: minus the mean of the two one-way differences.
    #[must_use]
    pub const fn to_ours(self) -> ClockOffset {
        let there = self.receive.0 as i128 - self.originate.0 as i128;
        let back = self.transmit.0 as i128 - self.destination.0 as i128;
        // The mean of two differences of `i64`s is within twice its range.
        let offset = -((there + back) / 2);
        ClockOffset(if offset > i64::MAX as i128 {
            i64::MAX
        } else if offset < i64::MIN as i128 {
            i64::MIN
        } else {
            offset as i64
        })
    }

    /// Returns the round trip without the peer's own share, in nanoseconds; the offset is off by at most half of it.
    /// `None` when the four times contradict each other.
    #[must_use]
    pub const fn round_trip(self) -> Option<u64> {
        let (Some(ours), Some(theirs)) =
            (self.destination.checked_since(self.originate), self.transmit.checked_since(self.receive))
        else {
            return None;
        };
        ours.checked_sub(theirs)
    }
}

/// Rounds seconds to whole nanoseconds, halves away from zero.
fn nanoseconds(seconds: f64) -> Option<i64> {
    if !seconds.is_finite() {
        return None;
    }
    // Whole seconds first: their difference is exact, and the product of the rest is far from losing a nanosecond.
    // A cast saturates, and the product of a saturated one overflows.
    let whole = seconds as i64;
    let rest = (seconds - whole as f64) * 1e9;
    let rest = if rest < 0.0 { rest - 0.5 } else { rest + 0.5 };
    whole.checked_mul(1_000_000_000)?.checked_add(rest as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn mono(ns: u64) -> MonoNs {
        MonoNs::from_raw(ns)
    }

    const fn report(ns: i64) -> ReportNs {
        ReportNs::from_raw(ns)
    }

    #[test]
    fn an_earlier_point_is_no_duration() {
        assert_eq!(mono(5).checked_since(mono(5)), Some(Duration::ZERO));
        assert_eq!(mono(5).checked_since(mono(6)), None);
        assert_eq!(report(-5).checked_since(report(-7)), Some(2));
        assert_eq!(report(-7).checked_since(report(-5)), None);
        assert_eq!(report(i64::MAX).checked_since(report(i64::MIN)), Some(u64::MAX));
    }

    #[test]
    fn offsets_move_reported_points_only() {
        // (name, offset in seconds, reading in ns, reported ns): the literals of UF 1.9 and C1.
        let rows = [
            ("now is source plus offset", 2.0, 10_000_000_000, 12_000_000_000),
            ("any time of the source", 2.0, 20_000_000_000, 22_000_000_000),
            ("a new offset replaces the old", -3.0, 10_000_000_000, 7_000_000_000),
            ("an offset may move a point before zero", -3.0, 1_000_000_000, -2_000_000_000),
            ("no offset", 0.0, 1, 1),
        ];
        for (name, seconds, reading, expected) in rows {
            let offset = ClockOffset::from_seconds(seconds).expect("finite");
            assert_eq!(offset.to_reference(mono(reading)), report(expected), "{name}");
        }
        assert_eq!(ClockOffset::from_raw(1).to_reference(mono(u64::MAX)), report(i64::MAX));
    }

    #[test]
    fn seconds_round_to_the_nearest_nanosecond() {
        let rows = [
            (0.0, Some(0)),
            (1.05, Some(1_050_000_000)),
            (-1.05, Some(-1_050_000_000)),
            (0.000_000_000_6, Some(1)),
            (8_388_607.123_456_789, Some(8_388_607_123_456_789)),
            (f64::NAN, None),
            (f64::INFINITY, None),
            (1e10, None),
            (-1e10, None),
            (f64::MAX, None),
        ];
        for (seconds, expected) in rows {
            assert_eq!(ReportNs::from_seconds(seconds), expected.map(ReportNs), "{seconds}");
        }
    }

    #[test]
    fn an_exchange_gives_offset_and_error_bound() {
        let exchange = |delta: i64| ClockExchange {
            originate: report(100_000_000_000),
            receive: report(100_050_000_000 + delta),
            transmit: report(100_350_000_000 + delta),
            destination: report(100_400_000_000),
        };
        for delta in [0, 1_000_000_000_000, -1_000_000_000_000] {
            assert_eq!(exchange(delta).to_ours(), ClockOffset::from_raw(-delta));
            assert_eq!(exchange(delta).round_trip(), Some(100_000_000));
        }
        let backwards = ClockExchange { destination: report(0), ..exchange(0) };
        assert_eq!(backwards.round_trip(), None);
        let far = ClockExchange {
            originate: report(i64::MAX),
            receive: report(i64::MIN),
            transmit: report(i64::MIN),
            destination: report(i64::MAX),
        };
        assert_eq!(far.to_ours(), ClockOffset::from_raw(i64::MAX));
    }
}
