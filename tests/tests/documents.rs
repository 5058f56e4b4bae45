//! What the documents say of files, flags, tests, routes, fields and names is so.

#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use uring_serve::api::request::{Endpoint, ModelContext, read_generation};
use uring_serve::api::route;
use uring_serve::args::{self, Invocation};
use uring_serve::journal::JournalCounters;
use uring_serve::prometheus::{self, EngineShape, Metrics};
use uring_serve_core::metrics::{COUNTS, SPANS, STEP_ITEMS, Status, TIMES, Token};
use uring_serve_core::{gate, headers, sse};

#[test]
fn every_relative_link_leads_somewhere() {
    for document in Document::all() {
        for target in document.links() {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => document.path.clone(),
                file => document.path.parent().unwrap().join(file),
            };
            assert!(path.exists(), "{}: no {target}", document.name());
            if !anchor.is_empty() {
                let anchors = Document::read(&path).anchors();
                assert!(anchors.contains(anchor), "{}: no {target} among {anchors:?}", document.name());
            }
        }
    }
}

#[test]
fn every_item_named_by_its_file_is_there() {
    let mut found = 0;
    for document in Document::all() {
        for span in document.code_spans() {
            let Some((file, item)) = span.split_once(".rs::") else { continue };
            let file = format!("{file}.rs");
            let sources: Vec<String> =
                ROOTS.iter().filter_map(|at| fs::read_to_string(root().join(at).join(&file)).ok()).collect();
            assert!(!sources.is_empty(), "{}: no file {file}", document.name());
            let is_there = sources.iter().any(|source| defines(source, item));
            assert!(is_there, "{}: {file} has no {item}", document.name());
            found += 1;
        }
    }
    assert!(found > 50, "the documents name {found} items only: has their form changed?");
}

#[test]
fn every_file_named_in_a_document_is_there() {
    for document in Document::all() {
        for span in document.code_spans() {
            let is_path = span.contains('/') && !span.starts_with(['/', '-', '.']) || span == "Cargo.toml";
            let is_source = [".rs", ".sh", ".md", ".toml"].iter().any(|end| span.ends_with(end));
            if !is_path || !is_source || span.contains(['<', '*', '{', ' ', '$']) {
                continue;
            }
            let is_there = ROOTS.iter().any(|at| root().join(at).join(span).exists());
            assert!(is_there, "{}: no {span}", document.name());
        }
    }
}

#[test]
fn every_test_of_the_promises_table_is_named_by_file_and_function() {
    let architecture = Document::read(&root().join("ARCHITECTURE.md"));
    let rows = table_rows(architecture.section("## Promises and their tests"));
    assert!(rows.len() > 15, "{} promises", rows.len());
    for row in rows {
        let tests: Vec<&str> = code_spans(row).into_iter().filter(|span| span.contains(".rs::")).collect();
        assert!(!tests.is_empty(), "no test holds: {row}");
        for test in tests {
            let (file, name) = test.split_once("::").unwrap();
            let attribute = "#[test]\n";
            let is_test = ROOTS.iter().any(|at| {
                fs::read_to_string(root().join(at).join(file)).is_ok_and(|source| {
                    let mut parts = source.split(attribute).skip(1);
                    parts.any(|part| part.lines().take(3).any(|line| defines(line, name)))
                })
            });
            assert!(is_test, "{test} is no test");
        }
    }
}

#[test]
fn every_flag_in_a_document_is_the_servers_or_a_known_tools() {
    let own = flags(&help());
    assert!(own.len() > 30, "{own:?}");
    let mut foreign_used = BTreeSet::new();
    for document in Document::all() {
        if document.name() == "CHANGELOG.md" {
            continue;
        }
        for flag in flags(&document.text) {
            let is_foreign = FOREIGN.iter().any(|(_, flags)| flags.contains(&flag.as_str()));
            assert!(own.contains(&flag) || is_foreign, "{}: unknown flag {flag}", document.name());
            if is_foreign {
                foreign_used.insert(flag);
            }
        }
    }
    for (tool, flags) in FOREIGN {
        for flag in *flags {
            assert!(foreign_used.contains(*flag), "no document names {tool}'s {flag} any more");
        }
    }
}

