//! The JSONL file survives what happens to files and processes (product contract 5.6).

#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use uring_serve::clock::SystemClock;
use uring_serve::journal::{Entry, Journal, JournalHandle, Line};
use uring_serve_core::gate::{self, File, Policy};
use uring_serve_core::metrics::Record;

#[test]
fn closing_writes_everything_that_was_queued() {
    let dir = TestDir::new("close");
    let journal = start(&dir.0);
    let (handle, path) = (journal.handle(), journal.path().to_owned());
    assert_eq!(fs::read(&path).unwrap(), b"", "the file is there before the first record");
    submit(&handle, 0..1_000);
    assert!(journal.close());
    assert_eq!(numbers_of(&path), (0..1_000).collect::<Vec<_>>());
    let counters = handle.counters();
    assert_eq!((counters.written(), counters.dropped(), counters.errors()), (1_000, 0, 0));
    assert!(counters.last_write().is_some());
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let pid = std::process::id();
    assert!(name.starts_with("perf_metrics-server-") && name.contains(&format!("-{pid}-")), "{name}");
    assert!(name.ends_with("Z.jsonl"), "{name}");
}

#[test]
fn a_directory_that_goes_away_and_comes_back_is_written_to_again() {
    let dir = TestDir::new("gone");
    let journal = start(&dir.0);
    let (handle, path) = (journal.handle(), journal.path().to_owned());
    submit_and_wait(&handle, 1);
    assert_eq!(numbers_of(&path), [1]);

    fs::remove_dir_all(&dir.0).unwrap();
    submit_and_wait(&handle, 2);
    submit_and_wait(&handle, 3);
    assert!(!dir.0.exists(), "the directory is its owner's to make again");
    let counters = handle.counters();
    assert_eq!((counters.written(), counters.dropped(), counters.errors()), (1, 2, 2));

    fs::create_dir_all(&dir.0).unwrap();
    submit_and_wait(&handle, 4);
    submit_and_wait(&handle, 5);
    assert_eq!(fs::read_to_string(&path).unwrap(), "{\"n\":4,\"dropped_before\":2}\n{\"n\":5}\n");
    assert!(journal.close());
}

#[test]
fn a_rotated_file_is_left_and_a_new_one_begun() {
    let dir = TestDir::new("rotated");
    let journal = start(&dir.0);
    let (handle, path) = (journal.handle(), journal.path().to_owned());
    submit_and_wait(&handle, 1);
    let rotated = path.with_extension("1");
    fs::rename(&path, &rotated).unwrap();
    submit_and_wait(&handle, 2);
    assert_eq!((numbers_of(&rotated), numbers_of(&path)), (vec![1], vec![2]));
    assert!(journal.close());
}

#[test]
fn a_directory_that_cannot_be_made_costs_records_only() {
    let dir = TestDir::new("blocked");
    let blocked = dir.0.join("file/below");
    fs::write(dir.0.join("file"), "not a directory").unwrap();
    let journal = start(&blocked);
    let handle = journal.handle();
    submit_and_wait(&handle, 1);
    assert_eq!(handle.counters().written(), 0);
    fs::remove_file(dir.0.join("file")).unwrap();
    fs::create_dir_all(&blocked).unwrap();
    submit_and_wait(&handle, 2);
    assert_eq!(numbers_of(journal.path()), [2]);
    assert!(journal.close());
}

#[test]
fn an_entry_is_the_core_s_line_and_carries_the_gap() {
    let policy = Policy { file: File::On, ..Policy::default() };
    for (dropped_before, expected) in [(0, None), (7, Some(7))] {
        let grant = gate::decide(policy, std::iter::empty()).file.expect("the policy writes files");
        let record = Record { request_id: Some(3), ..Record::default() };
        let mut line = Vec::new();
        Entry { grant, record }.write_line(dropped_before, &mut line);
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let line: serde_json::Value = serde_json::from_slice(&line).unwrap();
        assert_eq!((line["request_id"].as_u64(), line["dropped_before"].as_u64()), (Some(3), expected));
    }
}

#[test]
fn kill_9_tears_at_most_the_last_line() {
    let dir = TestDir::new("kill");
    let mut writer = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "writes_until_killed", "--ignored"])
        .env(DIR_VARIABLE, &dir.0)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut path = None;
    while path.as_ref().is_none_or(|path| fs::metadata(path).unwrap().len() < 1 << 20) {
        assert!(writer.try_wait().unwrap().is_none(), "the writer ended by itself");
        path = fs::read_dir(&dir.0).unwrap().next().map(|entry| entry.unwrap().path());
        std::thread::yield_now();
    }
    // SIGKILL.
    writer.kill().unwrap();
    writer.wait().unwrap();
    let text = fs::read_to_string(path.unwrap()).unwrap();
    let whole = &text[..=text.rfind('\n').unwrap()];
    let (mut next, mut dropped) = (0, 0);
    for line in whole.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect(line);
        dropped += line["dropped_before"].as_u64().unwrap_or(0);
        let n = line["n"].as_u64().unwrap();
        assert!(n >= next, "lines are in order");
        next = n + 1;
    }
    println!(
        "{} whole lines, {} bytes torn, {dropped} drops told",
        whole.lines().count(),
        text.len() - whole.len()
    );
}

/// Not a test of its own: the process that `kill_9_tears_at_most_the_last_line` starts and kills.
#[test]
#[ignore = "runs until it is killed"]
fn writes_until_killed() {
    let dir = std::env::var_os(DIR_VARIABLE).expect("started by another test");
    let journal = start(Path::new(&dir));
    let handle = journal.handle();
    for n in 0.. {
        handle.submit(Number(n));
    }
}

const DIR_VARIABLE: &str = "URING_SERVE_TEST_JOURNAL_DIR";

struct Number(u64);

impl Line for Number {
    fn write_line(self, dropped_before: u64, out: &mut Vec<u8>) {
        match dropped_before {
            0 => writeln!(out, "{{\"n\":{}}}", self.0).unwrap(),
            lost => writeln!(out, "{{\"n\":{},\"dropped_before\":{lost}}}", self.0).unwrap(),
        }
    }
}

fn start(dir: &Path) -> Journal<Number> {
    Journal::start(dir, "server", Arc::new(SystemClock)).unwrap()
}

fn submit(handle: &JournalHandle<Number>, numbers: std::ops::Range<u64>) {
    numbers.for_each(|n| handle.submit(Number(n)));
}

/// Returns once the record is written or lost, so that the next one is a batch of its own.
fn submit_and_wait(handle: &JournalHandle<Number>, n: u64) {
    let counters = handle.counters();
    let before = counters.written() + counters.dropped();
    handle.submit(Number(n));
    while counters.written() + counters.dropped() == before {
        std::thread::yield_now();
    }
}

fn numbers_of(path: &Path) -> Vec<u64> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["n"].as_u64().unwrap())
        .collect()
}

/// A directory of its own, removed at the end.
struct TestDir(PathBuf);

impl TestDir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("uring-serve-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
