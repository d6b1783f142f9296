//! What the executor counts about copies and waits: the proof that nothing blocks that should not.

/// Counters of one executor since it was opened. A CPU-only executor shows zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Values sent to another device, each counted once per destination and execution.
    pub copies: u64,
    /// Copies whose arrival was waited for: always equal to `copies` after an execution.
    pub waits: u64,
    /// Waits made at the consumer's first read; the others were drained after the last split.
    pub deferred_waits: u64,
    /// Copies during which the host stood still (the `sync_copies` reference path).
    pub blocking_copies: u64,
    /// Copies issued on the stream of an asynchronous source without waiting.
    pub async_copies: u64,
    /// Waits in which the host waited for an event of an asynchronous source.
    pub event_syncs: u64,
    /// Waits left to the consumer's own stream, the host going on.
    pub stream_waits: u64,
    /// Most copies under way at one time.
    pub in_flight_peak: u64,
    /// Times the host waited for a device's whole stream.
    pub stream_syncs: u64,
}
