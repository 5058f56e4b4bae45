//! The Linux half of `uring-serve`: sockets, threads, files, and the OpenAI API.
//!
//! A library, so that tests and benchmarks start servers in their own process.

mod bufs;
pub mod clock;
mod conn;
pub mod counters;
pub mod listen;
pub mod nofile;
pub mod pool;
pub mod reactor;
pub mod ring;
pub mod service;
mod slots;
mod token;
pub mod waker;
mod wheel;
