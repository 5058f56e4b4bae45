//! The command line: one row per flag. A key of the YAML file is the flag with underscores and is read as that flag.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, value_parser};
use uring_serve_core::limits::QUEUE_MAX;
use uring_serve_kernels::cpu;

use crate::config::{self, Config};
use crate::failure::Failure;

/// What the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// Print this text to stdout and end: help, or the version.
    Print(String),
    /// Run the server.
    Serve(Box<Config>),
}

/// Reads the command line, program name first, and the YAML file that it names. Flags and the environment win over
/// the file.
///
/// # Errors
/// Wrong usage, with the flag or key and its value named.
pub fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<Invocation, Failure> {
    let mut argv: Vec<OsString> = argv.into_iter().collect();
    let (matches, args) = match parse_serve(&argv) {
        Ok(parsed) => parsed,
        Err(error) if is_for_stdout(&error) => return Ok(Invocation::Print(error.render().to_string())),
        Err(error) => return Err(usage_failure(&error)),
    };
    let Some(path) = &args.config else {
        return Config::from_args(args).map(|config| Invocation::Serve(Box::new(config)));
    };
    let known = known_keys();
    let mut model = None;
    for (key, value) in config::read_yaml(path, &known)? {
        if is_given(&matches, &key) {
            continue;
        }
        if key == "model" {
            model = Some(value);
        } else {
            argv.insert(2, format!("--{}={value}", key.replace('_', "-")).into());
        }
    }
    argv.extend(model.into_iter().flat_map(|model| ["--".into(), model.into()]));
    let (_, args) = parse_serve(&argv).map_err(|error| usage_failure(&error).within(path))?;
    Config::from_args(args).map(|config| Invocation::Serve(Box::new(config)))
}

fn parse_serve(argv: &[OsString]) -> Result<(ArgMatches, ServeArgs), clap::Error> {
    let matches = Cli::command().try_get_matches_from(argv)?;
    let Cli { command: Command::Serve(args) } = Cli::from_arg_matches(&matches)?;
    let serve = matches.subcommand_matches("serve").cloned().unwrap_or_default();
    Ok((serve, *args))
}

/// Returns the known key nearest to `unknown`.
pub(crate) fn nearest<'k>(unknown: &str, known: &'k [String]) -> Option<&'k String> {
    let likeness = |key: &String| strsim::jaro_winkler(unknown, key);
    known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
}

/// Returns the keys that the YAML file may hold: every flag of `serve` except those about the file and about help.
fn known_keys() -> Vec<String> {
    let command = ServeArgs::augment_args(clap::Command::new("serve"));
    let ids = command.get_arguments().map(|arg| arg.get_id().to_string());
    ids.filter(|id| id != "config").collect()
}

fn is_given(matches: &ArgMatches, key: &str) -> bool {
    match matches.value_source(key) {
        Some(ValueSource::CommandLine | ValueSource::EnvVariable) => true,
        Some(_) | None => false,
    }
}

fn is_for_stdout(error: &clap::Error) -> bool {
    matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
}

/// Puts clap's answer into the shape of our own: its first paragraph, and one hint.
fn usage_failure(error: &clap::Error) -> Failure {
    let text = error.render().to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let lines: Vec<&str> = paragraph.lines().map(str::trim).collect();
    let what = lines.join(" ");
    let text_of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        Some(ContextValue::Strings(texts)) => texts.first().map(String::as_str),
        Some(_) | None => None,
    };
    let suggestion = if error.kind() == ErrorKind::UnknownArgument {
        // clap names a near one only; here the nearest is always named.
        text_of(ContextKind::InvalidArg)
            .and_then(|arg| arg.strip_prefix("--"))
            .and_then(|flag| nearest(&flag.replace('-', "_"), &known_keys()).cloned())
            .map(|key| format!("--{}", key.replace('_', "-")))
    } else {
        let near = text_of(ContextKind::SuggestedSubcommand).or(text_of(ContextKind::SuggestedValue));
        near.map(str::to_owned)
    };
    let hint = match suggestion {
        Some(suggestion) => {
            format!("the nearest known one is `{suggestion}`; `uring-serve serve --help` lists all")
        }
        None => "`uring-serve serve --help` lists every flag with its unit and default".into(),
    };
    Failure::usage(what.trim_start_matches("error: "), hint)
}

