//! Rounds into a Markdown table.

use std::fmt;

use uring_serve_benches::stats::Summary;

use crate::CONTENDERS;
use crate::workload::ROWS;

/// What all rounds gave.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// Tokens per second by row, contender and round.
    pub(crate) speeds: [[Vec<f64>; CONTENDERS]; ROWS.len()],
    /// Share of the machine that others used, by row and measurement.
    pub(crate) others: [Vec<f64>; ROWS.len()],
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds = self.speeds[0][0].len();
        writeln!(
            f,
            "Tokens per second; median (least to most) of {rounds} interleaved rounds; ratios within a round.\n"
        )?;
        writeln!(f, "{HEADER}\n|---|---|---|---|---|---|---|---|---|")?;
        for ((row, speeds), others) in ROWS.iter().zip(&self.speeds).zip(&self.others) {
            let [ours, same_file, best_file] = speeds;
            let (same_ratio, best_ratio) = (ratios(ours, same_file), ratios(ours, best_file));
            let disturbed = Summary::of(others).is_none_or(|others| others.median > DISTURBED);
            let target = |least, ratios| Target { least, ratios, disturbed };
            let percent: Vec<f64> = others.iter().map(|share| 100.0 * share).collect();
            writeln!(
                f,
                "| {} | {} | {} | {} | {}, {} | {} | {} | {} | {} |",
                row.name,
                Spread(ours, 0),
                Spread(same_file, 0),
                Spread(&same_ratio, 2),
                target(row.targets.first, &same_ratio),
                target(row.targets.same_file, &same_ratio),
                Spread(best_file, 0),
                Spread(&best_ratio, 2),
                target(row.targets.best_file, &best_ratio),
                Spread(&percent, 0),
            )?;
        }
        write!(
            f,
            "\nThe last column is the share of the machine that other processes used. Where its median is above \
             {:.0} %, no target is judged: a spin barrier that waits for a core tells of the scheduler.",
            100.0 * DISTURBED
        )
    }
}

fn ratios(ours: &[f64], peer: &[f64]) -> Vec<f64> {
    ours.iter().zip(peer).map(|(ours, peer)| ours / peer).collect()
}

/// Rounds as `median (least to most)`, with so many digits.
struct Spread<'a>(&'a [f64], usize);

impl fmt::Display for Spread<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(rounds, digits) = *self;
        match Summary::of(rounds) {
            Some(Summary { median, least, most }) => {
                write!(f, "{median:.digits$} ({least:.digits$} to {most:.digits$})")
            }
            None => f.write_str("not known"),
        }
    }
}

/// A target, and whether the median reaches it.
struct Target<'a> {
    least: Option<f64>,
    ratios: &'a [f64],
    disturbed: bool,
}

impl fmt::Display for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(least), Some(ratio)) = (self.least, Summary::of(self.ratios)) else {
            return f.write_str("none");
        };
        let verdict = match ratio.median >= least {
            _ if self.disturbed => "not judged",
            true => "met",
            false => "not met",
        };
        write!(f, "{least} {verdict}")
    }
}

const HEADER: &str = "| | ours | llama.cpp, same file | ratio | to reach: first, end | llama.cpp, Q4_0 | ratio | to reach \
                      | others, % |";

/// Share of the machine from which on others disturb a row.
const DISTURBED: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_from_its_value_on() {
        // (target, ratios, disturbed, text)
        let rows: [(Option<f64>, &[f64], bool, &str); 6] = [
            (Some(1.3), &[1.3], false, "1.3 met"),
            (Some(1.3), &[1.29], false, "1.3 not met"),
            (Some(1.3), &[0.1, 9.0, 1.31], false, "1.3 met"),
            (Some(1.3), &[9.0], true, "1.3 not judged"),
            (None, &[2.0], false, "none"),
            (Some(1.3), &[], false, "none"),
        ];
        for (least, ratios, disturbed, text) in rows {
            assert_eq!(Target { least, ratios, disturbed }.to_string(), text);
        }
    }

    #[test]
    fn a_row_shows_medians_spread_and_ratios_within_rounds() {
        let speeds = [vec![300.0, 200.0, 100.0], vec![100.0, 100.0, 100.0], vec![150.0, 100.0, 200.0]];
        // (others, the end of the row)
        let quiet = "1.3 met, 1.9 met | 150 (100 to 200) | 2.00 (0.50 to 2.00) | 1.35 met | 10 (0 to 50) |";
        let crowded = "1.3 not judged, 1.9 not judged | 150 (100 to 200) | 2.00 (0.50 to 2.00) | 1.35 not judged | 11 (0 to 50) |";
        for (others, end) in [([0.0, 0.5, 0.1], quiet), ([0.0, 0.5, 0.11], crowded)] {
            let mut measured = Measured::default();
            measured.speeds[1] = speeds.clone();
            measured.others[1] = others.to_vec();
            let text = measured.to_string();
            let row =
                format!("| decode B=1 | 200 (100 to 300) | 100 (100 to 100) | 2.00 (1.00 to 3.00) | {end}");
            assert!(text.lines().any(|line| line == row), "{text}");
        }
    }
}
