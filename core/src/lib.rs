//! The sans-IO core of `uring-serve`: it decides, and does no IO.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(feature = "fuzzing")]
pub mod http1;
pub mod limits;
pub mod sched;
pub mod time;
