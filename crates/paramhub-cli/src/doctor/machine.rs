//! Processors, memory, limits, ports and the clock.

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paramhub::service::{HUB_PORT, MANAGER_PORT};
use rustix::process::{Resource, getrlimit};

use super::{Finding, Grade};

/// A hub keeps one descriptor for each worker and core, and some of its own.
const DESCRIPTORS_WANTED: u64 = 4096;
const DESCRIPTORS_NEEDED: u64 = 256;
/// Enough for a small job and its workers.
const MEMORY_WANTED: u64 = 1 << 30;
const MEMORY_NEEDED: u64 = 128 << 20;

pub(super) fn findings() -> Vec<Finding> {
    let mut findings = vec![cores(), features(), memory(), descriptors()];
    findings.push(port(MANAGER_PORT, "manager port", "--manager"));
    findings.push(port(HUB_PORT, "data port", "--listen"));
    findings.push(clock());
    findings
}

fn cores() -> Finding {
    let online = std::fs::read_to_string("/proc/cpuinfo")
        .map_or(0, |text| text.lines().filter(|line| line.starts_with("processor")).count());
    let allowed = rustix::thread::sched_getaffinity(None).map_or(online, |set| set.count() as usize);
    // This is less than the affinity allows where a container has a quota.
    let usable = std::thread::available_parallelism().map_or(allowed, usize::from);
    let text = format!("{usable} usable, {allowed} by affinity, {online} online");
    let (grade, advice) = match usable {
        0 | 1 => (Grade::Warn, ": hub and workers will take turns on one core"),
        _ if usable < online => (Grade::Ok, ": this process may not use them all"),
        _ => (Grade::Ok, ""),
    };
    Finding::new(grade, "cores", text + advice)
}

fn features() -> Finding {
    let found = cpu_features();
    let has = |name: &str| found.iter().any(|&(feature, present)| feature == name && present);
    let list: Vec<&str> = found.iter().filter(|(_, present)| *present).map(|(name, _)| *name).collect();
    if found.is_empty() {
        let text = "this architecture is served by portable code, without hand-written SIMD";
        return Finding::new(Grade::Ok, "processor", text);
    }
    let text = if list.is_empty() { "no AVX2, AVX-512 or F16C".to_owned() } else { list.join(", ") };
    if has("AVX2") && has("F16C") {
        Finding::new(Grade::Ok, "processor", text)
    } else {
        let advice = ": sums and half precision take the portable code, several times slower";
        Finding::new(Grade::Warn, "processor", text + advice)
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<(&'static str, bool)> {
    vec![
        ("AVX2", is_x86_feature_detected!("avx2")),
        ("AVX-512", is_x86_feature_detected!("avx512f")),
        ("F16C", is_x86_feature_detected!("f16c")),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

fn memory() -> Finding {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let (Some(available), Some(total)) = (field("MemAvailable:"), field("MemTotal:")) else {
        return Finding::new(Grade::Warn, "memory", "unknown: /proc/meminfo cannot be read");
    };
    let size = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64);
    let text = format!("{} free of {}", size(available), size(total));
    let advice = match enough(available, MEMORY_NEEDED, MEMORY_WANTED) {
        Grade::Ok => "",
        Grade::Warn => ": enough for small models only",
        Grade::Fail => ": too little for a hub and its workers",
    };
    Finding::new(enough(available, MEMORY_NEEDED, MEMORY_WANTED), "memory", text + advice)
}

fn descriptors() -> Finding {
    let limit = getrlimit(Resource::Nofile).current;
    let text = limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let advice =
        format!(": raise it with `ulimit -n {DESCRIPTORS_WANTED}` before starting a hub for many workers");
    match enough(limit.unwrap_or(u64::MAX), DESCRIPTORS_NEEDED, DESCRIPTORS_WANTED) {
        Grade::Ok => Finding::new(Grade::Ok, "open files", text),
        grade => Finding::new(grade, "open files", text + &advice),
    }
}

fn enough(found: u64, needed: u64, wanted: u64) -> Grade {
    match found {
        _ if found < needed => Grade::Fail,
        _ if found < wanted => Grade::Warn,
        _ => Grade::Ok,
    }
}

fn port(port: u16, what: &'static str, flag: &str) -> Finding {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
        Ok(_) => Finding::new(Grade::Ok, what, format!("{port} is free")),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Finding::new(
            Grade::Warn,
            what,
            format!("{port} is in use, perhaps by a running hub: a second one needs another with {flag}"),
        ),
        Err(error) => Finding::new(Grade::Warn, what, format!("{port} cannot be listened on: {error}")),
    }
}

/// Only the listings of jobs depend on the date, but a date that is far off hints at a machine that was set
/// up badly.
fn clock() -> Finding {
    const YEAR_2024_S: u64 = 1_704_067_200;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    if now.as_secs() < YEAR_2024_S {
        let text = "the date lies in the past: ages of jobs will be wrong; set the clock";
        return Finding::new(Grade::Warn, "clock", text);
    }
    Finding::new(Grade::Ok, "clock", format!("{} s since 1970", now.as_secs()))
}