#[test]
fn the_readme_has_one_test_command_for_ci() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let (_, rest) = readme.split_once("<!-- ci:test -->\n").unwrap();
    let (between, _) = rest.split_once("<!-- ci:end -->\n").unwrap();
    let is_command = |line: &&str| !line.starts_with("```") && !line.trim().is_empty();
    let commands: Vec<&str> = between.lines().filter(is_command).collect();
    assert_eq!(commands.len(), 1, "{commands:?}");
    assert!(commands[0].starts_with("cargo test "), "{commands:?}");
}

#[test]
fn the_metrics_page_has_every_name_of_the_wire() {
    let page = Document::read(&root().join("docs/metrics.md"));
    let spans = page.code_spans();
    let mut names: Vec<String> = [
        gate::RETURN_METRICS,
        gate::METRICS_BUDGET,
        headers::SERVER_TIMING,
        headers::START_END_TIME,
        headers::STEP_METRICS,
        headers::CTX_CHUNK_METRICS,
        headers::TRUNCATED,
        headers::CLOCK_SYNC,
        sse::METRICS_EVENT,
    ]
    .map(str::to_owned)
    .to_vec();
    names.extend(SPANS.iter().map(|span| format!("server_{}", span.name)));
    names.extend(STEP_ITEMS.iter().map(|item| format!("server-step-<iter>-{item}")));
    names.extend(STEP_ITEMS.iter().map(|item| format!("server-ctx-chunk-<index>-{item}")));
    names.extend(TIMES.iter().map(|time| time.key.to_owned()));
    names.extend(
        TIMES.iter().filter_map(|time| time.token).map(|token: Token| format!("server-{}", token.text())),
    );
    names.extend(COUNTS.iter().flat_map(|count| [count.key.to_owned(), format!("server-{}", count.token)]));
    names.extend(Status::ALL.iter().map(|status| status.name().to_owned()));
    for name in names {
        let is_explained = spans.iter().any(|span| span.split(':').next() == Some(&*name));
        assert!(is_explained, "docs/metrics.md does not explain `{name}`");
    }
}

#[test]
fn the_metrics_page_has_every_prometheus_family_and_no_other() {
    let mut metrics = Metrics::new("m", "sim", 1);
    metrics.add_source(|page| prometheus::write_journal(&JournalCounters::default(), page));
    let engine = metrics.engine();
    engine.set_shape(EngineShape {
        max_batch_size: 1,
        max_num_tokens: 1,
        max_seq_len: 1,
        kv_blocks: 1,
        tokens_per_block: 1,
    });
    engine.count_step(std::time::Duration::from_millis(1));
    let mut text = String::new();
    metrics.write_page(&mut text);
    let mut served: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    served.insert("uring_serve_journal_last_write_timestamp_seconds");
    let page = Document::read(&root().join("docs/metrics.md"));
    let named: BTreeSet<&str> = page
        .code_spans()
        .into_iter()
        .filter(|span| span.starts_with("trtllm_") || span.starts_with("uring_serve_"))
        .filter(|span| !span.ends_with('_') && !span.contains('<'))
        .collect();
    assert_eq!(named, served);
}

#[test]
fn every_endpoint_of_the_http_page_is_served() {
    let page = Document::read(&root().join("docs/http.md"));
    let mut count = 0;
    for row in table_rows(page.section("## Endpoints")) {
        let spans = code_spans(row.split(" | ").next().unwrap());
        for endpoint in spans {
            let (methods, path) = endpoint.split_once(' ').expect(endpoint);
            for method in methods.split(',') {
                let path = path.replace("{id}", "some-model");
                assert!(route::find(method, &path).is_ok(), "{method} {path}");
                count += 1;
            }
        }
    }
    assert!(count >= 15, "{count}");
}

#[test]
fn every_field_of_the_http_page_is_read_or_refused_by_name() {
    let page = Document::read(&root().join("docs/http.md"));
    let context = ModelContext { vocab: 512, context_tokens: 100, strict_name: None };
    let mut count = 0;
    for row in table_rows(page.section("## Fields of a generation request")) {
        for name in code_spans(row.trim_start_matches("| ").split(" | ").next().unwrap()) {
            let judged = [Endpoint::Chat, Endpoint::Completions].map(|endpoint| {
                let body = format!(
                    r#"{{"messages":[{{"role":"user","content":"a"}}],"prompt":"a","{name}":[[{{"a":[]}}]]}}"#
                );
                match read_generation(endpoint, &mut body.into_bytes(), &context) {
                    Ok(request) => !request.unknown.names().iter().any(|unknown| unknown == name),
                    Err(_) => true,
                }
            });
            assert!(judged.contains(&true), "`{name}` is unknown to both endpoints");
            count += 1;
        }
    }
    assert!(count > 40, "{count}");
}