/// An OpenAI-compatible LLM server on io_uring that tells where each request's time went.
#[derive(Debug, Parser)]
#[command(
    name = "uring-serve",
    version,
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = false
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model over HTTP.
    Serve(Box<ServeArgs>),
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// The best that this machine has.
    Auto,
    /// The kernels for the CPU.
    Cpu,
    /// The kernels for a CUDA device.
    Cuda,
    /// No model: seeded text at stated speed.
    Sim,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// For people.
    Text,
}

/// The flags of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// A .gguf file of a llama-family model; not needed by the sim engine
    pub(crate) model: Option<PathBuf>,
    /// What computes; auto takes cuda if a device answers, else cpu, and says which at start
    #[arg(long, value_enum, default_value_t = Engine::Auto, help_heading = "Model")]
    pub(crate) engine: Engine,
    /// Name in answers and in /v1/models [default: the model file's or directory's name]
    #[arg(long, value_name = "NAME", value_parser = text_1_to_256, help_heading = "Model")]
    pub(crate) served_model_name: Option<String>,
    /// Refuse requests for any other model name with 404
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", help_heading = "Model")]
    pub(crate) strict_model: bool,

    /// Address or name to listen on; localhost is 127.0.0.1 and ::1
    #[arg(long, value_name = "ADDR", default_value = "localhost", value_parser = text_1_to_256, help_heading = "Network")]
    pub(crate) host: String,
    /// TCP port, 0 to 65535; 0 picks a free one
    #[arg(long, value_name = "N", default_value_t = 8000, help_heading = "Network")]
    pub(crate) port: u16,
    /// Role of this process; this build has one
    #[arg(
        long,
        alias = "server_role",
        value_name = "ROLE",
        default_value = "server",
        help_heading = "Network"
    )]
    pub(crate) server_role: String,
    /// Key that requests must carry as `Authorization: Bearer KEY`, except /health, /version and /metrics; other users
    /// of the machine can see a command line, so prefer the environment [default: none]
    #[arg(
        long,
        value_name = "KEY",
        env = "URING_SERVE_API_KEY",
        hide_env_values = true,
        help_heading = "Network"
    )]
    pub(crate) api_key: Option<String>,

    /// Ring threads, each with its own socket, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=256), help_heading = "Threads")]
    pub(crate) workers: u16,
    /// CPU kernel threads, 1 to 256 [default: the CPUs this process may use]
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=cpu::THREADS_MAX as i64), help_heading = "Threads")]
    pub(crate) threads: Option<u16>,
    /// Threads for long front-end work (large JSON, templates, long texts to tokenise), 1 to 64
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=64), help_heading = "Threads")]
    pub(crate) frontend_threads: u16,

    /// Most sequences in one engine step, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = value_parser!(u32).range(1..=1024), help_heading = "Batching")]
    pub(crate) max_batch_size: u32,
    /// Most tokens in one engine step, prefill and decode together, 1 to 1048576
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = value_parser!(u32).range(1..=1_048_576), help_heading = "Batching")]
    pub(crate) max_num_tokens: u32,
    /// Tokens in a KV cache block, 1 to 1024; a multiple of 16 on the CPU
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = value_parser!(u32).range(1..=1024), help_heading = "Batching")]
    pub(crate) tokens_per_block: u32,
    /// Most sequences waiting for the engine, 1 to 65536; more are answered 429
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = value_parser!(u32).range(1..=i64::from(QUEUE_MAX)), help_heading = "Batching")]
    pub(crate) max_queued_requests: u32,
    /// Most tokens of a sequence, prompt and output, 2 to 1048576 [default: the model's, at most 8192]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(2..=1_048_576), help_heading = "Batching")]
    pub(crate) max_seq_len: Option<u32>,
    /// Size of the KV cache, 1 to 2147483647 tokens, at most 16777216 blocks [default: batch x sequence, at most a quarter of memory]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=2_147_483_647), help_heading = "Batching")]
    pub(crate) kv_cache_tokens: Option<u32>,

    /// Longest a request head may take, 0.001 to 86400 s
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds, help_heading = "Time limits")]
    pub(crate) head_timeout: Duration,
    /// Longest a request body may take, 0.001 to 86400 s
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds, help_heading = "Time limits")]
    pub(crate) body_timeout: Duration,
    /// Longest a connection may idle between requests, 0.001 to 86400 s
    #[arg(long, value_name = "SECONDS", default_value = "75", value_parser = seconds, help_heading = "Time limits")]
    pub(crate) idle_timeout: Duration,
    /// Longest that requests may go on after SIGTERM, 0 to 86400 s
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds_or_zero, help_heading = "Time limits")]
    pub(crate) drain_timeout: Duration,
    /// Longest a request may take in all, 0.001 to 86400 s [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Time limits")]
    pub(crate) request_timeout: Option<Duration>,
    /// When a stream's 200 leaves at the latest, even without a token, 0 to 86400 s
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds_or_zero, help_heading = "Time limits")]
    pub(crate) stream_head_after: Duration,
    /// Send a comment on a stream that is silent for so long, 0.001 to 86400 s [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Time limits")]
    pub(crate) sse_keepalive: Option<Duration>,

    /// Most bytes of a request head, 1024 to 1048576; more are answered 431
    #[arg(long, value_name = "BYTES", default_value_t = 16_384, value_parser = value_parser!(u32).range(1_024..=1_048_576), help_heading = "Size limits")]
    pub(crate) head_bytes_max: u32,
    /// Most bytes of a request body, 1024 to 1073741824; more are answered 413
    #[arg(long, value_name = "BYTES", default_value_t = 16_777_216, value_parser = value_parser!(u32).range(1_024..=1_073_741_824), help_heading = "Size limits")]
    pub(crate) body_bytes_max: u32,

    /// Allow metrics in answers, for requests that ask by `X-TRTLLM-return-metrics: 1`
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", help_heading = "Per-request metrics")]
    pub(crate) return_perf_metrics: bool,
    /// Write a JSON line for every request to a file in this directory [default: none]
    #[arg(long, value_name = "DIR", help_heading = "Per-request metrics")]
    pub(crate) perf_metrics_output_dir: Option<PathBuf>,
    /// Whether requests that did not complete get a line too
    #[arg(long, value_name = "BOOL", action = clap::ArgAction::Set, default_value_t = true, help_heading = "Per-request metrics")]
    pub(crate) perf_metrics_failed_requests: bool,
    /// Most bytes of metrics headers, 0 to 1048576, unless the request names a budget
    #[arg(long, value_name = "BYTES", default_value_t = 3_584, value_parser = value_parser!(u32).range(0..=1_048_576), help_heading = "Per-request metrics")]
    pub(crate) metrics_header_budget: u32,
    /// Largest budget that a request may name, 0 to 1048576 bytes
    #[arg(long, value_name = "BYTES", default_value_t = 81_920, value_parser = value_parser!(u32).range(0..=1_048_576), help_heading = "Per-request metrics")]
    pub(crate) metrics_header_budget_max: u32,
    /// Most bytes of a stream's metrics event, 0 to 1048576
    #[arg(long, value_name = "BYTES", default_value_t = 81_920, value_parser = value_parser!(u32).range(0..=1_048_576), help_heading = "Per-request metrics")]
    pub(crate) metrics_event_budget: u32,
    /// Name of the header with the server's clock readings
    #[arg(long, value_name = "NAME", default_value = "X-TRTLLM-Clock-Sync", value_parser = header_name, help_heading = "Per-request metrics")]
    pub(crate) clock_header: String,

    /// Time to the first token, 0 to 3600000000 us
    #[arg(long, value_name = "US", default_value_t = 1_000, value_parser = value_parser!(u64).range(0..=3_600_000_000), help_heading = "The sim engine")]
    pub(crate) sim_ttft_us: u64,
    /// Time per further token, 0 to 3600000000 us
    #[arg(long, value_name = "US", default_value_t = 1_000, value_parser = value_parser!(u64).range(0..=3_600_000_000), help_heading = "The sim engine")]
    pub(crate) sim_tpot_us: u64,
    /// Seed of its text
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "The sim engine")]
    pub(crate) sim_seed: u64,

    /// Read flags from this file, as keys with underscores; the command line and the environment win [default: none]
    #[arg(
        long,
        alias = "extra_llm_api_options",
        value_name = "FILE.yaml",
        help_heading = "Configuration and logs"
    )]
    pub(crate) config: Option<PathBuf>,
    /// How log lines on stderr look; RUST_LOG chooses which, info by default
    #[arg(long, value_enum, default_value_t = LogFormat::Text, help_heading = "Configuration and logs")]
    pub(crate) log_format: LogFormat,
}

