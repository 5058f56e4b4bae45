//! The server against hyper 1.x around the same engine, over loopback: CPU time per request or event.
//!
//! ```text
//! cargo run --release -p uring-serve-benches --features peers --bin serve -- [--rounds N] [--seconds S] [--only ROW]
//! ```
//!
//! Both servers of a row run all the time, each pinned to the first CPU; the load goes to one, then to the other, round
//! by round, from the second CPU. A ratio is taken within a round, so that what else the machine does, and how fast it
//! happens to be, hits both. Nothing is asserted: the table says what was measured.

mod children;
mod peer;
mod rows;

use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use uring_serve_benches::cpu_time::{self, CpuTime};
use uring_serve_benches::facts;
use uring_serve_benches::load::{Counts, Generator, Load};
use uring_serve_benches::others::MachineTime;
use uring_serve_benches::stats::Summary;

use self::children::{LOAD_CPU, Server};
use self::rows::{COMMON, ROWS, Row, Unit};

fn main() -> ExitCode {
    if let Some(code) = children::run_as_child() {
        return code;
    }
    match Options::read(std::env::args().skip(1)).map_err(Into::into).and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell when stderr is closed.
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    rounds: u32,
    seconds: f64,
    /// Part of a row's name; empty for all.
    only: String,
}

impl Options {
    fn read(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { rounds: 8, seconds: 5.0, only: String::new() };
        while let Some(flag) = args.next() {
            let value = args.next().ok_or_else(|| format!("{flag} wants a value"))?;
            let wrong = || format!("{flag} {value}: not a number of it");
            match flag.as_str() {
                "--rounds" => options.rounds = value.parse().map_err(|_| wrong())?,
                "--seconds" => options.seconds = value.parse().map_err(|_| wrong())?,
                "--only" => options.only = value,
                _ => return Err(format!("{flag}: the flags are --rounds N, --seconds S, --only ROW")),
            }
        }
        if !(0.1..=600.0).contains(&options.seconds) || !(1..=100).contains(&options.rounds) {
            return Err("rounds are 1 to 100, of 0.1 to 600 seconds".into());
        }
        Ok(options)
    }

