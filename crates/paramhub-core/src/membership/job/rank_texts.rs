//! How messages name ranks and their processes.

/// The number of ranges of ranks that a message lists before it only counts the rest.
const RANGES_LISTED: usize = 8;

/// A process by host and number, by which people can find it.
pub(super) fn describe_process(host: &str, process: u32) -> String {
    match printable(host).as_str() {
        "" => format!("process {process}"),
        host => format!("process {process} on {host}"),
    }
}

/// A host name fit for a message, whatever a client sent.
pub(super) fn printable(host: &str) -> String {
    host.chars().filter(|character| character.is_ascii_graphic()).take(255).collect()
}

/// `rank 1`, `ranks 1 and 3`, `ranks 0 to 5, 7 and 9`; many ranges are cut short and the rest counted.
pub(super) fn list_ranks(ranks: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => ranges.push((rank, rank)),
        }
    }
    let hidden: u32 = ranges.iter().skip(RANGES_LISTED).map(|(first, last)| last - first + 1).sum();
    ranges.truncate(RANGES_LISTED);
    let mut words: Vec<String> = Vec::new();
    for (first, last) in ranges {
        match last - first {
            0 => words.push(first.to_string()),
            1 => words.extend([first.to_string(), last.to_string()]),
            _ => words.push(format!("{first} to {last}")),
        }
    }
    if hidden > 0 {
        words.push(format!("{hidden} more"));
    }
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", super::join_words(&words))
}

/// [`list_ranks`] with a verb that agrees in number.
pub(super) fn list_ranks_with_verb(ranks: &[u32], one: &str, many: &str) -> String {
    format!("{} {}", list_ranks(ranks), if ranks.len() == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_ranks_are_compressed() {
        assert_eq!(list_ranks(&[1]), "rank 1");
        assert_eq!(list_ranks(&[1, 3]), "ranks 1 and 3");
        assert_eq!(list_ranks(&[1, 2]), "ranks 1 and 2");
        assert_eq!(list_ranks(&[0, 1, 2, 3, 7, 9]), "ranks 0 to 3, 7 and 9");
        let odd: Vec<u32> = (0..100).map(|half| 2 * half + 1).collect();
        assert_eq!(list_ranks(&odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 92 more");
        assert_eq!(list_ranks_with_verb(&[4], "has", "have"), "rank 4 has");
        assert_eq!(list_ranks_with_verb(&[4, 5], "has", "have"), "ranks 4 and 5 have");
    }

    #[test]
    fn a_host_name_cannot_corrupt_a_message() {
        assert_eq!(describe_process("node\n7\u{1b}[31m", 12), "process 12 on node7[31m");
        assert_eq!(describe_process("", 12), "process 12");
    }
}
