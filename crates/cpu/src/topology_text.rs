//! What the operating system says about the processor and its memory, read from Linux's text files.

use std::fs;

use minfer_runtime::Memory;

/// The processor's name as the system shows it.
pub(crate) fn model_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// Memory that may still be taken: what the system has available, or less inside a limited group.
pub(crate) fn available_memory() -> Memory {
    if !cfg!(target_os = "linux") {
        return Memory::Unbounded;
    }
    match fs::read_to_string("/proc/meminfo") {
        Err(e) => Memory::QueryFailed(format!("/proc/meminfo: {e}")),
        Ok(text) => match meminfo_available(&text) {
            None => Memory::QueryFailed("/proc/meminfo has no MemAvailable line".to_string()),
            Some(bytes) => Memory::Available(group_headroom().map_or(bytes, |b| b.min(bytes))),
        },
    }
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the control group (containers) leaves, if it has a limit.
fn group_headroom() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max")?;
    let used = number("/sys/fs/cgroup/memory.current")?;
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_line() {
        assert_eq!(meminfo_available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2048 * 1024));
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
    }
}
