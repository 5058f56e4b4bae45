//! Server policy and request header in, grants out.

/// Name of the request header that asks for metrics (UF 1.1). Compared without case.
pub const RETURN_METRICS: &str = "X-TRTLLM-return-metrics";
/// Name of the request header that asks for a budget in bytes, and with it for our own tokens (product contract 5.3).
pub const METRICS_BUDGET: &str = "X-TRTLLM-Metrics-Budget";

/// Proof that this response may carry metrics. Only [`decide`] makes one.
#[derive(Clone, Copy, Debug)]
pub struct ResponseGrant(());

/// Proof that this request's record goes to the file. Only [`decide`] makes one.
#[derive(Clone, Copy, Debug)]
pub struct FileGrant(());

/// Proof that at least one of the two was granted, so that marks may be collected.
#[derive(Clone, Copy, Debug)]
pub struct Collect(());

/// What the deployment allows, fixed at start-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// `--return-perf-metrics`: headers and the SSE event, for requests that ask.
    pub response: Response,
    /// `--perf-metrics-output-dir`: a JSONL line for every request.
    pub file: File,
}

/// Whether responses may carry metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Response {
    /// Only for requests that ask.
    AllowOnRequest,
    /// Never. The default.
    #[default]
    Deny,
}

/// Whether records are written to a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum File {
    /// No file. The default.
    #[default]
    Off,
    /// Every request.
    On,
}

/// The two independent capabilities of one request. The default is neither.
#[derive(Clone, Copy, Debug, Default)]
pub struct Grants {
    /// Present when the response may carry metrics.
    pub response: Option<ResponseGrant>,
    /// Present when the record goes to the file.
    pub file: Option<FileGrant>,
}

impl Grants {
    /// Returns the proof that marks may be collected, or `None` when nobody would see them.
    #[must_use]
    pub const fn collect(&self) -> Option<Collect> {
        if self.response.is_some() || self.file.is_some() { Some(Collect(())) } else { None }
    }
}

/// Decides from the policy and every value of the request's [`RETURN_METRICS`] header.
///
/// A request asks if any value is exactly `1` between optional white space (UF 1.2). Anything else is no, never an error.
pub fn decide<'a>(policy: Policy, mut values: impl Iterator<Item = &'a [u8]>) -> Grants {
    Grants {
        response: match policy.response {
            Response::AllowOnRequest => values.any(|value| trim(value) == b"1").then_some(ResponseGrant(())),
            Response::Deny => None,
        },
        file: match policy.file {
            File::Off => None,
            File::On => Some(FileGrant(())),
        },
    }
}

/// The deployment's budgets, in bytes as [`crate::headers`] counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetPolicy {
    /// `--metrics-header-budget`: for the headers of a request that names none.
    pub headers: u32,
    /// `--metrics-event-budget`: for the event of a request that names none.
    pub event: u32,
    /// `--metrics-header-budget-max`: the most a request gets.
    pub requested_max: u32,
}

impl Default for BudgetPolicy {
    fn default() -> Self {
        Self {
            headers: crate::limits::METRICS_HEADER_BUDGET,
            event: crate::limits::METRICS_EVENT_BUDGET,
            requested_max: crate::limits::METRICS_HEADER_BUDGET_MAX,
        }
    }
}

/// How much one response may carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// For the headers, in bytes.
    pub headers: u32,
    /// For the event of a stream, in bytes.
    pub event: u32,
    /// Which tokens are written.
    pub tokens: Tokens,
}

/// Which tokens a response carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tokens {
    /// Ours too: the request named a budget.
    Extended,
    /// Upstream's only. The default.
    #[default]
    Upstream,
}

/// Chooses the budgets from every value of the request's [`METRICS_BUDGET`] header. The first value that is a decimal
/// number counts, cut to the policy's maximum; without one the policy's own budgets hold.
pub fn choose_budgets<'a>(policy: BudgetPolicy, mut values: impl Iterator<Item = &'a [u8]>) -> Budgets {
    match values.find_map(read_bytes) {
        None => Budgets { headers: policy.headers, event: policy.event, tokens: Tokens::Upstream },
        Some(bytes) => {
            let bytes = bytes.min(policy.requested_max);
            Budgets { headers: bytes, event: bytes, tokens: Tokens::Extended }
        }
    }
}

