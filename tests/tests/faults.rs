//! The whole server against clients, sockets and limits that misbehave: nothing is lost, nothing grows, others are
//! served meanwhile, and each request has its line.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use uring_serve::clock::SystemClock;
use uring_serve::nofile;
use uring_serve::reactor::{Faults, Options};
use uring_serve::serve::Hooks;
use uring_serve_tests::embedded::{Embedded, LockstepClock};
use uring_serve_tests::http::{Client, post_bytes};
use uring_serve_tests::server::{RUNNING, Server, WAITING, eventually, journal_of, scratch};

const COMPLETIONS: &str = "/v1/completions";
/// Does not end by itself while a test looks on.
const LONG: &str = r#"{"prompt":"x","max_tokens":8000,"ignore_eos":true,"stream":true}"#;
const SHORT: &str = r#"{"prompt":"x","max_tokens":3}"#;
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn answers_are_the_same_byte_by_byte() {
    let tiny_reads = Options { buffer_bytes: 1, ..Options::default() };
    let faulty = |faults| Options { faults, ..Options::default() };
    let tiny_sends = faulty(Faults { send_bytes_max: Some(1), ..Faults::default() });
    let no_waits = faulty(Faults { send_dont_wait: true, ..Faults::default() });
    let stale = faulty(Faults { repeat_stale: true, ..Faults::default() });
    let both = Options { buffer_bytes: 1, ..tiny_sends.clone() };
    let whole = answers(&Options::default(), usize::MAX);
    // (name, the server's rings, bytes that the client writes at once)
    let rows = [
        ("the client writes one byte at a time", Options::default(), 1),
        ("the client writes seven bytes at a time", Options::default(), 7),
        ("the server reads one byte at a time", tiny_reads, usize::MAX),
        ("the server sends one byte at a time", tiny_sends, usize::MAX),
        ("both, and the client writes one", both, 1),
        ("sends that would wait are EAGAIN", no_waits, usize::MAX),
        ("each receive comes twice", stale, usize::MAX),
    ];
    for (name, ring, written_max) in rows {
        assert_eq!(answers(&ring, written_max), whole, "{name}");
    }
}

#[test]
fn a_full_socket_is_eagain_and_nothing_is_lost() {
    let faults = Faults { send_dont_wait: true, ..Faults::default() };
    let ring = Options { faults, ..Options::default() };
    let server = Embedded::start(&[], Arc::new(SystemClock), &Hooks { ring, ..Hooks::default() });
    let mut client = Client::connect(server.address);
    let pages = 400;
    let writer = client.stream().try_clone().expect("a second handle");
    let sending = std::thread::spawn(move || {
        // In a thread: the server stops reading requests while their answers are not taken.
        let request = "GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n".repeat(pages);
        std::io::Write::write_all(&mut &writer, request.as_bytes()).expect("the server reads on");
    });
    eventually("a full socket", PATIENCE, || {
        (server.metric("uring_serve_ring_short_sends_total") >= 2).then_some(())
    });
    assert_eq!(server.connect().get("/version").status, 200, "others are served meanwhile");
    for page in 0..pages {
        let response = client.read_response();
        assert_eq!(response.status, 200, "page {page}");
        assert!(response.text().ends_with('\n'), "page {page}");
    }
    sending.join().expect("the requests were written");
}

