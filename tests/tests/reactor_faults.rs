//! The reactor when peers, the kernel or its own limits misbehave.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use uring_serve::listen::{self, Probe};
use uring_serve::reactor::{FaultPoint, Faults, Options};
use uring_serve::service::Gone;
use uring_serve_tests::echo::{Client, EchoServer, Note};

#[test]
fn a_reset_is_survived_in_every_state() {
    let server = EchoServer::start(Options::default());
    let table: [(&str, &str, bool); 8] = [
        ("before a request", "", false),
        ("inside a head", "GET / HT", false),
        ("inside a body", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhe", false),
        (
            "waiting for 100",
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
            false,
        ),
        ("answer owed", "GET /never HTTP/1.1\r\nHost: h\r\n\r\n", true),
        (
            "answer owed, more requests sent",
            "GET /never HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHo",
            true,
        ),
        ("inside a stream", "GET /stream?0 HTTP/1.1\r\nHost: h\r\n\r\n", true),
        ("while a large answer is sent", "GET /flood?1000 HTTP/1.1\r\nHost: h\r\n\r\n", true),
    ];
    for (name, request, served) in table {
        let mut client = server.connect();
        client.send(request);
        if served {
            assert!(matches!(server.note(), Note::Began(_)), "{name}");
        } else {
            // A second connection is accepted and served behind it: what was sent has arrived.
            assert_eq!(server.connect().get("/").status, 200);
            assert!(matches!(server.note(), Note::Began(_)), "{name}");
            assert!(matches!(server.note(), Note::Submitted(_)), "{name}");
        }
        client.reset();
        if served {
            assert!(matches!(server.note(), Note::Gone(_, Gone::Client)), "{name}");
        }
    }
    assert_eq!(server.connect().get("/").status, 200);
    assert_eq!(server.counters.clients_gone.value(), 4);
    assert_eq!(server.counters.stale_completions.value(), 0);
}

#[test]
fn a_half_closed_client_gets_its_answer() {
    let server = EchoServer::start(Options::default());
    for (name, request, body) in [
        ("answered at once", "GET /chunks?1 HTTP/1.1\r\nHost: h\r\n\r\n", &b"0123456789"[..]),
        ("answered late", "GET /later?50 HTTP/1.1\r\nHost: h\r\n\r\n", b"later"),
        ("HTTP/1.0", "GET /later?50 HTTP/1.0\r\n\r\n", b"later"),
        (
            "the second of two",
            "GET /later?20 HTTP/1.1\r\nHost: h\r\n\r\nGET /later?20 HTTP/1.1\r\nHost: h\r\n\r\n",
            b"later",
        ),
    ] {
        let mut client = server.connect();
        client.send(request);
        client.socket.shutdown(Shutdown::Write).expect("half-closed");
        for _ in 0..request.matches("GET").count() {
            let response = loop {
                let response = client.response();
                if response.status != 100 {
                    break response;
                }
            };
            assert_eq!(response.body, body, "{name}");
        }
        assert_eq!(client.read_to_end().expect("no reset"), b"", "{name}");
    }
    assert_eq!(server.counters.clients_gone.value(), 0);
}

#[test]
fn an_end_of_stream_inside_a_request_closes_without_an_answer() {
    let server = EchoServer::start(Options::default());
    for (name, part, errors) in [
        ("before a request", "", 0),
        ("inside a head", "GET / HTTP/1.1\r\nHost: h\r\n", 1),
        ("inside a body", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhell", 2),
    ] {
        let mut client = server.connect();
        client.send(part);
        client.socket.shutdown(Shutdown::Write).expect("half-closed");
        assert_eq!(client.read_to_end().expect("no reset"), b"", "{name}");
        assert_eq!(server.counters.peer_errors.value(), errors, "{name}");
    }
    assert_eq!(server.counters.requests.value(), 0);
}

#[test]
fn a_closed_client_is_noticed_by_the_first_probe() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send_get("/never");
    let Note::Began(id) = server.note() else { panic!("began first") };
    drop(client);
    // Closed sockets answer the interim response with a reset; on loopback that takes no time.
    assert_eq!(server.note_within(Duration::from_secs(2)), Some(Note::Gone(id, Gone::Client)));
    assert_eq!(server.counters.probes.value(), 1);
}

#[test]
fn a_half_closed_client_sees_interim_answers_and_only_before_the_answer() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send_get("/queued");
    let Note::Began(id) = server.note() else { panic!("began first") };
    client.socket.shutdown(Shutdown::Write).expect("half-closed");
    assert_eq!(client.response_head().status, 100);
    // The next comes 5 s later.
    assert_eq!(client.response_head().status, 100);
    assert_eq!(server.counters.probes.value(), 2);
    // Waiting costs nothing: the peer's end of stream is reported once.
    assert!(server.counters.turns.value() < 30, "{} turns", server.counters.turns.value());
    server.answer(id);
    assert_eq!(client.response().body, b"queued");
    assert_eq!(client.read_to_end().expect("no reset"), b"");
    assert_eq!(server.note(), Note::Submitted(id));
}

