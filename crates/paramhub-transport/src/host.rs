//! The identity of a process's host.

/// An id that distinguishes this host, and this network namespace on it, from all others: processes with the
/// same id reach one another's shared memory and abstract sockets. Empty if the system does not supply one.
pub fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    // The form is `net:[4026531840]`.
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