#[test]
fn a_reset_in_any_state_costs_its_own_request_only() {
    let lines = scratch("faults-reset");
    let server = Server::sim(&[
        "--max-batch-size",
        "1",
        "--sim-ttft-us",
        "300000",
        "--sim-tpot-us",
        "1000",
        "--perf-metrics-output-dir",
        lines.to_str().expect("a path in UTF-8"),
    ]);
    let whole = post_bytes(COMPLETIONS, &[], LONG);
    let plain = post_bytes(COMPLETIONS, &[], &LONG.replace(",\"stream\":true", ""));
    // (name, bytes sent, what to wait for, lines that it leaves)
    let rows: [(&str, &[u8], Reached, usize); 8] = [
        ("before a byte", b"", Reached::Nothing, 0),
        ("inside the head", &whole[..20], Reached::Nothing, 0),
        ("inside the body", &whole[..whole.len() - 9], Reached::Nothing, 0),
        ("whole answer, in prefill", &plain, Reached::Prefill, 1),
        ("in prefill", &whole, Reached::Prefill, 1),
        ("in the stream", &whole, Reached::Answer, 1),
        (
            "in the stream, the next request half sent",
            &[&whole[..], &whole[..40]].concat(),
            Reached::Answer,
            1,
        ),
        ("idle after an answer", b"GET /version HTTP/1.1\r\nHost: test\r\n\r\n", Reached::Answer, 0),
    ];
    let files = server.open_files();
    let mut count = 0;
    for (name, request, reached, adds) in rows {
        let mut client = Client::connect(server.address);
        client.send(request);
        match reached {
            Reached::Answer => assert_eq!(client.read_head().status, 200, "{name}"),
            Reached::Nothing => {}
            Reached::Prefill => {
                eventually(name, PATIENCE, || (server.sample(RUNNING) == 1.0).then_some(()));
            }
        }
        client.reset();
        server.settle(PATIENCE);
        count += adds;
        let all = journal_of(&lines, count);
        assert_eq!(all.len(), count, "{name}");
        assert!(all.iter().all(|line| line["status"] == "aborted"), "{name}: {all:?}");
    }
    // One that waits behind another.
    let mut first = Client::connect(server.address);
    first.send(&whole);
    eventually("a running one", PATIENCE, || (server.sample(RUNNING) == 1.0).then_some(()));
    let mut second = Client::connect(server.address);
    second.send(&whole);
    eventually("a waiting one", PATIENCE, || (server.sample(WAITING) == 1.0).then_some(()));
    second.reset();
    eventually("an empty queue", PATIENCE, || (server.sample(WAITING) == 0.0).then_some(()));
    assert_eq!(server.sample(RUNNING), 1.0, "the other goes on");
    assert_eq!(first.read_head().status, 200);
    first.reset();
    server.settle(PATIENCE);
    assert_eq!(statuses(&lines, count + 2), BTreeMap::from([("aborted".to_owned(), count + 2)]));
    eventually("sockets closed", PATIENCE, || (server.open_files() == files).then_some(()));
    assert!(server.stop().success());
}

#[test]
fn ten_thousand_silent_connections_cost_little_and_others_are_served() {
    const CONNECTIONS: usize = 10_000;
    let limit = nofile::raise().unwrap_or(u64::MAX);
    if limit < CONNECTIONS as u64 + 200 {
        println!("skipped: this process may open {limit} files only");
        return;
    }
    let server = Server::sim(&["--idle-timeout", "600", "--head-timeout", "600"]);
    let mut active = Client::connect(server.address);
    assert_eq!(active.post(COMPLETIONS, &[], SHORT).status, 200);
    let before = server.resident_kib();
    let mut silent: Vec<Client> = Vec::with_capacity(CONNECTIONS);
    for _ in 0..10 {
        silent.extend((0..CONNECTIONS / 10).map(|_| Client::connect(server.address)));
        assert_eq!(active.post(COMPLETIONS, &[], SHORT).status, 200, "with {} silent ones", silent.len());
    }
    eventually("all accepted", PATIENCE, || {
        let open =
            server.sample("uring_serve_ring_accepted_total") - server.sample("uring_serve_ring_closed_total");
        (open >= CONNECTIONS as f64).then_some(())
    });
    let fresh = server.resident_kib().saturating_sub(before) * 1024 / CONNECTIONS as u64;
    for client in &mut silent {
        assert_eq!(client.get("/version").status, 200);
    }
    let used = server.resident_kib().saturating_sub(before) * 1024 / CONNECTIONS as u64;
    println!("{CONNECTIONS} silent connections: {fresh} resident bytes each, {used} once each had an answer");
    assert!(fresh.max(used) < 4096, "{fresh}, {used} bytes a connection");
    assert_eq!(active.post(COMPLETIONS, &[], SHORT).status, 200);
    drop(silent);
    eventually("all closed", PATIENCE, || (server.open_files() < 100).then_some(()));
}

