//! `cargo run --release -p uring-serve-benches --bin engine -- [--rounds N] [--threads N] [--patience SECONDS]`
//!
//! Our `cpu` backend beside llama.cpp on the same model file, and beside llama.cpp on the file type that suits it best.
//! Kernels only, no HTTP. In every round each workload is run by each contender, one right after the other, in an order
//! that turns with the round; a ratio is formed within a round, and medians are over rounds. A contender is measured
//! once the rest of the machine is quiet, or after `--patience`; what others used meanwhile is printed.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a table for a person is what this program is for"
)]

mod ours;
mod peer;
mod table;
mod workload;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use uring_serve_benches::facts;
use uring_serve_benches::others::MachineTime;

use self::ours::Ours;
use self::peer::{Peer, output_of};
use self::table::Measured;
use self::workload::{ROWS, Row};

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(what) => {
            eprintln!("error: {what}\n\nhint: engine [--rounds N] [--threads N] [--patience SECONDS]");
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What the command line says.
struct Args {
    rounds: usize,
    threads: usize,
    /// Longest wait for quiet before one measurement.
    patience: Duration,
}

impl Args {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self { rounds: 5, threads: 2, patience: Duration::from_secs(5) };
        while let Some(flag) = args.next() {
            let value = args.next().and_then(|value| value.parse::<usize>().ok());
            let value = value.ok_or_else(|| format!("`{flag}` needs a number"))?;
            match (flag.as_str(), value) {
                ("--rounds", 1..=1000) => parsed.rounds = value,
                ("--threads", 1..=256) => parsed.threads = value,
                ("--patience", 0..=3600) => parsed.patience = Duration::from_secs(value as u64),
                ("--rounds" | "--threads" | "--patience", _) => {
                    return Err(format!("`{flag} {value}` is out of range"));
                }
                _ => return Err(format!("`{flag}` is not known")),
            }
        }
        Ok(parsed)
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = target_folder(&root)?;
    let model = set_up(&root.join("tests/setup/model.sh"), &target)?;
    let peer = Peer::new(set_up(&root.join("benches/setup/llama.sh"), &target)?, args.threads);
    let best_file = peer.convert(&model, &target.join("peers"))?;
    let mut ours = Ours::load(&model, args.threads)?;

    println!("{}", facts::machine());
    println!("ours: {}, ready in {:.2} s", ours.device(), ours.load_time().as_secs_f64());
    println!("peer: llama.cpp {}, {} threads", peer.version()?, args.threads);
    println!("load average at start: {}", load_average());
    for row in ROWS {
        ours.tokens_per_second(row.workload)?;
    }
    let mut measured = Measured::default();
    let outcome = measure(args, &mut ours, &peer, [&model, &best_file], &mut measured);
    // What was measured before a failure is worth showing too.
    println!("load average at end: {}\n\n{measured}", load_average());
    outcome
}

/// Runs all rounds; `files` are the peer's, same and best.
fn measure(
    args: &Args,
    ours: &mut Ours,
    peer: &Peer,
    files: [&Path; 2],
    measured: &mut Measured,
) -> Result<(), Box<dyn Error>> {
    for round in 0..args.rounds {
        for (index, Row { workload, .. }) in ROWS.into_iter().enumerate() {
            for turn in 0..CONTENDERS {
                let contender = (turn + round) % CONTENDERS;
                wait_for_quiet(args.patience);
                let before = MachineTime::read();
                let speed = match contender {
                    0 => ours.tokens_per_second(workload)?,
                    _ => peer.tokens_per_second(files[contender - 1], workload)?,
                };
                let after = MachineTime::read();
                measured.speeds[index][contender].push(speed);
                measured.others[index]
                    .extend(before.zip(after).map(|(before, after)| after.others_since(before)));
            }
        }
        eprintln!("round {} of {} done", round + 1, args.rounds);
    }
    Ok(())
}

/// Runs a set-up script, which prints the path of what it made.
fn set_up(script: &Path, target: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let mut command = Command::new(script);
    // What it says on the way is for the person who waits.
    command.env("CARGO_TARGET_DIR", target).stdin(Stdio::null()).stderr(Stdio::inherit());
    Ok(PathBuf::from(output_of(&mut command)?.trim_end()))
}

/// Returns Cargo's target folder: this program is `<target>/<profile>/engine`.
fn target_folder(root: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    Ok(program.ancestors().nth(2).map_or_else(|| root.join("target"), Path::to_owned))
}

/// Waits until others use less than a twentieth of the machine, `patience` long at most.
fn wait_for_quiet(patience: Duration) {
    let glance = Duration::from_millis(250);
    for _ in 0..patience.as_millis() / glance.as_millis() {
        let before = MachineTime::read();
        std::thread::sleep(glance);
        match before.zip(MachineTime::read()) {
            Some((before, after)) if after.others_since(before) >= 0.05 => {}
            Some(_) | None => return,
        }
    }
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// Ours, the peer on our file, the peer on the file type that suits it best.
const CONTENDERS: usize = 3;
