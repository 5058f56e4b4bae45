//! How much of the machine other processes took meanwhile, from the kernel's counts in `/proc`.

use std::fs;

/// Processor time so far, in clock ticks, over all cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineTime {
    /// Cores times time.
    all: u64,
    /// Spent in any process, in the kernel, or taken by the host.
    busy: u64,
    /// Spent in this process and in its children that have ended and been waited for.
    own: u64,
}

impl MachineTime {
    /// Reads it; `None` where `/proc` is not the kernel's.
    #[must_use]
    pub fn read() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?, &fs::read_to_string("/proc/self/stat").ok()?)
    }

    /// Returns the share, `0..=1`, of the machine that others used between an earlier reading and this one.
    ///
    /// A child that still runs counts as another.
    #[must_use]
    pub fn others_since(self, earlier: Self) -> f64 {
        let all = self.all.saturating_sub(earlier.all).max(1);
        let busy = self.busy.saturating_sub(earlier.busy);
        let own = self.own.saturating_sub(earlier.own);
        (busy.saturating_sub(own) as f64 / all as f64).min(1.0)
    }

    fn parse(stat: &str, own_stat: &str) -> Option<Self> {
        let cpu = stat.lines().next()?.strip_prefix("cpu ")?;
        // user, nice, system, idle, iowait, irq, softirq, steal; what follows is counted in user and nice already.
        let ticks: Vec<u64> = cpu.split_whitespace().take(8).map_while(|field| field.parse().ok()).collect();
        let &[_, _, _, idle, iowait, _, _, _] = ticks.as_slice() else { return None };
        let all = ticks.iter().sum();
        // The name, in parentheses, may hold anything. utime, stime, cutime, cstime are fields 14 to 17, state is 3.
        let (_, after_name) = own_stat.rsplit_once(')')?;
        let own: Vec<u64> =
            after_name.split_whitespace().skip(11).take(4).map_while(|field| field.parse().ok()).collect();
        (own.len() == 4).then(|| Self { all, busy: all - idle - iowait, own: own.iter().sum() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_have_what_is_busy_and_not_ours() {
        let own = |ticks: u64| format!("7 (a (b) c) R 1 7 7 0 -1 0 0 0 0 0 {ticks} 2 3 4 20 0 1");
        let read = |stat: &str, ticks| MachineTime::parse(stat, &own(ticks));
        let before = read("cpu  100 0 0 1000 50 0 0 0 9 9\ncpu0 1 1\n", 40).unwrap();
        assert_eq!(before, MachineTime { all: 1150, busy: 100, own: 49 });
        // (name, /proc/stat, own utime, share)
        let rows = [
            ("nothing passed", "cpu  100 0 0 1000 50 0 0 0 9 9", 40, 0.0),
            ("all ours", "cpu  200 0 0 1000 50 0 0 0 9 9", 140, 0.0),
            ("half ours, half idle", "cpu  150 0 0 1040 60 0 0 0 9 9", 90, 0.0),
            ("a quarter stolen", "cpu  175 0 0 1000 50 0 0 25 9 9", 115, 0.25),
            ("all others'", "cpu  100 40 60 1000 50 0 0 0 9 9", 40, 1.0),
            ("ours counted late", "cpu  100 0 0 1100 50 0 0 0 9 9", 90, 0.0),
        ];
        for (name, stat, ticks, share) in rows {
            assert_eq!(read(stat, ticks).unwrap().others_since(before), share, "{name}");
        }
    }

    #[test]
    fn what_is_no_kernel_count_reads_as_none() {
        for (stat, own) in [("", ""), ("cpu  1 2 3", "1 (x) R"), ("cpu  1 2 3 4 5 6 7 8", "1 (x) R 1 2")] {
            assert_eq!(MachineTime::parse(stat, own), None, "{stat:?} {own:?}");
        }
    }

    #[test]
    fn this_machine_has_counts() {
        let now = MachineTime::read().unwrap();
        assert!(now.all >= now.busy && now.busy > 0);
    }
}
