//! The clock header of a response (UF 1.9): when this process received the request and sent the head.

use alloc::vec::Vec;

use super::server_timing::read_metrics;
use crate::metrics::text::{read_seconds, write_seconds};
use crate::time::{ClockExchange, ReportNs};

/// Default name of the clock header. Upstream's literal is not public; the name is a setting.
pub const CLOCK_SYNC: &str = "X-TRTLLM-Clock-Sync";

/// What the clock header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockStamp {
    /// The request's head was complete.
    pub receive: ReportNs,
    /// The response's head is sent.
    pub transmit: ReportNs,
}

impl ClockStamp {
    /// Appends the value, e.g. `receive;ts=10.000000000, transmit;ts=10.250000000`.
    pub fn write_value(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"receive;ts=");
        write_seconds(self.receive, out);
        out.extend_from_slice(b", transmit;ts=");
        write_seconds(self.transmit, out);
    }

    /// Reads a value. `None` if one of the two is missing or no number: the peer's times then stay as they are.
    #[must_use]
    pub fn read_value(value: &[u8]) -> Option<Self> {
        let moment = |name: &[u8]| {
            let metric = read_metrics(value).find(|metric| metric.name == name)?;
            read_seconds(&metric.param("ts")?)
        };
        Some(Self { receive: moment(b"receive")?, transmit: moment(b"transmit")? })
    }

    /// Joins the peer's two times with ours: just before the request was sent, and when the head of its response arrived.
    #[must_use]
    pub const fn exchange(self, originate: ReportNs, destination: ReportNs) -> ClockExchange {
        ClockExchange { originate, receive: self.receive, transmit: self.transmit, destination }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn values_round_trip() {
        let stamp =
            ClockStamp { receive: ReportNs::from_raw(-1), transmit: ReportNs::from_raw(10_250_000_000) };
        let mut value = vec![];
        stamp.write_value(&mut value);
        assert_eq!(value, b"receive;ts=-0.000000001, transmit;ts=10.250000000");
        assert_eq!(ClockStamp::read_value(&value), Some(stamp));
    }

    #[test]
    fn a_value_without_both_times_says_nothing() {
        let values: [&[u8]; 6] = [
            b"",
            b"receive;ts=1",
            b"transmit;ts=1",
            b"receive;ts=invalid, transmit;ts=1",
            b"receive;ts=nan, transmit;ts=1",
            b"receive;ts=1, transmit;ts=inf",
        ];
        for value in values {
            assert_eq!(ClockStamp::read_value(value), None);
        }
    }
}
