//! The committed fuzz corpus through its targets, on stable: `fuzz/corpus/<target>/*`.
//!
//! `FUZZ_SEEDS=write` writes the seeds anew: the suites' cases, and random bytes for targets that decode them.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::Value;
use uring_serve_core::fuzzing;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 7] = [
    ("headers_roundtrip", fuzzing::headers_roundtrip),
    ("http1_split", fuzzing::http1_split),
    ("jsonl_line", fuzzing::jsonl_line),
    ("sched_ops", fuzzing::sched_ops),
    ("server_timing", fuzzing::server_timing),
    ("sse_roundtrip", fuzzing::sse_roundtrip),
    ("sse_split", fuzzing::sse_split),
];

#[test]
fn every_corpus_file_holds() {
    for (name, target) in TARGETS {
        let mut count = 0;
        for path in files(&fuzz_dir().join("corpus").join(name)) {
            let data = fs::read(&path).unwrap();
            assert!(catch_unwind(|| target(&data)).is_ok(), "{}", path.display());
            count += 1;
        }
        assert!(count > 0, "{name} has no corpus");
        println!("{name}: {count} corpus files hold");
    }
}

#[test]
fn folders_files_manifest_and_functions_name_the_same_targets() {
    let names: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let stems = |folder: &str| -> BTreeSet<String> {
        let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
        files(&fuzz_dir().join(folder)).into_iter().map(stem).collect()
    };
    assert_eq!(stems("corpus"), names);
    assert_eq!(stems("fuzz_targets"), names);

    let manifest = fs::read_to_string(fuzz_dir().join("Cargo.toml")).unwrap();
    let bins = manifest.split("[[bin]]").skip(1).map(|bin| {
        let value =
            |key: &str| bin.split_once(&format!("\n{key} = \"")).unwrap().1.split('"').next().unwrap();
        assert_eq!(value("path"), format!("fuzz_targets/{}.rs", value("name")));
        value("name").to_owned()
    });
    assert_eq!(bins.collect::<BTreeSet<_>>(), names);
    for name in names {
        let source = fs::read_to_string(fuzz_dir().join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(source.contains(&format!("fuzzing::{name}(data)")), "{name} calls another target's function");
    }
}

#[test]
fn the_corpus_is_small_and_begins_with_the_suites() {
    let write = std::env::var("FUZZ_SEEDS").is_ok_and(|value| value == "write");
    for ((target, id), data) in seeds() {
        let path = fuzz_dir().join("corpus").join(target).join(id);
        if write {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &data).unwrap();
        }
        assert!(fs::read(&path).is_ok_and(|file| file == data), "{}: see FUZZ_SEEDS", path.display());
    }
    let folders = files(&fuzz_dir().join("corpus"));
    let bytes: u64 =
        folders.iter().flat_map(|folder| files(folder)).map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(bytes < CORPUS_BYTES_MAX, "{bytes} bytes");
}

/// Target and file name → bytes.
fn seeds() -> BTreeMap<(&'static str, String), Vec<u8>> {
    let mut seeds = BTreeMap::new();
    for (suite, member, target, prefix) in SUITES {
        let text = fs::read_to_string(tests_dir().join("suites").join(suite)).unwrap();
        let suite: Value = serde_json::from_str(&text).unwrap();
        for case in suite["cases"].as_array().unwrap() {
            let text = case[member].as_str().map(|text| vec![text]);
            let list = case[member].as_array().map(|list| list.iter().filter_map(Value::as_str).collect());
            let Some(lines) = text.or(list) else { continue };
            let line = lines.iter().flat_map(|line| BASE64_STANDARD.decode(line).unwrap());
            let data: Vec<u8> = prefix.iter().copied().chain(line).collect();
            if data.len() <= SEED_BYTES_MAX {
                seeds.insert((target, case["id"].as_str().unwrap().to_owned()), data);
            }
        }
    }
    for target in ["headers_roundtrip", "jsonl_line", "sched_ops", "sse_roundtrip"] {
        for seed in 0..RANDOM_SEEDS {
            seeds.insert((target, format!("random-{seed}")), random_bytes(seed));
        }
    }
    seeds
}

/// Suite, member with its bytes, target, and what the target decodes before them.
const SUITES: [(&str, &str, &str, &[u8]); 3] = [
    // Limits 16 KiB and 1 MiB, half-closed at the end, cut at two places.
    ("http1.json", "request_b64", "http1_split", &[3, 3, 1, 2, 0, 17, 0, 60]),
    // No limit, cut at two places.
    ("sse.json", "stream_b64", "sse_split", &[0, 2, 0, 5, 0, 30]),
    ("server-timing.json", "headers_b64", "server_timing", &[]),
];

/// Bytes of a SplitMix64 stream, more for later seeds.
fn random_bytes(seed: u64) -> Vec<u8> {
    let numbers = (1..=(seed + 1) * 8).map(|index| {
        let z = (seed << 32 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    });
    numbers.flat_map(u64::to_le_bytes).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
}

fn tests_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fuzz_dir() -> PathBuf {
    tests_dir().parent().unwrap().join("fuzz")
}

const CORPUS_BYTES_MAX: u64 = 300_000;
const SEED_BYTES_MAX: usize = 1024;
const RANDOM_SEEDS: u64 = 16;