/// One Markdown file.
struct Document {
    path: PathBuf,
    text: String,
}

impl Document {
    /// Those at the root and in `docs`.
    fn all() -> Vec<Self> {
        let dirs = [root(), root().join("docs")];
        let files = dirs.iter().flat_map(|dir| fs::read_dir(dir).unwrap()).map(|entry| entry.unwrap().path());
        let documents: Vec<Self> = files
            .filter(|path| path.extension().is_some_and(|end| end == "md"))
            .map(|path| Self::read(&path))
            .collect();
        assert!(documents.len() >= 6, "{}", documents.len());
        documents
    }

    fn read(path: &Path) -> Self {
        Self { path: path.to_owned(), text: fs::read_to_string(path).unwrap() }
    }

    fn name(&self) -> String {
        self.path.file_name().unwrap().to_string_lossy().into_owned()
    }

    /// The lines outside of code blocks.
    fn prose(&self) -> impl Iterator<Item = &str> {
        let mut in_code = false;
        self.text.lines().filter(move |line| {
            let is_fence = line.trim_start().starts_with("```");
            in_code ^= is_fence;
            !in_code && !is_fence
        })
    }

    fn links(&self) -> Vec<&str> {
        let ends = self.prose().flat_map(|line| line.split("](").skip(1));
        ends.filter_map(|rest| rest.split(')').next()).collect()
    }

    fn code_spans(&self) -> Vec<&str> {
        self.prose().flat_map(code_spans).collect()
    }

    /// As GitHub makes them: lower case, spaces to hyphens, punctuation gone.
    fn anchors(&self) -> BTreeSet<String> {
        let headings = self.prose().filter(|line| line.starts_with('#'));
        let kept = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | ' ');
        let anchor = |line: &str| {
            let text = line.trim_start_matches('#').trim().to_lowercase();
            text.chars().filter(|c| kept(*c)).collect::<String>().replace(' ', "-")
        };
        headings.map(anchor).collect()
    }

    /// What stands between a heading and the next of its level.
    fn section(&self, heading: &str) -> &str {
        let (_, rest) = self.text.split_once(&format!("{heading}\n")).expect(heading);
        let level = heading.split(' ').next().unwrap();
        rest.split(&format!("\n{level} ")).next().unwrap()
    }
}

/// The rows of a section's tables, without their heads.
fn table_rows(section: &str) -> Vec<&str> {
    let lines: Vec<&str> = section.lines().collect();
    let is_rule = |line: &str| line.starts_with("| ---");
    let is_head = |at: usize| lines.get(at + 1).is_some_and(|next| is_rule(next));
    let rows =
        (0..lines.len()).filter(|at| lines[*at].starts_with("| ") && !is_rule(lines[*at]) && !is_head(*at));
    rows.map(|at| lines[at]).collect()
}

fn code_spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// Whether a source defines something of that name.
fn defines(source: &str, name: &str) -> bool {
    let is_end = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    KEYWORDS.iter().any(|keyword| {
        let definition = format!("{keyword} {name}");
        source.match_indices(&definition).any(|(at, _)| is_end(&source[at + definition.len()..]))
    })
}

/// Every `--flag` in a text.
fn flags(text: &str) -> BTreeSet<String> {
    let is_flag_char = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("--") {
        let before = text[..at].chars().next_back().unwrap_or(' ');
        let name: String = text[at + 2..].chars().take_while(|c| is_flag_char(*c)).collect();
        if !is_flag_char(before) && before != '!' && name.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.insert(format!("--{name}"));
        }
    }
    found
}

fn help() -> String {
    match args::parse(["uring-serve", "serve", "--help"].map(OsString::from)).unwrap() {
        Invocation::Print(text) => text,
        Invocation::Serve(_) => panic!("help runs nothing"),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Where a document's file names begin.
const ROOTS: [&str; 6] = [".", "core/src", "uring-server/src", "kernels/src", "tests/tests", "tests"];
const KEYWORDS: [&str; 7] = ["fn", "struct", "enum", "trait", "const", "type", "static"];
/// Flags of other programs that the documents name.
const FOREIGN: &[(&str, &[&str])] = &[
    ("cargo", &["--workspace", "--release", "--bin", "--features"]),
    (
        "docker",
        &["--rm", "--init", "--security-opt", "--ulimit", "--stop-timeout", "--publish", "--volume", "--env"],
    ),
];
