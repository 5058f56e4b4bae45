//! What the benchmarks share: machine facts, medians with spread, CPU time of another process, and load.

pub mod cpu_time;
pub mod facts;
#[cfg(feature = "peers")]
pub mod load;
pub mod others;
pub mod stats;