#[test]
fn a_slow_reader_grows_no_memory_and_is_dropped() {
    const READERS: usize = 4;
    let lines = scratch("faults-slow-reader");
    let server = Server::sim(&[
        "--sim-ttft-us",
        "0",
        "--sim-tpot-us",
        "0",
        "--perf-metrics-output-dir",
        lines.to_str().expect("a path in UTF-8"),
    ]);
    let mut other = Client::connect(server.address);
    assert_eq!(other.post(COMPLETIONS, &[], SHORT).status, 200);
    let before = peak_kib(&server);
    // 8 choices of 8000 events of some 190 bytes: 12 MB, where sockets hold 4 MiB and a connection 1 MiB.
    let body = LONG.replace("\"prompt\"", "\"n\":8,\"prompt\"");
    let mut readers: Vec<TcpStream> = (0..READERS).map(|_| narrow(server.address)).collect();
    for reader in &mut readers {
        std::io::Write::write_all(reader, &post_bytes(COMPLETIONS, &[], &body)).expect("the server reads");
        let mut start = [0; 15];
        reader.read_exact(&mut start).expect("a stream begins");
        assert_eq!(&start, b"HTTP/1.1 200 OK");
    }
    eventually("slow readers to be dropped", Duration::from_secs(60), || {
        assert_eq!(other.post(COMPLETIONS, &[], SHORT).status, 200, "others are served meanwhile");
        (server.sample("uring_serve_ring_slow_readers_total") == READERS as f64).then_some(())
    });
    server.settle(PATIENCE);
    let each = (peak_kib(&server) - before) / READERS as u64;
    println!("a reader that does not read: {each} KiB of the server's memory at most");
    // The buffer in flight and the next one, of 1 MiB: each has room for up to twice that, and while it grows it is
    // there a second time.
    assert!(each < 6 * 1024, "{each} KiB a reader");
    let told = eventually("their lines", PATIENCE, || {
        Some(statuses(&lines, READERS + 1)).filter(|told| told.get("aborted") == Some(&READERS))
    });
    assert_eq!(told.len(), 2, "{told:?}");
    drop(readers);
    assert!(server.stop().success());
}

#[test]
fn a_full_queue_is_429_with_retry_after_and_passes() {
    let lines = scratch("faults-queue");
    let server = Server::sim(&[
        "--max-batch-size",
        "1",
        "--max-queued-requests",
        "1",
        "--sim-tpot-us",
        "2000",
        "--perf-metrics-output-dir",
        lines.to_str().expect("a path in UTF-8"),
    ]);
    let mut running = Client::connect(server.address);
    running.send(&post_bytes(COMPLETIONS, &[], LONG));
    assert_eq!(running.read_head().status, 200);
    let mut waiting = Client::connect(server.address);
    waiting.send(&post_bytes(COMPLETIONS, &[], SHORT));
    eventually("a full queue", PATIENCE, || (server.sample(WAITING) == 1.0).then_some(()));
    let mut refused = Client::connect(server.address);
    for body in [SHORT, LONG] {
        let response = refused.post(COMPLETIONS, &[], body);
        assert_eq!((response.status, response.header("retry-after")), (429, Some("1")), "{body}");
        assert_eq!(response.json()["error"]["type"], "rate_limit_error", "{body}");
    }
    running.reset();
    assert_eq!(waiting.read_response().status, 200, "its turn comes");
    assert_eq!(
        refused.post(COMPLETIONS, &[], SHORT).status,
        200,
        "and the refused one's, when it asks again"
    );
    let expected = [("aborted", 1), ("complete", 2), ("rejected", 2)];
    assert_eq!(statuses(&lines, 5), expected.map(|(status, count)| (status.to_owned(), count)).into());
}

#[test]
fn limits_hold_on_both_sides() {
    let (head_max, body_max) = (1024, 1024);
    let server = Server::sim(&["--head-bytes-max", "1024", "--body-bytes-max", "1024"]);
    // (bytes from the limit, head's status, body's status)
    for (over, head_status, body_status) in [(-1, 200, 200), (0, 200, 200), (1, 431, 413)] {
        let fixed = "GET /version HTTP/1.1\r\nHost: test\r\nX: \r\n\r\n";
        let fill = "x".repeat((head_max + over) as usize - fixed.len());
        let mut client = Client::connect(server.address);
        client.send(fixed.replace("X: ", &format!("X: {fill}")).as_bytes());
        check_limit(client, head_status, over);
        let body = format!("{SHORT}{}", " ".repeat((body_max + over) as usize - SHORT.len()));
        let mut client = Client::connect(server.address);
        client.send(&post_bytes(COMPLETIONS, &[], &body));
        check_limit(client, body_status, over);
        let mut client = Client::connect(server.address);
        let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n");
        client.send(format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).as_bytes());
        check_limit(client, body_status, over);
    }
}

