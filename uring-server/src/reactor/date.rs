//! `Date` in the one format that is written (RFC 9110 §5.6.7).

use std::time::Duration;

use crate::clock::Utc;

/// An IMF-fixdate, e.g. `Sun, 06 Nov 1994 08:49:37 GMT`.
pub(crate) type Date = [u8; 29];

/// Formats a time since the UNIX epoch, up to the year 9999.
pub(crate) fn format_date(since_epoch: Duration) -> Date {
    let utc = Utc::from_unix_seconds(since_epoch.as_secs().min(LAST_SECOND));
    let mut date = *b"Day, 00 Mon 0000 00:00:00 GMT";
    date[..3].copy_from_slice(DAYS[usize::from(utc.weekday)]);
    date[8..11].copy_from_slice(MONTHS[usize::from(utc.month) - 1]);
    let mut put = |at: usize, value: u8| {
        date[at] = b'0' + value / 10;
        date[at + 1] = b'0' + value % 10;
    };
    put(5, utc.day);
    put(12, (utc.year / 100) as u8);
    put(14, (utc.year % 100) as u8);
    put(17, utc.hour);
    put(20, utc.minute);
    put(23, utc.second);
    date
}

const DAYS: [&[u8; 3]; 7] = [b"Sun", b"Mon", b"Tue", b"Wed", b"Thu", b"Fri", b"Sat"];
const MONTHS: [&[u8; 3]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];
/// Fri, 31 Dec 9999 23:59:59 GMT.
const LAST_SECOND: u64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        for (seconds, expected) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (951_782_399, "Mon, 28 Feb 2000 23:59:59 GMT"),
            (951_782_400, "Tue, 29 Feb 2000 00:00:00 GMT"),
            (951_868_800, "Wed, 01 Mar 2000 00:00:00 GMT"),
            (4_107_542_400, "Mon, 01 Mar 2100 00:00:00 GMT"),
            (LAST_SECOND, "Fri, 31 Dec 9999 23:59:59 GMT"),
            (LAST_SECOND + 1, "Fri, 31 Dec 9999 23:59:59 GMT"),
        ] {
            let date = format_date(Duration::from_secs(seconds));
            assert_eq!(std::str::from_utf8(&date).unwrap(), expected);
        }
    }
}
