//! Which host a process is on.

/// Tells this host, and on it this network namespace, from all others: processes for which it is the same reach one another's
/// shared memory and abstract sockets. Empty if the system does not say.
pub fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    // As in `net:[4026531840]`.
    let namespace: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    match boot.trim() {
        "" => String::new(),
        boot => format!("{boot}-{namespace}"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_host_is_the_same_for_all_its_processes() {
        let here = super::host_identity();
        assert_eq!(here, super::host_identity());
        assert!(here.len() <= 64 && here.bytes().all(|byte| byte.is_ascii_graphic()), "{here:?}");
    }
}
