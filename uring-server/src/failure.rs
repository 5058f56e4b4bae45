//! How the binary ends when it cannot go on.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// What happened and what to do about it: two sentences for the person at the terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    what: String,
    hint: String,
    exit: u8,
}

impl Failure {
    /// The work failed: exit code 1.
    #[must_use]
    pub fn run(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { what: what.into(), hint: hint.into(), exit: 1 }
    }

    /// The command line or its YAML is wrong: exit code 2.
    #[must_use]
    pub fn usage(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { what: what.into(), hint: hint.into(), exit: 2 }
    }

    /// The host refuses a thread: exit code 1.
    pub(crate) fn thread(error: io::Error) -> Self {
        Self::run(format!("cannot start a thread: {error}"), "raise the limit on processes (`ulimit -u`)")
    }

    /// Names the file in which the wrong value stands.
    pub(crate) fn within(mut self, path: &Path) -> Self {
        self.what = format!("{}: {}", path.display(), self.what);
        self
    }

    /// Returns the exit code.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.exit)
    }
}

/// `error: what`, a blank line, `hint: what to do`.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}\n\nhint: {}", self.what, self.hint)
    }
}

impl std::error::Error for Failure {}
