//! Numbers as people read them, and the sizes that several commands tell.

use minfer_engine::KvFormat;
use minfer_graph::{PagedPart, StateDecl, StateKind};
use minfer_runtime::Memory;

/// Bytes in binary units: `30.0 MiB`.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, size)| n >= *size) {
        Some((name, size)) => format!("{:.1} {name}", n as f64 / *size as f64),
        None => format!("{n} B"),
    }
}

/// A count in thousands, millions or billions: `29.4 M`.
pub(crate) fn count(n: u64) -> String {
    const UNITS: [(&str, f64); 3] = [("B", 1e9), ("M", 1e6), ("K", 1e3)];
    match UNITS.iter().find(|(_, size)| n as f64 >= *size) {
        Some((name, size)) => format!("{:.1} {name}", n as f64 / size),
        None => n.to_string(),
    }
}

/// `1 token`, `2 tokens`.
pub(crate) fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// What a device says about its memory.
pub(crate) fn memory(memory: &Memory) -> String {
    match memory {
        Memory::Available(n) => format!("{} free", bytes(*n)),
        Memory::Unbounded => "free memory not stated".to_string(),
        Memory::QueryFailed(why) => format!("free memory unknown: {why}"),
    }
}

/// Bytes of keys and values that one token takes in every layer together.
pub(crate) fn kv_bytes_per_token(states: &[StateDecl], format: KvFormat) -> u64 {
    let grows = parts(states).filter(|p| p.window.is_none());
    grows.map(|p| format.row_bytes(p.width) as u64 / p.every.max(1) as u64).sum()
}

/// Bytes of the rows of which only the last ones are kept, in every layer together.
pub(crate) fn window_bytes(states: &[StateDecl], format: KvFormat) -> u64 {
    let rows = parts(states).filter_map(|p| p.window.map(|rows| (p.width, rows)));
    rows.map(|(width, rows)| format.row_bytes(width) as u64 * rows as u64).sum()
}

fn parts(states: &[StateDecl]) -> impl Iterator<Item = &PagedPart> {
    states.iter().flat_map(|state| match &state.kind {
        StateKind::Paged { parts } => &parts[..],
        _ => &[],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
        assert_eq!(count(999), "999");
        assert_eq!(count(29_400_000), "29.4 M");
        assert_eq!(plural(1, "token"), "1 token");
        assert_eq!(plural(0, "token"), "0 tokens");
    }
}
