//! The house's own rules, where the compiler does not hold them: which module of `core` may use which, and which files
//! may be unsafe.

#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn a_module_of_core_uses_only_modules_to_its_left() {
    let mut uses = 0;
    for (path, source) in sources("core/src").into_iter().filter(|(path, _)| path != "core/src/lib.rs") {
        let own = module_of(path.trim_start_matches("core/src/"));
        let layer = layer_of(own).unwrap_or_else(|| panic!("{path} is in no layer"));
        for used in code_of(&source).flat_map(|line| line.split("crate::").skip(1)).map(module_of) {
            let allowed = used == own || layer_of(used).is_some_and(|left| left < layer);
            assert!(allowed, "{path} uses crate::{used}");
            uses += 1;
        }
    }
    assert!(uses > 30, "{uses} uses found: has their form changed?");
}

#[test]
fn unsafe_code_stands_only_where_contributing_says() {
    let rule = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    for name in ["ring.rs", "bufs.rs", "token.rs", "slots.rs", "kernels/src/cpu/*", "mmap.rs"] {
        assert!(rule.contains(&format!("`{name}`")), "{name}");
    }
    let may = |path: &str| {
        let in_front_end = ["ring.rs", "bufs.rs", "token.rs", "slots.rs"]
            .iter()
            .any(|name| path == format!("uring-server/src/{name}"));
        in_front_end || path.starts_with("kernels/src/cpu/") || path.ends_with("/mmap.rs")
    };
    let mut blocks = 0;
    for (path, source) in CRATES.iter().flat_map(|dir| sources(dir)) {
        let here = code_of(&source)
            .flat_map(|line| line.split("unsafe ").skip(1))
            .filter(|rest| UNSAFE_BEGINS.iter().any(|begin| rest.starts_with(begin)))
            .count();
        assert!(here == 0 || may(&path), "{path} has unsafe code");
        blocks += here;
    }
    assert!(blocks > 20, "{blocks} found: has their form changed?");
}

/// Every source file below a folder, by its path from the root.
fn sources(dir: &str) -> Vec<(String, String)> {
    let mut folders: Vec<PathBuf> = vec![root().join(dir)];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
                found.push((name, fs::read_to_string(path).unwrap()));
            }
        }
    }
    assert!(!found.is_empty(), "{dir}");
    found
}

/// The lines that are not comments.
fn code_of(source: &str) -> impl Iterator<Item = &str> {
    source.lines().map(str::trim_start).filter(|line| !line.starts_with("//"))
}

/// The name at the front of a path, of files or of items.
fn module_of(path: &str) -> &str {
    path.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap()
}

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// As ARCHITECTURE.md has them.
const LAYERS: [&[&str]; 7] = [
    &["time", "limits"],
    &["http1", "sched"],
    &["gate"],
    &["metrics"],
    &["headers"],
    &["sse", "jsonl"],
    &["fuzzing"],
];
const CRATES: [&str; 7] = [
    "core/src",
    "kernels/src",
    "kernels/examples",
    "uring-server/src",
    "tests/src",
    "tests/tests",
    "benches/src",
];
/// What follows the keyword where it means something.
const UNSAFE_BEGINS: [&str; 5] = ["{", "extern", "fn", "impl", "trait"];