/// Reads a decimal number, saturating; `None` for anything but digits.
fn read_bytes(value: &[u8]) -> Option<u32> {
    let digits = trim(value);
    let all_digits = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    all_digits.then(|| {
        digits.iter().fold(0_u32, |n, digit| n.saturating_mul(10).saturating_add(u32::from(digit - b'0')))
    })
}

/// Strips optional white space: spaces and tabs, nothing else (RFC 9110 §5.6.3).
fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(response: Response, file: File, values: &[&str]) -> (bool, bool) {
        let grants = decide(Policy { response, file }, values.iter().map(|value| value.as_bytes()));
        assert_eq!(grants.collect().is_some(), grants.response.is_some() || grants.file.is_some());
        (grants.response.is_some(), grants.file.is_some())
    }

    #[test]
    fn every_row_of_the_table() {
        use File::{Off, On};
        use Response::{AllowOnRequest as Allow, Deny};
        // (return_perf_metrics, output_dir, header values, (headers or event, JSONL line)): UF 1.2.
        type Row = (Response, File, &'static [&'static str], (bool, bool));
        let rows: [Row; 8] = [
            (Deny, Off, &["1"], (false, false)),
            (Deny, Off, &[], (false, false)),
            (Deny, On, &["1"], (false, true)),
            (Deny, On, &[], (false, true)),
            (Allow, Off, &[], (false, false)),
            (Allow, Off, &["1"], (true, false)),
            (Allow, On, &[], (false, true)),
            (Allow, On, &["1"], (true, true)),
        ];
        for (response, file, values, expected) in rows {
            assert_eq!(decided(response, file, values), expected, "{response:?} {file:?} {values:?}");
        }
        assert_eq!(Policy::default(), Policy { response: Deny, file: Off });
        assert!(Grants::default().collect().is_none());
    }

    #[test]
    fn only_an_exact_one_asks() {
        let rows: &[(&[&str], bool)] = &[
            (&["1"], true),
            (&[" 1 "], true),
            (&["\t1"], true),
            (&["0", "1"], true),
            (&["1", "0"], true),
            (&["1", "1"], true),
            (&["true"], false),
            (&["yes"], false),
            (&["on"], false),
            (&["01"], false),
            (&["1.0"], false),
            (&["+1"], false),
            (&["1, 1"], false),
            (&["1,"], false),
            (&["\"1\""], false),
            (&["1\u{a0}"], false),
            (&["\u{b}1"], false),
            (&["0"], false),
            (&["2"], false),
            (&[""], false),
            (&[" "], false),
            (&["11"], false),
            (&["1 1"], false),
        ];
        for &(values, expected) in rows {
            assert_eq!(decided(Response::AllowOnRequest, File::Off, values).0, expected, "{values:?}");
        }
    }

    #[test]
    fn a_request_names_its_budget_up_to_the_maximum() {
        let policy = BudgetPolicy { headers: 100, event: 200, requested_max: 1_000 };
        let unnamed = Budgets { headers: 100, event: 200, tokens: Tokens::Upstream };
        let named = |bytes| Budgets { headers: bytes, event: bytes, tokens: Tokens::Extended };
        let rows: &[(&[&str], Budgets)] = &[
            (&[], unnamed),
            (&[""], unnamed),
            (&["-1"], unnamed),
            (&["+5"], unnamed),
            (&["5k"], unnamed),
            (&["5.0"], unnamed),
            (&["0x10"], unnamed),
            (&["5, 6"], unnamed),
            (&["0"], named(0)),
            (&[" 7\t"], named(7)),
            (&["0007"], named(7)),
            (&["999"], named(999)),
            (&["1000"], named(1_000)),
            (&["1001"], named(1_000)),
            (&["99999999999999999999999999"], named(1_000)),
            (&["x", "8", "9"], named(8)),
        ];
        for &(values, expected) in rows {
            let budgets = choose_budgets(policy, values.iter().map(|value| value.as_bytes()));
            assert_eq!(budgets, expected, "{values:?}");
        }
        let default = choose_budgets(BudgetPolicy::default(), core::iter::empty());
        assert_eq!((default.headers, default.event), (3_584, 81_920));
        let asked = choose_budgets(BudgetPolicy::default(), [b"81921".as_slice()].into_iter());
        assert_eq!((asked.headers, asked.event), (81_920, 81_920));
    }
}
