//! An id of the host on which this process runs, by which processes find out whether they can share memory.

/// An id that distinguishes this host, and this network namespace on it, from all others: processes with the
/// same id reach one another's shared memory and abstract Unix sockets. It is empty if the system does not
/// tell the id of its boot.
pub fn host_identity() -> String {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network_namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    // The link points to a name such as `net:[4026531840]`.
    let network_namespace: String =
        network_namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    match boot_id.trim() {
        "" => String::new(),
        boot_id => format!("{boot_id}-{network_namespace}"),
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
