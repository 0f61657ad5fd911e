//! What the kernel reports of this process and its host.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Processor time of all threads of this process, user and system.
pub fn cpu_seconds() -> f64 {
    read(ClockId::ProcessCPUTime).as_secs_f64()
}

/// The clock that all processes of this machine share.
pub fn monotonic() -> Duration {
    read(ClockId::Monotonic)
}

fn read(clock: ClockId) -> Duration {
    // Neither clock can be set, so neither is ever negative.
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

/// The most memory that this process has had at once; 0 if the kernel does not report it.
pub(super) fn peak_bytes() -> u64 {
    kilobytes("/proc/self/status", "VmHWM:").unwrap_or(0) << 10
}

/// The memory that is available without swapping, if the kernel reports it.
pub fn available_bytes() -> Option<u64> {
    kilobytes("/proc/meminfo", "MemAvailable:").map(|kilobytes| kilobytes << 10)
}

/// The processors' name, if the kernel reports it.
pub fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let (_, name) = text.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(name.trim().to_owned())
}

fn kilobytes(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Processor seconds of each of this process's hub cores, in order of their numbers; empty if the kernel does
/// not report them. (A core publishes its own counters now and then, too seldom for one exchange.)
pub(super) fn core_seconds() -> Vec<f64> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let mut cores: Vec<(usize, f64)> = threads
        .filter_map(|thread| {
            let folder = thread.ok()?.path();
            let name = std::fs::read_to_string(folder.join("comm")).ok()?;
            let core = name.trim_end().strip_prefix("hub-core-")?.parse().ok()?;
            let schedule = std::fs::read_to_string(folder.join("schedstat")).ok()?;
            let nanoseconds: f64 = schedule.split_whitespace().next()?.parse().ok()?;
            Some((core, nanoseconds / 1e9))
        })
        .collect();
    cores.sort_by_key(|&(core, _)| core);
    cores.into_iter().map(|(_, seconds)| seconds).collect()
}

/// Bytes that went over this host's network interfaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkBytes {
    /// Bytes that left.
    pub sent: u64,
    /// Bytes that arrived.
    pub received: u64,
}

/// Bytes of all interfaces of this process's host except loopback, since the interfaces exist; zero if the
/// kernel does not report them. On a testbed a host is a network namespace of Linux, whose interfaces are its
/// own.
pub fn network_bytes() -> NetworkBytes {
    let table = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let rows = table.lines().filter_map(|line| line.split_once(':'));
    let counted = rows.filter(|(name, _)| name.trim() != "lo").filter_map(|(_, counters)| {
        let mut counters = counters.split_whitespace().map(|counter| counter.parse::<u64>().ok());
        let received = counters.next()??;
        let sent = counters.nth(7)??;
        Some(NetworkBytes { sent, received })
    });
    counted.fold(NetworkBytes::default(), |sum, one| NetworkBytes {
        sent: sum.sent + one.sent,
        received: sum.received + one.received,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_uses_time_and_memory() {
        let before = cpu_seconds();
        let block = std::hint::black_box(vec![1_u8; 32 << 20]);
        assert!(peak_bytes() >= block.len() as u64);
        assert!(cpu_seconds() > before && monotonic() > Duration::ZERO);
        assert!(available_bytes() > Some(0));
    }
}
