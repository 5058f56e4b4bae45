//! The reactor over real sockets: requests in every shape, answers in every shape.

use base64::Engine as _;
use uring_serve::reactor::{Faults, Options};
use uring_serve_core::http1::Limits;
use uring_serve_tests::echo::{Client, EchoServer, Note, Response};

#[test]
fn a_request_is_answered_and_the_connection_stays() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    for number in 0..3 {
        let target = format!("/echo?{number}");
        assert_eq!(echoed(&client.get(&target)), ("GET".into(), target, Vec::new()));
        let Note::Began(id) = server.note() else { panic!("began first") };
        assert_eq!(id.serial, number + 1);
        assert_eq!(server.note(), Note::Submitted(id));
    }
    assert_eq!(server.counters.requests.value(), 3);
    assert_eq!(server.counters.accepted.value(), 1);
}

#[test]
fn a_hundred_pipelined_requests_are_answered_in_order() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    let requests: String = (0..100).map(|n| format!("GET /{n} HTTP/1.1\r\nHost: h\r\n\r\n")).collect();
    client.send(&requests);
    for number in 0..100 {
        assert_eq!(echoed(&client.response()).1, format!("/{number}"));
    }
}

#[test]
fn pipelined_requests_wait_for_an_answer_that_comes_late() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send("GET /later?20 HTTP/1.1\r\nHost: h\r\n\r\nGET /next HTTP/1.1\r\nHost: h\r\n\r\nGET /ne");
    assert_eq!(client.response().body, b"later");
    assert_eq!(echoed(&client.response()).1, "/next");
    client.send("xt HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(echoed(&client.response()).1, "/next");
}

#[test]
fn any_split_of_the_input_is_the_same_request() {
    for (name, options) in [
        ("whole buffers", Options::default()),
        ("one byte each", Options { buffer_bytes: 1, ..Options::default() }),
        ("three bytes each", Options { buffer_bytes: 3, ..Options::default() }),
    ] {
        let server = EchoServer::start(options);
        let mut client = server.connect();
        let request = "POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello";
        let chunked = "POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n";
        client.send(format!("{request}{chunked}"));
        assert_eq!(echoed(&client.response()).2, b"hello", "{name}");
        assert_eq!(echoed(&client.response()).2, b"abcde", "{name}");
        for byte in request.as_bytes() {
            client.send([*byte]);
        }
        assert_eq!(echoed(&client.response()), ("POST".into(), "/p".into(), b"hello".to_vec()), "{name}");
    }
}

#[test]
fn sends_of_one_byte_make_the_same_answer() {
    let faults = Faults { send_bytes_max: Some(1), ..Faults::default() };
    let server = EchoServer::start(Options { faults, ..Options::default() });
    let mut client = server.connect();
    assert_eq!(echoed(&client.get("/slow")).1, "/slow");
    let chunks = client.get("/chunks?5");
    assert_eq!(chunks.body, b"0123456789".repeat(5));
    assert!(server.counters.short_sends.value() > 100);
}

#[test]
fn a_large_body_goes_both_ways() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    let body: Vec<u8> = (0..4 << 20).map(|n: u32| (n % 251) as u8).collect();
    let mut request =
        format!("POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
    request.extend_from_slice(&body);
    client.send(&request);
    assert!(echoed(&client.response()).2 == body);

    let mut request = b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    for chunk in body.chunks(100_000) {
        request.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        request.extend_from_slice(chunk);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"0\r\n\r\n");
    client.send(&request);
    assert!(echoed(&client.response()).2 == body);
    assert_eq!(client.get("/big?4194304").body.len(), 4 << 20);
    // The next requests wait while that much is unsent, and lose nothing.
    client.send("GET /big?3000000 HTTP/1.1\r\nHost: h\r\n\r\n".repeat(4));
    for _ in 0..4 {
        assert_eq!(client.response().body.len(), 3_000_000);
    }
    assert_eq!(server.counters.slow_readers.value(), 0);
}

#[test]
fn a_body_over_the_limit_is_refused_and_the_answer_arrives() {
    let http = Limits { body_bytes_max: 1000, ..Limits::default() };
    let server = EchoServer::start(Options { http, ..Options::default() });
    for (length, status) in [(999, 200), (1000, 200), (1001, 413), (100_000, 413)] {
        let mut client = server.connect();
        client.send(format!("POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n"));
        client.send(vec![b'x'; length]);
        let response = client.response();
        assert_eq!(response.status, status, "{length}");
        if status == 413 {
            assert!(response.head.contains("\r\nConnection: close\r\n"), "{}", response.head);
            assert_eq!(client.read_to_end().expect("no reset"), b"");
        }
    }
}

