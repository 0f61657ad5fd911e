//! Timelines as Chrome's trace events, which chrome://tracing and Perfetto show.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

use super::trace::Span;

/// Writes the timelines of several processes, each with a number, a name and spans.
///
/// A span that a thread began and ended is on that thread's own track. A span that another thread ended has a
/// track beside them.
///
/// # Errors
/// If `out` cannot be written.
pub fn write_chrome<'a>(
    out: &mut dyn Write,
    processes: impl IntoIterator<Item = (u32, &'a str, &'a [Span])>,
) -> io::Result<()> {
    write!(out, "{{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")?;
    let mut between = "\n";
    let mut event = |line: String| {
        let written = write!(out, "{between}{line}");
        between = ",\n";
        written
    };
    for (process, name, spans) in processes {
        event(named("process_name", process, 0, name))?;
        let mut threads: Vec<(usize, &str)> =
            spans.iter().map(|span| (span.thread, &*span.thread_name)).collect();
        threads.sort_unstable();
        threads.dedup();
        for (thread, name) in threads {
            event(named("thread_name", process, thread, name))?;
        }
        for (number, span) in spans.iter().enumerate() {
            let Span { name, kind, thread, start, end, .. } = span;
            let what = format!(
                "\"name\": {}, \"cat\": \"{kind}\", \"pid\": {process}, \"tid\": {thread}",
                quoted(name)
            );
            let (from, to) = (microseconds(*start), microseconds(*end));
            if span.is_deferred {
                let id = format!("\"id2\": {{\"local\": \"{number}\"}}");
                event(format!("{{\"ph\": \"b\", {what}, {id}, \"ts\": {from}}}"))?;
                event(format!("{{\"ph\": \"e\", {what}, {id}, \"ts\": {to}}}"))?;
            } else {
                let lasted = microseconds(end.saturating_sub(*start));
                event(format!("{{\"ph\": \"X\", {what}, \"ts\": {from}, \"dur\": {lasted}}}"))?;
            }
        }
    }
    writeln!(out, "\n]}}")
}

fn named(what: &str, process: u32, thread: usize, name: &str) -> String {
    let name = quoted(name);
    format!(
        "{{\"ph\": \"M\", \"name\": \"{what}\", \"pid\": {process}, \"tid\": {thread}, \"args\": {{\"name\": {name}}}}}"
    )
}

/// Microseconds, the unit of the format.
fn microseconds(time: Duration) -> String {
    format!("{}.{:03}", time.as_micros(), time.subsec_nanos() % 1000)
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(control));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Kind;

    #[test]
    fn every_span_is_an_event_of_its_process_and_thread() {
        let span = |name: &str, thread, is_deferred| Span {
            name: name.into(),
            kind: Kind::Copy,
            thread,
            thread_name: format!("copy {thread}").into(),
            start: Duration::from_nanos(1_002_003),
            end: Duration::from_nanos(5_000_004),
            is_deferred,
        };
        let (zero, one) = ([span("a \"b\"\\\n", 3, false)], [span("c", 4, true)]);
        let mut written = Vec::new();
        write_chrome(&mut written, [(0, "rank 0", &zero[..]), (1, "rank 1", &one[..])]).unwrap();
        let expected = r#"{"displayTimeUnit": "ms", "traceEvents": [
{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
{"ph": "M", "name": "thread_name", "pid": 0, "tid": 3, "args": {"name": "copy 3"}},
{"ph": "X", "name": "a \"b\"\\\u000a", "cat": "copy", "pid": 0, "tid": 3, "ts": 1002.003, "dur": 3998.001},
{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1"}},
{"ph": "M", "name": "thread_name", "pid": 1, "tid": 4, "args": {"name": "copy 4"}},
{"ph": "b", "name": "c", "cat": "copy", "pid": 1, "tid": 4, "id2": {"local": "0"}, "ts": 1002.003},
{"ph": "e", "name": "c", "cat": "copy", "pid": 1, "tid": 4, "id2": {"local": "0"}, "ts": 5000.004}
]}
"#;
        assert_eq!(String::from_utf8(written).unwrap(), expected);
        let mut nothing = Vec::new();
        write_chrome(&mut nothing, []).unwrap();
        assert_eq!(
            String::from_utf8(nothing).unwrap(),
            "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n]}\n"
        );
    }
}
