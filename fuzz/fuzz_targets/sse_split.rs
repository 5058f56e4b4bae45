#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uring_serve_core::fuzzing::sse_split(data));
