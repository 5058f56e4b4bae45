//! No turn of a ring thread takes in more requests than it can answer within its bound: the rest waits for the next.

use std::sync::Arc;

use uring_serve::clock::SystemClock;
use uring_serve::serve::Hooks;
use uring_serve_tests::embedded::Embedded;

#[test]
fn pipelined_requests_are_spread_over_turns_and_all_answered_in_order() {
    let server = Embedded::start(&[], Arc::new(SystemClock), &Hooks::default());
    let turns = || server.metric("uring_serve_ring_turns_total");
    let mut client = server.connect();
    client.get("/version");
    let before = turns();
    let requests = 2000;
    // One write: the server finds many of them in each of its receive buffers.
    client.send("GET /version HTTP/1.1\r\nHost: a\r\n\r\n".repeat(requests).as_bytes());
    for at in 0..requests {
        assert_eq!(client.read_response().status, 200, "answer {at}");
    }
    // 256 bytes counted for each request, 20 KiB a turn.
    let least = (requests * 256 / (20 * 1024)) as u64;
    let taken = turns() - before;
    assert!(taken >= least, "{requests} requests in {taken} turns, fewer than {least}");
}

#[test]
fn a_burst_of_generation_requests_is_spread_over_turns_too() {
    let server = Embedded::start(
        &["--sim-ttft-us", "0", "--sim-tpot-us", "0"],
        Arc::new(SystemClock),
        &Hooks::default(),
    );
    let mut clients: Vec<_> = (0..256).map(|_| server.connect()).collect();
    let body = format!("{{\"prompt\":\"{}\",\"max_tokens\":1}}", "x".repeat(1500));
    let request = uring_serve_tests::http::post_bytes("/v1/completions", &[], &body);
    for client in &mut clients {
        client.send(&request);
    }
    for client in &mut clients {
        assert_eq!(client.read_response().status, 200);
    }
}