#[test]
fn a_silent_stream_is_probed_by_a_comment_after_five_seconds() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send_get("/stream?0");
    assert_eq!(client.response_head().status, 200);
    assert_eq!(client.chunk().expect("an event"), b"data: first\n\n");
    client.socket.shutdown(Shutdown::Write).expect("half-closed");
    assert_eq!(client.chunk().expect("a comment"), b":\n\n");
    assert_eq!(server.counters.probes.value(), 1);
    let Note::Began(id) = server.note() else { panic!("began first") };
    drop(client);
    assert_eq!(server.note(), Note::Gone(id, Gone::Client));
}

#[test]
fn http10_takes_the_end_of_stream_for_leaving_where_the_service_says_so() {
    let server = EchoServer::start(Options::default());
    for (target, leaves) in [("/http10", true), ("/never", false)] {
        let mut client = server.connect();
        client.send(format!("GET {target} HTTP/1.0\r\n\r\n"));
        let Note::Began(id) = server.note() else { panic!("began first") };
        client.socket.shutdown(Shutdown::Write).expect("half-closed");
        let limit = Duration::from_millis(if leaves { 10_000 } else { 200 });
        let expected = leaves.then_some(Note::Gone(id, Gone::Client));
        assert_eq!(server.note_within(limit), expected, "{target}");
    }
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_bounded() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send_get("/flood?100000");
    let Note::Began(id) = server.note() else { panic!("began first") };
    assert_eq!(server.note(), Note::Gone(id, Gone::SlowReader));
    assert_eq!(server.counters.slow_readers.value(), 1);
    // What the kernel took; beside it there was the send in flight, 1 MiB behind that, and no more.
    assert!(server.counters.bytes_sent.value() < 16 << 20);
    assert!(client.read_to_end().is_err(), "closed by a reset");
    assert_eq!(server.connect().get("/").status, 200);
}

#[test]
fn a_full_socket_is_no_error() {
    let faults = Faults { send_dont_wait: true, ..Faults::default() };
    let server = EchoServer::start(Options { faults, ..Options::default() });
    let mut client = server.connect();
    client.send_get("/big?30000000");
    // Nobody reads, so the socket fills and refuses.
    while server.counters.short_sends.value() < 2 {
        std::thread::yield_now();
    }
    let mut count = 0;
    let mut chunk = vec![0; 1 << 20];
    while count < 30_000_000 {
        count += client.socket.read(&mut chunk).expect("more");
    }
}

