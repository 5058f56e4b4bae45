//! The Linux half of `uring-serve`: sockets, threads, files, and the OpenAI API.
//!
//! A library, so that tests and benchmarks start servers in their own process.

pub mod api;
pub mod args;
mod bufs;
pub mod clock;
pub mod config;
mod conn;
pub mod counters;
pub mod engine;
pub mod failure;
pub mod journal;
pub mod listen;
pub mod loading;
pub mod nofile;
pub mod pool;
pub mod prometheus;
pub mod reactor;
pub mod ring;
pub mod service;
pub mod signals;
mod slots;
mod token;
pub mod waker;
mod wheel;