#[test]
fn a_key_guards_everything_but_what_probes_need() {
    let server = Server::sim(&["--api-key", "sesame"]);
    // (path, Authorization, status)
    let rows = [
        ("/v1/models", None, 401),
        ("/v1/models", Some("Bearer sesame"), 200),
        ("/v1/models", Some("bearer sesame"), 200),
        ("/v1/models", Some("Bearer sesam"), 401),
        ("/v1/models", Some("Bearer sesames"), 401),
        ("/v1/models", Some("Bearer Sesame"), 401),
        ("/v1/models", Some("Bearer "), 401),
        ("/v1/models", Some("Bearer"), 401),
        ("/v1/models", Some("Basic sesame"), 401),
        ("/v1/models", Some("sesame"), 401),
        ("/server_info", None, 401),
        ("/nowhere", None, 401),
        ("/health", None, 200),
        ("/version", None, 200),
        ("/metrics", None, 200),
        ("/prometheus/metrics", Some("Bearer wrong"), 200),
    ];
    for (path, login, status) in rows {
        let mut client = Client::connect(server.address);
        let login = login.map(|login| format!("Authorization: {login}\r\n")).unwrap_or_default();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n{login}\r\n").as_bytes());
        let response = client.read_response();
        assert_eq!(response.status, status, "{path} {login}");
        if status == 401 {
            assert_eq!(response.header("www-authenticate"), Some("Bearer"));
            assert_eq!(response.json()["error"]["code"], "invalid_api_key");
            check_closed(client);
        }
    }
    let body = "x".repeat(100_000);
    let mut client = Client::connect(server.address);
    client.send(&post_bytes(COMPLETIONS, &[], &body));
    assert_eq!(client.read_response().status, 401, "answered although the body was not read");
    check_closed(client);
    assert!(!server.log().contains("sesame"));
}

/// The most that was ever resident of the server, in KiB.
fn peak_kib(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("VmHWM");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// How far a request is when its client resets.
enum Reached {
    /// The head of its answer was read.
    Answer,
    /// Whatever its bytes alone come to.
    Nothing,
    /// Its first step runs.
    Prefill,
}

/// The raw answers of a server with such rings to a client that writes so much at once.
fn answers(ring: &Options, written_max: usize) -> Vec<String> {
    let clock = Arc::new(LockstepClock::new(1_700_000_000));
    let hooks = Hooks { id_seed: Some(1), ring: ring.clone(), ..Hooks::default() };
    let server = Embedded::start(&["--return-perf-metrics"], Arc::clone(&clock) as Arc<_>, &hooks);
    clock.follow(&server);
    let mut client = server.connect();
    let opt_in = [("X-TRTLLM-Return-Metrics", "1")];
    let requests = [
        post_bytes(COMPLETIONS, &opt_in, r#"{"prompt":["a","bc"],"max_tokens":5}"#),
        post_bytes(COMPLETIONS, &opt_in, r#"{"prompt":["a","bc"],"max_tokens":5,"stream":true}"#),
        post_bytes(COMPLETIONS, &[], &format!(r#"{{"prompt":"{}","max_tokens":2}}"#, "long ".repeat(1000))),
        post_bytes(COMPLETIONS, &[], "{"),
    ];
    let answers = requests.iter().map(|request| {
        request.chunks(written_max).for_each(|piece| client.send(piece));
        String::from_utf8(client.read_response().raw).expect("an answer in UTF-8")
    });
    let answers = answers.collect();
    drop(client);
    clock.release();
    server.end();
    answers
}

fn check_limit(mut client: Client, status: u16, over: isize) {
    let response = client.read_response();
    assert_eq!(response.status, status, "{over} bytes from the limit");
    if status == 200 {
        assert_eq!(client.get("/version").status, 200);
    } else {
        assert_eq!(response.header("connection"), Some("close"));
        assert!(response.json()["error"]["message"].is_string());
        check_closed(client);
    }
}

/// The server has closed, and so that the client could read everything: by an end of stream, not by a reset.
fn check_closed(mut client: Client) {
    let end = client.stream().read(&mut [0]).expect("no reset");
    assert_eq!((end, client.read_to_end()), (0, Vec::new()));
}

/// How many lines have which status, once there are `count`.
fn statuses(lines: &std::path::Path, count: usize) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in journal_of(lines, count) {
        *counts.entry(line["status"].as_str().expect("a status").to_owned()).or_default() += 1;
    }
    counts
}

/// A connection whose own buffer holds little.
fn narrow(address: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a socket option");
    socket.connect(&address.into()).expect("a listener");
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket option");
    stream
}
