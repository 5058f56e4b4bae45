//! What the end-to-end tests share: a server process, a raw HTTP client, the real model and a Python environment.
//!
//! Everything here is bounded: waits have deadlines, processes end with their owner, traffic stays on loopback.

pub mod api_validation;
pub mod echo;
pub mod embedded;
pub mod engine;
pub mod gguf;
pub mod http;
pub mod server;
pub mod setup;
