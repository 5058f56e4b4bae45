//! A request adds no clock read, on or off: a ring reads once a turn, the engine three times a step (product contract
//! 5.7). The counts of turns and steps are the server's own.

use std::sync::Arc;
use std::time::Duration;

use uring_serve::clock::{Clock, CountingClock, VirtualClock};
use uring_serve::serve::Hooks;
use uring_serve_tests::embedded::Embedded;
use uring_serve_tests::server::{eventually, scratch};

/// Reads before anything is served: the ring's first, to start its wheel of timers.
const START_READS: u64 = 1;

#[test]
fn reads_are_one_a_turn_and_three_a_step_whatever_is_asked() {
    let lines = scratch("clock-reads");
    let on =
        &["--return-perf-metrics", "--perf-metrics-output-dir", lines.to_str().expect("a path in UTF-8")][..];
    let asked = &[("X-TRTLLM-Return-Metrics", "1"), ("X-TRTLLM-Metrics-Budget", "81920")][..];
    // (name, flags, opt-in)
    let rows = [("off", &[][..], &[][..]), ("on, not asked", on, &[][..]), ("on, asked", on, asked)];
    for (name, args, headers) in rows {
        let clock = Arc::new(CountingClock::new(VirtualClock::new(1_700_000_000)));
        let server = Embedded::start(args, Arc::clone(&clock) as Arc<dyn Clock>, &Hooks::default());
        check(name, &clock, &server);
        let mut clients: Vec<_> = (0..4).map(|_| server.connect()).collect();
        for round in 0..8 {
            let stream = round % 2 == 1;
            let body = format!(r#"{{"prompt":["a","bc"],"max_tokens":12,"stream":{stream}}}"#);
            for client in &mut clients {
                client.send(&uring_serve_tests::http::post_bytes("/v1/completions", headers, &body));
            }
            for client in &mut clients {
                let response = client.read_response();
                assert_eq!(response.status, 200);
                let told =
                    response.text().contains("perf_metrics") || response.header("server-timing").is_some();
                assert_eq!(told, !headers.is_empty(), "{name}");
            }
            check(name, &clock, &server);
        }
        let [turns, steps] = counts(&server);
        assert!(steps >= 12 * 8 && turns >= 8, "{name}: {turns} turns, {steps} steps");
        println!("{name}: 32 requests, {turns} turns, {steps} steps, {} reads", clock.reads());
        drop(clients);
    }
}

/// Waits until both threads rest and compares. A thread is between its read and its count for an instant only, so a
/// read too many or too few stays.
fn check(name: &str, clock: &CountingClock<VirtualClock>, server: &Embedded) {
    let expected = || {
        let [turns, steps] = counts(server);
        START_READS + turns + 3 * steps
    };
    let mut last = 0;
    eventually("the server to rest", Duration::from_secs(10), || {
        let reads = clock.reads();
        let rests = last == reads;
        last = reads;
        rests.then_some(())
    });
    assert_eq!(clock.reads(), expected(), "{name}");
}

fn counts(server: &Embedded) -> [u64; 2] {
    ["uring_serve_ring_turns_total", "uring_serve_engine_steps_total"].map(|sample| server.metric(sample))
}
