//! What tests need from outside, fetched once into `target/` by the scripts in `tests/setup/`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Path of the real model, SmolLM2-135M-Instruct in Q4_1.
///
/// # Panics
/// When the script fails: its stderr says what is missing.
pub fn model() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| run_script("model.sh"))
}

/// Path of a Python interpreter that has the client libraries.
///
/// # Panics
/// When the script fails: its stderr says what is missing.
pub fn python() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| run_script("python.sh"))
}

/// Root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace")
}

/// Cargo's target directory.
///
/// # Panics
/// When the program that runs is no test of Cargo's.
pub fn target() -> PathBuf {
    // A test's executable is at `<target>/<profile>/deps/<name>`.
    let test = std::env::current_exe().expect("a test has a path");
    test.ancestors().nth(3).expect("<target>/<profile>/deps").to_owned()
}

fn run_script(name: &str) -> PathBuf {
    let script = root().join("tests/setup").join(name);
    let output = Command::new("sh")
        .arg(&script)
        .env("CARGO_TARGET_DIR", target())
        .stderr(Stdio::inherit())
        .output()
        .expect("sh runs");
    assert!(output.status.success(), "{name} failed: {}; its stderr says why", output.status);
    let text = String::from_utf8(output.stdout).expect("a path in UTF-8");
    let path = PathBuf::from(text.lines().last().expect("the script prints a path").trim());
    assert!(path.exists(), "{name} printed {}, which does not exist", path.display());
    path
}