#[test]
fn a_flood_of_requests_behind_an_open_one_is_held_back() {
    // 64 KiB of buffers: so much may come beyond the limit before the cancellation is submitted, and once more after.
    let server = EchoServer::start(Options { buffer_count: 64, buffer_bytes: 1024, ..Options::default() });
    let mut client = server.connect();
    client.send_get("/queued");
    let Note::Began(id) = server.note() else { panic!("began first") };
    client.socket.set_nonblocking(true).expect("non-blocking");
    let request = b"GET /behind HTTP/1.1\r\nHost: h\r\n\r\n";
    let flood = request.repeat(1000);
    let (mut sent, mut full) = (0, 0);
    while full < 1000 {
        match client.socket.write(&flood[sent % request.len()..]) {
            Ok(count) => sent += count,
            Err(_) => {
                full += 1;
                std::thread::yield_now();
            }
        }
    }
    client.socket.set_nonblocking(false).expect("blocking");
    let received = server.counters.bytes_received.value();
    assert!(received < 256 << 10, "{received} bytes were taken in");
    assert!(sent as u64 > received);
    // The client can still be seen to leave: the poll for hang-up tells what the paused receive cannot.
    client.reset();
    assert_eq!(server.note(), Note::Gone(id, Gone::Client));
}

#[test]
fn held_back_requests_are_served_later() {
    let server = EchoServer::start(Options { buffer_bytes: 512, ..Options::default() });
    let mut client = server.connect();
    client.send_get("/queued");
    let Note::Began(id) = server.note() else { panic!("began first") };
    let mut writer = client.socket.try_clone().expect("a clone");
    let count = 20_000;
    let thread = std::thread::spawn(move || {
        writer.write_all(&b"GET /behind HTTP/1.1\r\nHost: h\r\n\r\n".repeat(count)).expect("sent");
    });
    server.answer(id);
    assert_eq!(client.response().body, b"queued");
    for _ in 0..count {
        assert_eq!(client.response().status, 200);
    }
    thread.join().expect("no panic");
}

#[test]
fn late_completions_are_counted_and_dropped() {
    let faults = Faults { repeat_stale: true, ..Faults::default() };
    let server = EchoServer::start(Options { faults, ..Options::default() });
    for _ in 0..5 {
        let mut client = server.connect();
        assert_eq!(client.get("/").status, 200);
        assert_eq!(client.get("/").status, 200);
    }
    assert!(server.counters.stale_completions.value() >= 10);
}

#[test]
fn an_injected_error_ends_one_connection_only() {
    type Replace = fn(FaultPoint, u64) -> Option<i32>;
    let table: [(&str, Replace); 3] = [
        ("accept", |point, nth| (point == FaultPoint::Accept && nth == 1).then_some(EMFILE)),
        ("receive", |point, nth| (point == FaultPoint::Recv && nth == 2).then_some(ECONNRESET)),
        ("send", |point, nth| (point == FaultPoint::Send && nth == 1).then_some(EPIPE)),
    ];
    for (name, replace) in table {
        let faults = Faults { replace_result: Some(replace), ..Faults::default() };
        let server = EchoServer::start(Options { faults, ..Options::default() });
        let mut served = [0; 2];
        for _ in 0..4 {
            let mut client = server.connect();
            let _ = client.socket.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n");
            let mut byte = [0];
            let answered = client.socket.read(&mut byte).is_ok_and(|count| count > 0);
            served[usize::from(answered)] += 1;
        }
        // The bytes of the failed send had left before its result was replaced.
        let lost = usize::from(name != "send");
        assert_eq!(served, [lost, 4 - lost], "{name}");
        assert_eq!(server.counters.accept_no_files.value(), u64::from(name == "accept"));
    }
}

#[test]
fn a_tiny_buffer_ring_starves_and_recovers() {
    let server = EchoServer::start(Options { buffer_count: 2, buffer_bytes: 64, ..Options::default() });
    let mut clients: Vec<Client> = (0..64).map(|_| server.connect()).collect();
    let body = vec![b'x'; 10_000];
    for round in 0..5 {
        for client in &mut clients {
            client.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10000\r\n\r\n");
        }
        for client in &mut clients {
            client.send(&body);
        }
        for client in &mut clients {
            assert_eq!(client.response().status, 200, "round {round}");
        }
    }
    assert!(server.counters.recv_no_buffers.value() > 0);
}

