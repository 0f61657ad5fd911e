//! What the kernel's files state about devices.

use std::path::{Path, PathBuf};

use super::Rate;

/// A tree laid out like `/sys`.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    /// The kernel's tree.
    fn default() -> Self {
        Sysfs::at("/sys")
    }
}

impl Sysfs {
    /// The tree at `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Sysfs { root: root.into() }
    }

    /// The rate of an interface according to its driver. `None` if the driver does not know it, as without a
    /// carrier, or does not state it, as for many virtual interfaces.
    pub fn rate(&self, interface: &str) -> Option<Rate> {
        // Without a carrier the file has -1, or reading it fails.
        Rate::from_mbit(read(&self.interface(interface).join("speed"))?.parse().ok()?)
    }

    /// The NUMA node of an interface's device. `None` for virtual interfaces, which have no device, and on
    /// machines with one node, where the file has -1.
    pub fn node(&self, interface: &str) -> Option<u32> {
        read(&self.interface(interface).join("device/numa_node"))?.parse().ok()
    }

    /// Whether an interface is a bridge whose ports all end on this host, as those of containers and virtual machines do.
    pub fn is_private_bridge(&self, interface: &str) -> bool {
        let Ok(ports) = std::fs::read_dir(self.interface(interface).join("brif")) else { return false };
        !ports.flatten().any(|port| self.leads_outside(&port.file_name().to_string_lossy()))
    }

    /// Whether there is a device below this interface, or another interface that may have one.
    fn leads_outside(&self, interface: &str) -> bool {
        let folder = self.interface(interface);
        let is_above_another = || {
            let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("lower_"))
        };
        folder.join("device").exists() || is_above_another()
    }

    /// The processors of each NUMA node, ascending; none if the kernel knows no nodes.
    pub fn nodes(&self) -> Vec<(u32, Vec<usize>)> {
        let entries =
            std::fs::read_dir(self.root.join("devices/system/node")).into_iter().flatten().flatten();
        let mut nodes: Vec<(u32, Vec<usize>)> = entries
            .filter_map(|entry| {
                let node = entry.file_name().to_string_lossy().strip_prefix("node")?.parse().ok()?;
                Some((node, processors(&read(&entry.path().join("cpulist"))?)?))
            })
            .collect();
        nodes.sort_unstable();
        nodes
    }

    fn interface(&self, name: &str) -> PathBuf {
        self.root.join("class/net").join(name)
    }
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Reads a list of the kernel, as in `0-3,8`; a node without processors has an empty one.
fn processors(list: &str) -> Option<Vec<usize>> {
    /// The largest number of processors for which a kernel can be built.
    const PROCESSOR_MAX: usize = 8191;
    let mut processors = Vec::new();
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last > PROCESSOR_MAX {
            return None;
        }
        processors.extend(first..=last);
    }
    Some(processors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read_as_the_kernel_writes_them() {
        assert_eq!(processors("0-2,8,10-11"), Some(vec![0, 1, 2, 8, 10, 11]));
        assert_eq!(processors(""), Some(vec![]));
        for broken in ["0-", "a", "3-9999999"] {
            assert_eq!(processors(broken), None, "{broken}");
        }
    }
}
