//! The binary as a person or a supervisor meets it: streams, exit codes, signals.

#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use rustix::process::{Pid, Signal, kill_process};

#[test]
fn each_way_to_end_has_its_exit_code_and_keeps_stdout_clean() {
    // (arguments, exit code, words of stderr)
    let rows: &[(&[&str], i32, &[&str])] = &[
        (&[], 2, &["subcommand"]),
        (&["disaggregated"], 2, &["'disaggregated'"]),
        (&["serve"], 2, &["MODEL is missing", "--engine sim"]),
        (&["serve", "--prot", "1", "m"], 2, &["--prot", "`--port`"]),
        (&["serve", "--port", "65536", "m"], 2, &["--port", "65536"]),
        (&["serve", "--config", "/nowhere.yaml", "m"], 2, &["/nowhere.yaml"]),
        (&["serve", "--server-role", "context", "m"], 2, &["context"]),
        (&["serve", "--engine", "cuda", "m"], 1, &["no CUDA backend"]),
        (
            &["serve", "--tokens-per-block", "17", "m"],
            2,
            &["--tokens-per-block", "no multiple of 16", "32 is"],
        ),
        (&["serve", "/nowhere.gguf"], 1, &["/nowhere.gguf"]),
        (&["serve", "/proc/self"], 1, &["is a directory"]),
    ];
    for (args, code, words) in rows {
        let Output { status, stdout, stderr } = server(args).output().unwrap();
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(*code), "{args:?}: {stderr}");
        assert!(stdout.is_empty(), "{args:?}");
        let (what, hint) = stderr.split_once("\n\nhint: ").expect(&stderr);
        assert!(what.starts_with("error: ") && !what.contains('\n'), "{args:?}: {stderr}");
        assert!(hint.ends_with('\n') && hint.lines().count() == 1, "{args:?}: {stderr}");
        for word in *words {
            assert!(stderr.contains(word), "{args:?}: no `{word}` in {stderr}");
        }
    }
}

#[test]
fn help_and_version_go_to_stdout_and_tell_no_secret() {
    for args in [&["--help"][..], &["--version"], &["serve", "--help"], &["serve", "-h"]] {
        let Output { status, stdout, stderr } =
            server(args).env("URING_SERVE_API_KEY", "sesame").output().unwrap();
        assert_eq!(status.code(), Some(0), "{args:?}");
        assert!(!stdout.is_empty() && stderr.is_empty(), "{args:?}");
        assert!(!String::from_utf8(stdout).unwrap().contains("sesame"), "{args:?}");
    }
}

#[test]
fn a_bad_log_filter_is_wrong_usage() {
    let output = server(&["serve", "--engine", "sim"]).env("RUST_LOG", "a=b=c").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("a=b=c"));
}

#[test]
fn the_first_signal_ends_an_idle_server_with_0_and_logs_are_json_where_asked() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = Running::start(&["--log-format", "json"]);
        server.wait_for_line("\"starting\"");
        server.send(signal);
        let (code, lines) = server.end();
        assert_eq!(code, Some(0), "{signal:?}");
        for line in lines {
            let log: serde_json::Value = serde_json::from_str(&line).expect(&line);
            assert!(log["level"].is_string(), "{line}");
        }
    }
}

#[test]
fn the_journal_s_file_is_there_from_the_start() {
    let dir = std::env::temp_dir().join(format!("uring-serve-cli-{}/made", std::process::id()));
    let mut server = Running::start(&["--perf-metrics-output-dir", dir.to_str().unwrap()]);
    server.wait_for_line("writing per-request metrics");
    let names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    server.send(Signal::TERM);
    let (code, lines) = server.end();
    std::fs::remove_dir_all(dir.parent().unwrap()).unwrap();
    assert_eq!((names.len(), code), (1, Some(0)));
    assert!(lines.iter().any(|line| line.contains("per-request metrics are closed")), "{lines:?}");
}

#[test]
fn logs_without_a_terminal_have_no_colours() {
    let mut server = Running::start(&[]);
    server.wait_for_line("starting");
    server.send(Signal::TERM);
    let (_, lines) = server.end();
    assert!(lines.iter().all(|line| !line.contains('\u{1b}')), "{lines:?}");
}

/// A server on a free port with the simulated engine. Killed by its id if the test does not end it.
struct Running {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
    lines: Vec<String>,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        let mut command = server(&["serve", "--engine", "sim", "--port", "0"]);
        let mut child = command.args(args).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self { child, stderr, lines: Vec::new() }
    }

    fn wait_for_line(&mut self, part: &str) {
        loop {
            let mut line = String::new();
            assert!(self.stderr.read_line(&mut line).unwrap() > 0, "ended without {part}: {:?}", self.lines);
            self.lines.push(line.trim_end().to_owned());
            if self.lines.last().is_some_and(|line| line.contains(part)) {
                return;
            }
        }
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn end(mut self) -> (Option<i32>, Vec<String>) {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        self.lines.extend(rest.lines().map(str::to_owned));
        (self.child.wait().unwrap().code(), std::mem::take(&mut self.lines))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn server(args: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(args).stdin(Stdio::null()).env_remove("URING_SERVE_API_KEY").env_remove("RUST_LOG");
    command
}

/// Builds the binary once: cargo builds it by itself only for the tests of its own package.
fn binary() -> &'static PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        // This test's own executable lies in `<target>/<profile>/deps`.
        let profile_dir = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().to_owned();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "uring-serve", "--bin", "uring-serve", "--target-dir"]);
        build.arg(profile_dir.parent().unwrap());
        if profile_dir.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
        profile_dir.join("uring-serve")
    })
}
