//! What two runners of the suite `api-validation.json` share.

/// Cases whose outcome also depends on a connection, for the runner that has one.
pub const NEEDS_CONNECTION: [&str; 4] = [
    // The usage chunk on the wire.
    "api-0113", // Content-Encoding: gzip.
    "api-0143", // HEAD without a body.
    "api-0150", // No metrics without the exact opt-in.
    "api-0153",
];
