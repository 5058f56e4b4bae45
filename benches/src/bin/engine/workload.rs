//! What is measured, and the ratios to reach.

/// One batch: `seqs` prompts, computed in one step, then one token for each in every further step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    /// Sequences that run at once.
    pub(crate) seqs: u32,
    /// Length of each prompt, in tokens.
    pub(crate) prompt_tokens: u32,
    /// Steps of decoding, which alone are timed; `None` times the prompts.
    pub(crate) output_tokens: Option<u32>,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// As a person would say it.
    pub(crate) name: &'static str,
    /// What is run.
    pub(crate) workload: Workload,
    /// Ratios to reach.
    pub(crate) targets: Targets,
}

/// Least ratios of our tokens per second to the peer's; `None` where none is set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Targets {
    /// On the same file, for the first release of the backend.
    pub(crate) first: Option<f64>,
    /// On the same file, in the end.
    pub(crate) same_file: Option<f64>,
    /// To the peer on the file type that suits it best, in the end.
    pub(crate) best_file: Option<f64>,
}

/// The workloads, in the table's order.
pub(crate) const ROWS: [Row; 5] = [
    Row {
        name: "prefill 512",
        workload: Workload { seqs: 1, prompt_tokens: 512, output_tokens: None },
        targets: Targets { first: Some(1.3), same_file: Some(5.5), best_file: Some(2.2) },
    },
    Row {
        name: "decode B=1",
        workload: decode(1),
        targets: Targets { first: Some(1.3), same_file: Some(1.9), best_file: Some(1.35) },
    },
    Row {
        name: "decode B=4",
        workload: decode(4),
        targets: Targets { first: Some(1.3), same_file: None, best_file: None },
    },
    Row {
        name: "decode B=8",
        workload: decode(8),
        targets: Targets { first: None, same_file: Some(4.0), best_file: Some(2.7) },
    },
    Row {
        name: "decode B=16",
        workload: decode(16),
        targets: Targets { first: Some(1.3), same_file: Some(4.3), best_file: Some(2.4) },
    },
];

const fn decode(seqs: u32) -> Workload {
    Workload { seqs, prompt_tokens: 128, output_tokens: Some(64) }
}