    fn round(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    children::pin(LOAD_CPU)?;
    uring_serve::nofile::raise();
    let mut out = io::stdout().lock();
    writeln!(out, "{}", facts::machine())?;
    writeln!(
        out,
        "versions: {}",
        facts::locked(&["uring-serve", "hyper", "hyper-util", "tokio", "io-uring"])
    )?;
    writeln!(out, "{} (other work on the machine shows here, and in the spread)", facts::load())?;
    writeln!(
        out,
        "servers on CPU 0, load on CPU {LOAD_CPU}; {} rounds of {} s each, in turn; medians (least to most)\n\
         The figure to compare with the target is the CPU time of the whole process, engine thread and kernel time\n\
         included. \"serving\" is the thread that has the sockets.",
        options.rounds, options.seconds
    )?;
    for row in ROWS.iter().filter(|row| row.name.contains(&options.only)) {
        compare(row, options, &mut out)?;
    }
    writeln!(out, "\n{}", facts::load())?;
    Ok(())
}

/// One round of one side.
#[derive(Clone, Copy)]
struct Sample {
    /// CPU time per unit, in microseconds: the process, and its serving thread.
    process_us: f64,
    serving_us: f64,
    /// Units per second.
    rate: f64,
    failures: u64,
    /// Share of the machine that neither the load nor the server used.
    others: f64,
}

fn compare(row: &Row, options: &Options, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let records = Records::new()?;
    let mut servers = Vec::new();
    for side in &row.sides {
        let mut flags = [COMMON, side.flags].concat();
        if side.records {
            flags.extend(["--perf-metrics-output-dir", records.path()?]);
        }
        servers.push(Server::start(side.kind, &flags)?);
    }
    let mut samples = [Vec::new(), Vec::new()];
    for _ in 0..options.rounds {
        for ((side, server), samples) in row.sides.iter().zip(&servers).zip(&mut samples) {
            let load = load(row, server, row.request(side));
            samples.push(measure(row, server, load, options.round())?);
        }
    }
    report(row, &samples, out)?;
    for (side, server) in row.sides.iter().zip(&servers).filter(|_| row.unit == Unit::Event) {
        match count_system_calls(server, load(row, server, row.request(side)), options.round())? {
            Some(calls) => writeln!(out, "  system calls per event, {:<6} {calls:.4}", side.name)?,
            None => writeln!(
                out,
                "  system calls per event, {:<6} not counted: perf is not allowed to",
                side.name
            )?,
        }
    }
    if row.unit == Unit::Event {
        writeln!(
            out,
            "    by `perf stat -e raw_syscalls:sys_enter -t TID` on the serving thread in one more round"
        )?;
    }
    Ok(())
}

fn load(row: &Row, server: &Server, request: Vec<u8>) -> Load {
    Load { address: server.address, connections: row.connections, request, stream: row.body.is_stream() }
}

fn measure(row: &Row, server: &Server, load: Load, round: Duration) -> Result<Sample, Box<dyn Error>> {
    let mut generator = Generator::start(load)?;
    let counts = generator.run(WARM_UP, now)?;
    let (time, start) = (CpuTime::of(server.id(), server.kind.thread()), now());
    let machine = MachineTime::read();
    let counts = generator.run(round, now)?.since(counts);
    let (time, took) = (CpuTime::of(server.id(), server.kind.thread()).since(time), now() - start);
    let units = units(row.unit, counts);
    let server_share = time.process_ns as f64 / took.as_nanos() as f64 / facts::cores() as f64;
    let others = machine.zip(MachineTime::read()).map_or(0.0, |(before, after)| after.others_since(before));
    Ok(Sample {
        process_us: time.process_ns as f64 / 1e3 / units,
        serving_us: time.named_ns as f64 / 1e3 / units,
        rate: units / took.as_secs_f64(),
        failures: counts.failures,
        others: (others - server_share).max(0.0),
    })
}

fn units(unit: Unit, counts: Counts) -> f64 {
    let units = match unit {
        Unit::Event => counts.events,
        Unit::Request => counts.answers,
    };
    units.max(1) as f64
}

fn report(row: &Row, samples: &[Vec<Sample>; 2], out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let unit = row.unit.name();
    writeln!(out, "\n{}: {}", row.name, row.title)?;
    for (side, samples) in row.sides.iter().zip(samples) {
        let of = |value: fn(&Sample) -> f64| summary(samples.iter().map(value));
        writeln!(out, "  {:<6} CPU us per {unit}     {}", side.name, of(|sample| sample.process_us)?)?;
        writeln!(out, "  {:<6}   serving thread   {}", side.name, of(|sample| sample.serving_us)?)?;
        writeln!(out, "  {:<6} {unit}s per s       {}", side.name, of(|sample| sample.rate)?)?;
        let failures: u64 = samples.iter().map(|sample| sample.failures).sum();
        if failures > 0 {
            writeln!(out, "  {:<6} FAILED             {failures}: this row says nothing", side.name)?;
        }
    }
    let [ours, theirs] = samples;
    let ratio =
        |value: fn(&Sample) -> f64| summary(ours.iter().zip(theirs).map(|(a, b)| value(a) / value(b)));
    let cpu = ratio(|sample| sample.process_us)?;
    let others = summary(samples.iter().flatten().map(|sample| sample.others))?;
    let verdict = match cpu.median <= row.target {
        _ if others.median > DISTURBED => "not judged, the machine was shared",
        true => "reached",
        false => "missed",
    };
    writeln!(out, "  CPU ratio, whole process  {cpu}, target {:.2}: {verdict}", row.target)?;
    writeln!(out, "  CPU ratio, serving        {}", ratio(|sample| sample.serving_us)?)?;
    writeln!(out, "  throughput ratio          {}", ratio(|sample| sample.rate)?)?;
    writeln!(out, "  used by others            {others} of the machine")?;
    Ok(out.flush()?)
}

fn summary(values: impl Iterator<Item = f64>) -> Result<Summary, &'static str> {
    Summary::of(&values.collect::<Vec<_>>()).ok_or("no round was run")
}

/// Counts the serving thread's system calls per event; `None` where tracepoints may not be read.
fn count_system_calls(server: &Server, load: Load, round: Duration) -> Result<Option<f64>, Box<dyn Error>> {
    let mut generator = Generator::start(load)?;
    let before = generator.run(WARM_UP, now)?;
    let Some(thread) = cpu_time::thread_named(server.id(), server.kind.thread()) else { return Ok(None) };
    let counter = Command::new("perf")
        .args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-t", &thread.to_string()])
        .args(["--", "sleep", &round.as_secs_f64().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(counter) = counter else { return Ok(None) };
    let start = now();
    let events = generator.run(round, now)?.since(before).events as f64;
    let took = now() - start;
    drop(generator);
    let output = String::from_utf8_lossy(&counter.wait_with_output()?.stderr).into_owned();
    let calls = output.split(',').next().and_then(|count| count.trim().parse::<f64>().ok());
    // Its window is as long as ours, but not the same: rates are compared.
    Ok(calls.map(|calls| (calls / round.as_secs_f64()) / (events / took.as_secs_f64())))
}

/// A directory for a row's records, gone with the row.
struct Records(PathBuf);

impl Records {
    fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("uring-serve-bench-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    fn path(&self) -> Result<&str, &'static str> {
        self.0.to_str().ok_or("the directory for temporary files has a name that is not UTF-8")
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        // What is left is in the directory for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Share of the machine from which on others disturb a row.
const DISTURBED: f64 = 0.1;
/// Load before a round is measured: connections, buffers, batches are what they will be.
const WARM_UP: Duration = Duration::from_millis(700);
