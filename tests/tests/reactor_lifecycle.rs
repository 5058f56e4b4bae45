//! The reactor over time: deadlines, many silent connections, drain and stop.

use std::time::{Duration, Instant};

use uring_serve::reactor::Options;
use uring_serve::service::Gone;
use uring_serve_core::http1::Limits;
use uring_serve_tests::echo::{Client, EchoServer, Note};

#[test]
fn a_silent_connection_is_closed_without_a_word() {
    let http = Limits { idle_timeout: Duration::from_millis(100), ..Limits::default() };
    let server = EchoServer::start(Options { http, ..Options::default() });
    let mut fresh = server.connect();
    let mut used = server.connect();
    assert_eq!(used.get("/").status, 200);
    let began = now();
    assert_eq!(fresh.read_to_end().expect("no reset"), b"");
    assert_eq!(used.read_to_end().expect("no reset"), b"");
    let waited = began.elapsed();
    assert!(waited > Duration::from_millis(50) && waited < Duration::from_secs(5), "{waited:?}");
}

#[test]
fn a_slow_head_and_a_slow_body_are_answered_408() {
    let http = Limits {
        head_timeout: Duration::from_millis(100),
        body_timeout: Duration::from_millis(100),
        ..Limits::default()
    };
    let server = EchoServer::start(Options { http, ..Options::default() });
    for part in ["GET / HTTP/1.1\r\nHo", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhe"] {
        let mut client = server.connect();
        client.send(part);
        let response = client.response();
        assert_eq!(response.status, 408, "{part:?}");
        assert!(response.head.contains("\r\nConnection: close\r\n"));
        assert_eq!(client.read_to_end().expect("no reset"), b"");
    }
    assert_eq!(server.counters.peer_errors.value(), 2);
}

#[test]
fn a_timer_comes_when_it_should() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    for wanted in [1, 20, 70, 150] {
        let began = now();
        assert_eq!(client.get(&format!("/later?{wanted}")).body, b"later");
        let waited = began.elapsed();
        assert!(waited >= Duration::from_millis(wanted), "{wanted}: {waited:?}");
        assert!(waited < Duration::from_millis(wanted + 2000), "{wanted}: {waited:?}");
    }
}

#[test]
fn two_thousand_silent_connections_cost_little_and_still_answer() {
    uring_serve::nofile::raise();
    let server = EchoServer::start(Options::default());
    let mut clients: Vec<Client> = (0..2000).map(|_| server.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.get("/").status, 200);
    }
    let turns = server.counters.turns.value();
    assert_eq!(server.counters.accepted.value(), 2000);
    let before = resident_bytes();
    for client in clients.iter_mut().rev() {
        assert_eq!(client.get("/").status, 200);
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 2 << 20, "a second request each cost {grown} bytes");
    assert!(server.counters.turns.value() - turns <= 3 * 2000 + 100, "no turn without a cause");
}

#[test]
fn a_drain_finishes_what_runs_and_takes_the_backlog() {
    let server = EchoServer::start(Options::default());
    let mut idle = server.connect();
    assert_eq!(idle.get("/").status, 200);
    let mut busy = server.connect();
    busy.send_get("/later?300");
    while !matches!(server.note(), Note::Began(id) if id.serial == 2) {}
    let mut fresh = server.connect();
    server.handle.begin_drain(Duration::from_secs(20));
    assert_eq!(idle.read_to_end().expect("no reset"), b"");
    fresh.send_get("/");
    for client in [&mut fresh, &mut busy] {
        let response = client.response();
        assert_eq!(response.status, 200);
        assert!(response.head.contains("\r\nConnection: close\r\n"), "{}", response.head);
        assert_eq!(client.read_to_end().expect("no reset"), b"");
    }
    let turns = server.counters.turns.value();
    assert!(turns < 100, "waiting took {turns} turns");
    let address = server.address;
    server.join();
    assert!(Client::connect(address).is_err(), "the listener is closed");
}

#[test]
fn a_drain_ends_at_its_limit() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send_get("/never");
    let Note::Began(id) = server.note() else { panic!("began first") };
    server.handle.begin_drain(Duration::from_millis(100));
    assert_eq!(server.note(), Note::Gone(id, Gone::Shutdown));
    assert!(client.read_to_end().is_ok_and(|rest| rest.is_empty()));
    server.join();
}

#[test]
fn a_stop_does_not_wait() {
    let server = EchoServer::start(Options::default());
    let mut clients: Vec<Client> = (0..10).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send_get("/stream?0");
        assert_eq!(client.response_head().status, 200);
    }
    server.handle.begin_drain(Duration::from_secs(60));
    let began = now();
    server.handle.stop_now();
    let mut gone = 0;
    while gone < 10 {
        match server.note() {
            Note::Gone(_, why) => {
                assert_eq!(why, Gone::Shutdown);
                gone += 1;
            }
            Note::Began(_) => {}
            Note::Submitted(id) => panic!("{id:?}"),
        }
    }
    server.join();
    assert!(began.elapsed() < Duration::from_secs(5));
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * 4096
}

#[expect(clippy::disallowed_methods, reason = "a test measures the server from outside")]
fn now() -> Instant {
    Instant::now()
}