#[test]
fn a_tiny_completion_queue_overflows_and_loses_nothing() {
    let server = EchoServer::start(Options { sq_entries: 2, cq_entries: 4, ..Options::default() });
    let mut clients: Vec<Client> = (0..100).map(|_| server.connect()).collect();
    for round in 0..10 {
        for client in &mut clients {
            client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n");
        }
        for client in &mut clients {
            assert_eq!(client.response().status, 200, "round {round}");
            assert_eq!(client.response().status, 200, "round {round}");
        }
    }
    assert!(server.counters.cq_overflow.value() > 0);
    assert!(server.counters.sq_full.value() > 0);
}

#[test]
fn a_full_table_lets_the_next_client_wait_not_fail() {
    let server = EchoServer::start(Options { connections_max: 4, ..Options::default() });
    let mut clients: Vec<Client> = (0..12).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send_get("/");
    }
    // The first four fill the table; each that leaves makes room for one.
    for mut client in clients {
        assert_eq!(client.response().status, 200);
    }
    assert!(server.counters.accept_table_full.value() > 0);
    assert_eq!(server.counters.accepted.value(), 12);
}

#[test]
fn without_file_descriptors_accepting_rests_and_returns() {
    let mut server = Process::start("ulimit -n 40;");
    let mut clients: Vec<Client> =
        (0..60).map(|_| Client::connect(server.address).expect("the backlog has room")).collect();
    for client in &mut clients {
        client.send_get("/");
    }
    let mut first = clients.remove(0);
    assert_eq!(first.response().status, 200);
    // All others get their turn as those before them leave.
    for mut client in clients {
        assert_eq!(client.response().status, 200);
    }
    assert_eq!(first.get("/").status, 200);
    assert!(server.ask("accept_no_files") > 0);
}

/// The child of the test above: serves until its input ends, and tells a counter by name for each line of it.
#[test]
#[ignore = "run by another test, in a process of its own"]
fn child_server() {
    let bound = listen::bind("127.0.0.1", 0, 1, Probe::First).expect("a port");
    let address = bound.addresses[0];
    let listeners = bound.workers.into_iter().flatten().collect();
    let server = EchoServer::start_on(address, listeners, Options::default()).expect("a ring");
    println!("\nchild at {address}");
    for line in std::io::stdin().lines() {
        let line = line.expect("text");
        let value = server.counters.values().find(|(name, _)| *name == line).expect("a counter").1;
        println!("\nchild counts {value}");
    }
}

/// This test program, run again as a server under a shell's limits.
struct Process {
    child: Child,
    address: SocketAddr,
    output: BufReader<std::process::ChildStdout>,
}

impl Process {
    fn start(limits: &str) -> Self {
        let program = std::env::current_exe().expect("a path");
        let mut child = Command::new("sh")
            .arg("-c")
            .arg(format!("{limits} exec \"$0\" --exact child_server --ignored --nocapture"))
            .arg(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut process = Self { child, address: ([0, 0, 0, 0], 0).into(), output };
        process.address = process.read("child at ").parse().expect("an address");
        process
    }

    fn ask(&mut self, counter: &str) -> u64 {
        let input = self.child.stdin.as_mut().expect("piped");
        writeln!(input, "{counter}").expect("written");
        self.read("child counts ").parse().expect("a number")
    }

    fn read(&mut self, mark: &str) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).expect("text") > 0 {
            if let Some(rest) = line.trim().strip_prefix(mark) {
                return rest.to_owned();
            }
            line.clear();
        }
        panic!("the child ended");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Linux error numbers that tests inject.
const EPIPE: i32 = 32;
const EMFILE: i32 = 24;
const ECONNRESET: i32 = 104;
