//! How many threads a device uses when nobody says: one per physical core that this process may use.
//!
//! Two hardware threads of a core share its load ports and its path to memory, so a second one gains
//! nothing for these kernels.

use std::collections::BTreeSet;
use std::path::Path;

/// Physical cores within the affinity mask, at most what the control group's CPU quota allows; at least 1.
pub fn default_threads() -> usize {
    let available = std::thread::available_parallelism().map_or(1, |n| n.get());
    physical_cores().map_or(available, |cores| cores.clamp(1, available))
}

/// Distinct (package, core) pairs of the allowed CPUs, where Linux tells them.
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = BTreeSet::new();
    for cpu in parse_cpu_list(list)? {
        let topology = Path::new("/sys/devices/system/cpu").join(format!("cpu{cpu}/topology"));
        let read = |name: &str| Some(std::fs::read_to_string(topology.join(name)).ok()?.trim().to_owned());
        // An allowed CPU that is offline has no topology; it does not count.
        if let (Some(package), Some(core)) = (read("physical_package_id"), read("core_id")) {
            cores.insert((package, core));
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// `0-3,8,10-11` as numbers. `None` when it is no such list or names an absurd CPU.
fn parse_cpu_list(list: &str) -> Option<Vec<u32>> {
    const MAX_CPU: u32 = 1 << 16;
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MAX_CPU {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::{default_threads, parse_cpu_list};

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpu_list("\t0-1,4\n"), Some(vec![0, 1, 4]));
        assert_eq!(parse_cpu_list("7"), Some(vec![7]));
        assert_eq!(parse_cpu_list(""), None);
        assert_eq!(parse_cpu_list("0-4000000000"), None);
    }

    #[test]
    fn default_is_within_what_is_available() {
        let available = std::thread::available_parallelism().unwrap().get();
        assert!((1..=available).contains(&default_threads()));
    }
}