fn seconds(text: &str) -> Result<Duration, String> {
    seconds_within(text, 0.001)
}

fn seconds_or_zero(text: &str) -> Result<Duration, String> {
    seconds_within(text, 0.0)
}

fn seconds_within(text: &str, min: f64) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    // NaN is in no range.
    if !(min..=86_400.0).contains(&seconds) {
        return Err(format!("{text} is not in {min}..=86400 seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn text_1_to_256(text: &str) -> Result<String, String> {
    if !(1..=256).contains(&text.len()) {
        return Err(format!("{} bytes are not in 1..=256", text.len()));
    }
    if text.chars().any(char::is_control) {
        return Err("it has a control character".into());
    }
    Ok(text.to_owned())
}

fn header_name(text: &str) -> Result<String, String> {
    // RFC 9110 5.6.2.
    let is_token_char = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if !(1..=64).contains(&text.len()) || !text.bytes().all(is_token_char) {
        return Err("a header name has 1 to 64 letters, digits or any of !#$%&'*+-.^_`|~".into());
    }
    let own = [
        "allow",
        "cache-control",
        "connection",
        "content-length",
        "content-type",
        "date",
        "retry-after",
        "server-timing",
        "transfer-encoding",
        "www-authenticate",
        "x-request-id",
        "x-trtllm-ctx-chunk-metrics",
        "x-trtllm-metrics-truncated",
        "x-trtllm-start-end-time",
        "x-trtllm-step-metrics",
    ];
    if own.contains(&text.to_ascii_lowercase().as_str()) {
        return Err("the server sends that header itself".into());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_limit_takes_what_lies_inside_and_names_what_does_not() {
        // (flag, least value, greatest value, values outside)
        let rows: &[(&str, &str, &str, &[&str])] = &[
            ("port", "0", "65535", &["-1", "65536", "http", "1.5"]),
            ("workers", "1", "256", &["0", "257"]),
            ("threads", "1", "256", &["0", "257"]),
            ("frontend-threads", "1", "64", &["0", "65"]),
            ("max-batch-size", "1", "1024", &["0", "1025"]),
            ("max-num-tokens", "32", "1048576", &["0", "31", "1048577"]),
            ("tokens-per-block", "16", "1024", &["0", "24", "1025"]),
            ("max-queued-requests", "1", "65536", &["0", "65537"]),
            ("max-seq-len", "2", "1048576", &["1", "1048577"]),
            ("kv-cache-tokens", "32", "536870912", &["0", "31", "536870913", "2147483648"]),
            ("head-timeout", "0.001", "86400", &["0", "0.0009", "86400.1", "nan", "inf", "-1", "10s"]),
            ("body-timeout", "0.001", "86400", &["0"]),
            ("idle-timeout", "0.001", "86400", &["0"]),
            ("drain-timeout", "0", "86400", &["-0.1", "86401"]),
            ("request-timeout", "0.001", "86400", &["0"]),
            ("stream-head-after", "0", "86400", &["-1"]),
            ("sse-keepalive", "0.001", "86400", &["0"]),
            ("head-bytes-max", "1024", "1048576", &["1023", "1048577"]),
            ("body-bytes-max", "1024", "1073741824", &["1023", "1073741825"]),
            ("metrics-header-budget", "0", "81920", &["81921", "1048577"]),
            ("metrics-header-budget-max", "3584", "1048576", &["3583", "1048577"]),
            ("metrics-event-budget", "0", "1048576", &["1048577"]),
            ("sim-ttft-us", "0", "3600000000", &["3600000001"]),
            ("sim-tpot-us", "0", "3600000000", &["3600000001"]),
            ("sim-seed", "0", "18446744073709551615", &["18446744073709551616"]),
            ("engine", "auto", "sim", &["gpu"]),
            ("server-role", "server", "server", &["context", "generation"]),
            ("log-format", "text", "json", &["xml"]),
            (
                "clock-header",
                "X",
                "!#$%&'*+-.^_`|~09azAZ",
                &["", "a b", "a:b", "Content-Length", "date", "Server-Timing"],
            ),
            ("perf-metrics-failed-requests", "true", "false", &["yes", ""]),
            ("strict-model", "true", "false", &["1"]),
            ("return-perf-metrics", "true", "false", &["on"]),
        ];
        for (flag, least, greatest, outside) in rows {
            for value in [least, greatest] {
                serve(&[&format!("--{flag}={value}"), "m"]).unwrap();
            }
            for value in *outside {
                let text = refusal(&[&format!("--{flag}={value}"), "m"]);
                assert!(
                    text.contains(&format!("--{flag}")) && text.contains(value),
                    "{flag} {value}: {text}"
                );
            }
        }
    }

    #[test]
    fn the_defaults_are_those_of_the_contract() {
        let config = serve(&["models/tiny.gguf"]).unwrap();
        assert_eq!((config.engine, config.served_model_name.as_str()), (Engine::Auto, "tiny.gguf"));
        assert_eq!((config.host.as_str(), config.port, config.workers), ("localhost", 8000, 1));
        assert_eq!((config.max_batch_size, config.max_num_tokens, config.tokens_per_block), (32, 2048, 32));
        assert_eq!(
            (config.max_queued_requests, config.max_seq_len, config.kv_cache_tokens),
            (1024, None, None)
        );
        assert_eq!((config.http.head_bytes_max, config.http.body_bytes_max), (16_384, 16_777_216));
        let timeouts = [config.http.head_timeout, config.http.body_timeout, config.http.idle_timeout];
        assert_eq!(timeouts.map(|timeout| timeout.as_secs()), [10, 30, 75]);
        assert_eq!((config.drain_timeout.as_secs(), config.stream_head_after.as_secs()), (30, 5));
        assert_eq!((config.request_timeout, config.sse_keepalive), (None, None));
        assert_eq!((config.metrics_header_budget, config.metrics_header_budget_max), (3_584, 81_920));
        assert_eq!(
            (config.metrics_event_budget, config.clock_header.as_str()),
            (81_920, "X-TRTLLM-Clock-Sync")
        );
        assert_eq!(
            (config.sim_ttft.as_micros(), config.sim_tpot.as_micros(), config.sim_seed),
            (1_000, 1_000, 0)
        );
        assert_eq!(config.policy, uring_serve_core::gate::Policy::default());
        assert!(config.perf_metrics_failed_requests && !config.strict_model && config.threads >= 1);
        assert_eq!(serve(&["--engine", "sim"]).unwrap().served_model_name, "sim");
        assert_eq!(serve(&["--served-model-name", "x", "m"]).unwrap().served_model_name, "x");
    }

    #[test]
    fn the_file_is_read_as_flags_and_the_command_line_wins() {
        // (name, file, arguments, port, timeout in ms, header and event allowed)
        type Row = (&'static str, &'static str, &'static [&'static str], u16, u128, bool);
        let rows: &[Row] = &[
            ("file alone", "port: 7\nhead_timeout: 2.50\nreturn_perf_metrics: true", &["m"], 7, 2_500, true),
            ("flag over file", "port: 7\nhead_timeout: 2", &["m", "--port", "9"], 9, 2_000, false),
            (
                "a flag that says the default wins too",
                "port: 7",
                &["m", "--port", "8000"],
                8_000,
                10_000,
                false,
            ),
            (
                "off over on",
                "return_perf_metrics: true",
                &["--return-perf-metrics=false", "m"],
                8_000,
                10_000,
                false,
            ),
            ("the model", "model: other.gguf\nport: '7'", &[], 7, 10_000, false),
            ("empty", "", &["m"], 8_000, 10_000, false),
            ("comments only", "# nothing\n", &["m"], 8_000, 10_000, false),
        ];
        for (name, text, args, port, head_timeout, is_allowed) in rows {
            let file = YamlFile::new(text);
            for flag in ["--config", "--extra_llm_api_options"] {
                let config = serve(&[&[flag, file.path()], *args].concat()).expect(name);
                let allowed = uring_serve_core::gate::Response::AllowOnRequest;
                assert_eq!(config.port, *port, "{name}");
                assert_eq!(config.http.head_timeout.as_millis(), *head_timeout, "{name}");
                assert_eq!(config.policy.response == allowed, *is_allowed, "{name}");
            }
        }
    }

    #[test]
    fn a_file_that_does_not_hold_flags_is_refused_by_name() {
        // (file, words of the message)
        let rows: &[(&str, &[&str])] = &[
            ("max_batchsize: 3", &["unknown key `max_batchsize`", "`max_batch_size`"]),
            ("max-batch-size: 3", &["unknown key `max-batch-size`", "`max_batch_size`"]),
            ("config: a.yaml", &["unknown key `config`"]),
            ("help: true", &["unknown key `help`"]),
            ("kv_listen: 1", &["unknown key `kv_listen`"]),
            ("port: 70000", &["--port", "70000"]),
            ("port: [1, 2]", &["`port`", "one plain value"]),
            ("port: {a: 1}", &["`port`", "one plain value"]),
            ("port:", &["`port` has no value"]),
            ("port: 1\nport: 2", &["`port`", "line 2"]),
            ("- port", &["line 1"]),
            ("port: \"1", &["line"]),
            ("return_perf_metrics: 1", &["--return-perf-metrics", "true, false"]),
        ];
        for (text, words) in rows {
            let file = YamlFile::new(text);
            let refusal = refusal(&["--config", file.path(), "m"]);
            for word in words.iter().chain(&[file.path(), "error: ", "\n\nhint: "]) {
                assert!(refusal.contains(word), "{text}: no `{word}` in {refusal}");
            }
        }
        assert!(refusal(&["--config", "/nowhere/a.yaml", "m"]).contains("/nowhere/a.yaml"));
    }

    #[test]
    fn unknown_words_are_refused_with_the_nearest_known_one() {
        // (arguments, words of the message)
        let rows: &[(&[&str], &[&str])] = &[
            (&["serve", "m", "--prot", "1"], &["'--prot'", "`--port`"]),
            (&["serve", "m", "--max-batchsize=1"], &["'--max-batchsize'", "`--max-batch-size`"]),
            (&["serve", "m", "--kv-listen", "a"], &["'--kv-listen'"]),
            (&["serve", "m", "--max_batch_size", "1"], &["'--max_batch_size'", "`--max-batch-size`"]),
            (&["serv"], &["'serv'", "`serve`"]),
            (&["disaggregated"], &["'disaggregated'"]),
            (&["serve", "m", "n"], &["'n'"]),
            (&["serve"], &["MODEL is missing", "--engine sim"]),
            (&[], &["subcommand"]),
        ];
        for (args, words) in rows {
            let argv = std::iter::once("uring-serve").chain(args.iter().copied()).map(OsString::from);
            let text = parse(argv).expect_err("refused").to_string();
            for word in words.iter().chain(&["error: ", "\n\nhint: "]) {
                assert!(text.contains(word), "{args:?}: no `{word}` in {text}");
            }
        }
        serve(&["m", "--server_role", "server"]).unwrap();
    }

    #[test]
    fn a_bad_api_key_is_refused_and_never_shown() {
        for key in ["", "secret\n", &"secret".repeat(43)] {
            let text = refusal(&["m", "--api-key", key]);
            assert!(text.contains("API key") && !text.contains("secret"), "{text}");
        }
        let key = serve(&["m", "--api-key", "secret"]).unwrap().api_key.unwrap();
        assert!(!format!("{key:?}").contains("secret"));
        for (presented, expected) in
            [("secret", true), ("secreT", false), ("secre", false), ("secrets", false), ("", false)]
        {
            assert_eq!(key.matches(presented.as_bytes()), expected, "{presented}");
        }
    }

    #[test]
    fn help_groups_every_flag_and_states_its_default() {
        let command = ServeArgs::augment_args(clap::Command::new("serve"));
        for arg in command.get_arguments().filter(|arg| !arg.is_positional()) {
            let name = arg.get_id();
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(arg.get_help_heading().is_some(), "{name} is in a group");
            let has_default = !arg.get_default_values().is_empty() || help.contains("[default: ");
            assert!(has_default, "{name} states its default");
        }
        let Ok(Invocation::Print(text)) = parse(["uring-serve", "serve", "--help"].map(OsString::from))
        else {
            panic!("help is printed");
        };
        assert!(text.contains("--drain-timeout <SECONDS>") && !text.contains("server_role"));
    }

    fn serve(args: &[&str]) -> Result<Config, Failure> {
        let argv = ["uring-serve", "serve"].iter().chain(args).map(OsString::from);
        match parse(argv)? {
            Invocation::Print(text) => panic!("{text}"),
            Invocation::Serve(config) => Ok(*config),
        }
    }

    fn refusal(args: &[&str]) -> String {
        serve(args).expect_err(&format!("{args:?} is refused")).to_string()
    }

    /// A file of its own, removed at the end.
    struct YamlFile(String);

    impl YamlFile {
        fn new(text: &str) -> Self {
            use std::sync::atomic::{AtomicU32, Ordering};
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let name =
                format!("uring-serve-{}-{}.yaml", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            fs::write(&path, text).unwrap();
            Self(path.to_string_lossy().into_owned())
        }

        fn path(&self) -> &str {
            &self.0
        }
    }

    impl Drop for YamlFile {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }
}
