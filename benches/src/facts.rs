//! Facts about the machine, printed with every table.

use std::fs;
use std::process::Command;

/// Returns one line each: processor, cores, kernel, memory, compiler.
#[must_use]
pub fn machine() -> String {
    let cpu = field(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default(), "model name");
    let flags = field(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default(), "flags");
    let simd: Vec<&str> = flags
        .split_whitespace()
        .filter(|flag| ["avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"].contains(flag))
        .collect();
    let cores = cores();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let memory = field(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal");
    let rustc = Command::new("rustc").arg("--version").output();
    let rustc =
        rustc.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    format!("machine: {cpu} ({}), {cores} cores, {memory}, Linux {}, {rustc}", simd.join(" "), kernel.trim())
}

/// Returns the machine's cores, whatever this process may use.
#[must_use]
pub fn cores() -> usize {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpus.lines().filter(|line| line.starts_with("processor")).count().max(1)
}

/// Returns `name version, …` of these packages, as the workspace's lock file pins them; of two versions the later.
#[must_use]
pub fn locked(names: &[&str]) -> String {
    let lock = include_str!("../../Cargo.lock");
    let version = |name: &&str| {
        let (_, entry) = lock.rsplit_once(&format!("name = \"{name}\"\nversion = \""))?;
        Some(format!("{name} {}", entry.split_once('"')?.0))
    };
    names.iter().filter_map(version).collect::<Vec<_>>().join(", ")
}

/// Returns the machine's load average as one line.
#[must_use]
pub fn load() -> String {
    let averages = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let minute = averages.split_whitespace().next().unwrap_or("unknown");
    format!("load average over the last minute: {minute}")
}

fn field(text: &str, name: &str) -> String {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}
