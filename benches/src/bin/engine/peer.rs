//! The peer: llama.cpp, by its own benchmark programs.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::workload::Workload;

/// A build of llama.cpp.
pub(crate) struct Peer {
    programs: PathBuf,
    threads: String,
}

impl Peer {
    /// Uses the build in the folder `programs`.
    pub(crate) fn new(programs: PathBuf, threads: usize) -> Self {
        Self { programs, threads: threads.to_string() }
    }

    /// Returns its version and compiler, in one line.
    ///
    /// # Errors
    /// When it cannot be run.
    pub(crate) fn version(&self) -> Result<String, Box<dyn Error>> {
        let output = self.command("llama-bench").arg("--version").output()?;
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(", "))
    }

    /// Converts a model to Q4_0, the type that llama.cpp has its fastest x86 kernels for; its embedding stays Q8_0.
    /// Keeps the file in `folder` and returns its path.
    ///
    /// # Errors
    /// When the conversion fails.
    pub(crate) fn convert(&self, model: &Path, folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
        let stem = model.file_stem().unwrap_or_default().to_string_lossy();
        let converted = folder.join(format!("{stem}.as-Q4_0.gguf"));
        if !converted.exists() {
            fs::create_dir_all(folder)?;
            // A rename makes the name appear whole, though another run may be at it too.
            let partial = folder.join(format!("{stem}.{}.partial", std::process::id()));
            let mut command = self.command("llama-quantize");
            command.arg("--allow-requantize").arg(model).arg(&partial).arg("Q4_0");
            output_of(&mut command)?;
            fs::rename(&partial, &converted)?;
        }
        Ok(converted)
    }

    /// Runs a workload and returns its tokens per second, as llama.cpp counts them: it times the forward pass on
    /// random tokens, after a warm-up, without sampling.
    ///
    /// # Errors
    /// When the program fails or prints something else.
    pub(crate) fn tokens_per_second(&self, model: &Path, workload: Workload) -> Result<f64, Box<dyn Error>> {
        let Workload { seqs, prompt_tokens, output_tokens } = workload;
        let (prompt, threads) = (prompt_tokens.to_string(), self.threads.as_str());
        let (mut command, field) = match output_tokens {
            None => {
                let mut command = self.command("llama-bench");
                command.args(["-p", &prompt, "-n", "0", "-r", "1", "-t", threads, "-o", "jsonl"]);
                (command, "avg_ts")
            }
            Some(output) => {
                let cache = (seqs * (prompt_tokens + output)).to_string();
                let (seqs, output) = (seqs.to_string(), output.to_string());
                let mut command = self.command("llama-batched-bench");
                command.args(["-npp", &prompt, "-ntg", &output, "-npl", &seqs, "-c", &cache]);
                command.args(["-t", threads, "-tb", threads, "--output-format", "jsonl"]);
                (command, "speed_tg")
            }
        };
        command.arg("-m").arg(model);
        // On a crowded machine a program was seen, once, to succeed without a result on its output.
        for _ in 0..ATTEMPTS {
            let output = output_of(&mut command)?;
            if let Some(line) = output.lines().find(|line| line.starts_with('{')) {
                let value: Value = serde_json::from_str(line)?;
                let speed = value[field].as_f64().filter(|speed| *speed > 0.0);
                return Ok(speed.ok_or_else(|| format!("llama.cpp's result has no `{field}`: {line}"))?);
            }
        }
        Err(format!("llama.cpp printed no result in {ATTEMPTS} runs of {command:?}").into())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.stdin(Stdio::null());
        command
    }
}

/// Runs a program to its end and returns its standard output.
///
/// # Errors
/// When it cannot be started or fails, with the end of what it said.
pub(crate) fn output_of(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8(output.stdout)?);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    Err(format!("{program} failed ({}): {last}", output.status).into())
}

const ATTEMPTS: usize = 3;
