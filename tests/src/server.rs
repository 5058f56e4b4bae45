//! A server process of the product, started on a free port and ended with its owner.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use uring_serve::clock::{Clock as _, SystemClock};

use crate::http::Client;
use crate::setup;

/// Longest wait for a server to say that it listens.
const START_MAX: Duration = Duration::from_secs(60);
/// Longest wait for a server to exit after a signal.
const EXIT_MAX: Duration = Duration::from_secs(45);

/// A running server.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
    log: Arc<Mutex<String>>,
}

/// How to start one.
#[derive(Debug, Default)]
pub struct Options<'a> {
    /// Arguments after `serve`, without host and port.
    pub args: &'a [&'a str],
    /// Environment variables to set.
    pub env: &'a [(&'a str, &'a str)],
}

impl Server {
    /// Starts `serve ARGS --host 127.0.0.1 --port 0`.
    ///
    /// # Panics
    /// When it does not listen in time: the panic message holds its log.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(&Options { args, env: &[] })
    }

    /// Starts the simulated engine with the flags given.
    ///
    /// # Panics
    /// Like [`Self::start`].
    pub fn sim(args: &[&str]) -> Self {
        let mut all = vec!["--engine", "sim"];
        all.extend_from_slice(args);
        Self::start(&all)
    }

    /// Starts the real model with the flags given.
    ///
    /// # Panics
    /// Like [`Self::start`], or when the model cannot be fetched.
    pub fn real(args: &[&str]) -> Self {
        let model = setup::model().to_str().expect("a path in UTF-8");
        let mut all = vec![model];
        all.extend_from_slice(args);
        Self::start(&all)
    }

    /// Starts with an environment.
    ///
    /// # Panics
    /// Like [`Self::start`].
    pub fn start_with(options: &Options<'_>) -> Self {
        let mut child = Command::new(binary())
            .arg("serve")
            .args(options.args)
            .args(["--host", "127.0.0.1", "--port", "0"])
            .envs(options.env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let stderr = child.stderr.take().expect("piped");
        let log = Arc::new(Mutex::new(String::new()));
        let (found, address) = std::sync::mpsc::channel();
        let sink = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if let Some(rest) = line.split("listening on http://").nth(1) {
                    let _ = found.send(rest.trim().trim_end_matches('/').to_owned());
                }
                let mut log = sink.lock().expect("no panic while held");
                log.push_str(&line);
                log.push('\n');
            }
        });
        let Ok(text) = address.recv_timeout(START_MAX) else {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the server did not listen; its log:\n{}", log.lock().expect("no panic while held"));
        };
        let address = text.replace("localhost", "127.0.0.1").parse().expect("an address");
        Self { child, address, log }
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to stderr so far.
    ///
    /// # Panics
    /// Never while the reader thread lives.
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic while held").clone()
    }

    /// Sends a signal by number.
    ///
    /// # Panics
    /// When `kill` cannot be run.
    pub fn signal(&self, signal: i32) {
        let status = Command::new("kill")
            .arg(format!("-{signal}"))
            .arg(self.child.id().to_string())
            .status()
            .expect("kill runs");
        assert!(status.success(), "kill -{signal}");
    }

    /// Waits for it to exit.
    ///
    /// # Panics
    /// When it does not within the bound.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = SystemClock.now().saturating_add(EXIT_MAX);
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                return status;
            }
            assert!(SystemClock.now() < deadline, "the server did not exit; its log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// SIGTERM, then waits.
    ///
    /// # Panics
    /// Like [`Self::wait`].
    pub fn stop(mut self) -> ExitStatus {
        self.signal(15);
        self.wait()
    }

    /// Reads `/metrics` and returns the sum of the samples of `name`, over all labels.
    ///
    /// # Panics
    /// When there is none.
    pub fn sample(&self, name: &str) -> f64 {
        let page = Client::connect(self.address).get("/metrics");
        let values: Vec<f64> = page
            .text()
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
            .map(|line| line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number"))
            .collect();
        assert!(!values.is_empty(), "no {name} in\n{}", page.text());
        values.iter().sum()
    }

    /// Waits until nothing runs or waits and every KV block is free.
    ///
    /// # Panics
    /// When that does not come about within `at_most`.
    pub fn settle(&self, at_most: Duration) {
        eventually("an engine at rest", at_most, || {
            let busy =
                self.sample(RUNNING) + self.sample(WAITING) + self.sample("trtllm_kv_cache_used_blocks");
            (busy == 0.0).then_some(())
        });
        assert_eq!(self.sample("trtllm_kv_cache_free_blocks"), self.sample("trtllm_kv_cache_max_blocks"));
    }

    /// Resident memory, in KiB.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
    }

    /// Open file descriptors.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("it runs").count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Gauge of sequences that hold a slot.
pub const RUNNING: &str = "trtllm_num_requests_running";
/// Gauge of sequences that wait for a slot.
pub const WAITING: &str = "trtllm_num_requests_waiting";

/// Runs the binary until it ends by itself.
///
/// # Panics
/// When it does not within the bound.
pub fn run_to_end(args: &[&str]) -> Output {
    let mut child = Command::new(binary())
        .args(args)
        .env("RUST_LOG", "error")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let deadline = SystemClock.now().saturating_add(EXIT_MAX);
    while child.try_wait().expect("a child of ours").is_none() {
        if SystemClock.now() >= deadline {
            let _ = child.kill();
            panic!("{args:?} did not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("a child of ours")
}

/// The whole lines of the one JSONL file of `dir`.
///
/// # Panics
/// When there is no file or more than one.
pub fn journal_lines(dir: &Path) -> Vec<String> {
    let files: Vec<PathBuf> = std::fs::read_dir(dir)
        .expect("the folder is there")
        .map(|entry| entry.expect("a folder that can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
        .collect();
    let [file] = files.as_slice() else { panic!("{} holds {files:?}", dir.display()) };
    let text = std::fs::read_to_string(file).expect("text");
    text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')).map(str::to_owned).collect()
}

/// Waits until the JSONL file of `dir` has at least `count` lines, and returns all.
///
/// # Panics
/// When it does not within 10 s, the bound of upstream's own test (UF 8.5).
pub fn journal_of(dir: &Path, count: usize) -> Vec<Value> {
    let lines = eventually("lines of the journal", Duration::from_secs(10), || {
        Some(journal_lines(dir)).filter(|lines| lines.len() >= count)
    });
    lines
        .iter()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

/// Path of the binary under test.
pub fn binary() -> PathBuf {
    // Integration tests run from `target/<profile>/deps`; the binary lies one folder up.
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.parent().and_then(Path::parent).expect("target/<profile>/deps");
    folder.join("server-under-test")
}

/// Polls until `done` returns a value.
///
/// # Panics
/// After `at_most`, with `what`.
pub fn eventually<T>(what: &str, at_most: Duration, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = SystemClock.now().saturating_add(at_most);
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(SystemClock.now() < deadline, "waited {at_most:?} for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A fresh folder under the test's own `target/tmp`, removed first if an earlier run left it.
///
/// # Panics
/// When it cannot be made.
pub fn scratch(name: &str) -> PathBuf {
    let path = setup::target().join("tmp").join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("a folder under target");
    path
}