#[test]
fn a_client_that_waits_for_continue_gets_it() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send("POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(client.response_head().status, 100);
    client.send("hello");
    assert_eq!(echoed(&client.response()).2, b"hello");
}

#[test]
fn a_refusal_comes_before_the_body_and_closes() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send("POST /refused HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n");
    let response = client.response();
    assert_eq!((response.status, response.body.as_slice()), (401, &b"{}"[..]));
    assert!(response.head.contains("\r\nWWW-Authenticate: Bearer\r\n"));
    client.send("hello, not read");
    assert_eq!(client.read_to_end().expect("no reset"), b"");
    assert_eq!(server.counters.requests.value(), 0);
}

#[test]
fn head_has_no_body_and_http10_closes() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send("HEAD /big?77 HTTP/1.1\r\nHost: h\r\n\r\n");
    let head = client.response_head();
    assert!(head.head.contains("\r\nContent-Length: 77\r\n"), "{}", head.head);
    assert_eq!(echoed(&client.get("/next")).1, "/next");

    let mut client = server.connect();
    client.send("GET /chunks?2 HTTP/1.0\r\n\r\n");
    let head = client.response_head().head;
    assert!(!head.to_ascii_lowercase().contains("transfer-encoding"), "{head}");
    assert_eq!(client.read_to_end().expect("no reset"), b"01234567890123456789");
}

#[test]
fn a_bad_request_is_answered_and_nothing_behind_it_is_read() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send("GET /a HTTP/1.1\r\nHost: h\r\n\r\nGET /b HTTP/1.1\nHost: h\r\n\r\nGET /c HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(echoed(&client.response()).1, "/a");
    assert_eq!(client.response().status, 400);
    assert_eq!(client.read_to_end().expect("no reset"), b"");
    assert_eq!(server.counters.requests.value(), 1);
    assert_eq!(server.counters.peer_errors.value(), 1);
}

#[test]
fn the_date_is_todays() {
    let server = EchoServer::start(Options::default());
    let head = server.connect().get("/").head;
    let date = head.split("\r\nDate: ").nth(1).and_then(|rest| rest.split("\r\n").next()).expect("a date");
    assert_eq!(date.len(), 29);
    assert!(!date.contains("1970") && date.ends_with(" GMT"), "{date}");
}

#[test]
fn a_service_that_breaks_its_framing_loses_the_connection() {
    let server = EchoServer::start(Options::default());
    let mut client = server.connect();
    client.send_get("/misuse");
    let _ = client.read_to_end();
    assert!(matches!(server.note(), Note::Began(_)));
    assert!(matches!(server.note(), Note::Gone(..)));
    assert_eq!(server.counters.misuse.value(), 1);
    assert_eq!(server.connect().get("/").status, 200);
}

#[test]
fn answers_come_from_other_threads() {
    let server = EchoServer::start(Options::default());
    let mut clients: Vec<Client> = (0..50).map(|_| server.connect()).collect();
    for round in 0..20 {
        for client in &mut clients {
            client.send_get("/queued");
        }
        let mut began = 0;
        let mut ended = 0;
        while ended < clients.len() {
            match server.note() {
                Note::Began(id) => {
                    began += 1;
                    server.answer(id);
                }
                Note::Submitted(_) => ended += 1,
                Note::Gone(id, why) => panic!("round {round}: {id:?} {why:?}"),
            }
        }
        assert_eq!(began, clients.len());
        for client in &mut clients {
            assert_eq!(client.response().body, b"queued");
        }
    }
    let wakes = server.counters.wakes_sent.value() + server.counters.wakes_skipped.value();
    assert_eq!(wakes, 1000);
}

fn echoed(response: &Response) -> (String, String, Vec<u8>) {
    assert_eq!(response.status, 200, "{}", response.head);
    let json: serde_json::Value = serde_json::from_slice(&response.body).expect("JSON");
    let text = |name: &str| json[name].as_str().expect("a string").to_owned();
    let body = base64::engine::general_purpose::STANDARD.decode(text("b")).expect("base64");
    (text("m"), text("u"), body)
}
