//! The timelines of a scenario's ranks, as ranks send them and as files.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use paramhub_collective::engine::{Kind, Span, write_chrome};
use serde::{Deserialize, Serialize};

use crate::plot::{Interval, Panel, TimelineRow};

/// The timeline of one rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Timeline {
    pub(super) spans: Vec<RecordedOperation>,
    /// The time at which the forward passes of the turn's steps began, in seconds since the origin of the
    /// spans.
    pub(super) steps: Vec<f64>,
}

/// A span that is sent between processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RecordedOperation {
    name: String,
    /// The name of its kind.
    kind: String,
    thread: usize,
    thread_name: String,
    start: Duration,
    end: Duration,
    is_deferred: bool,
}

impl From<Span> for RecordedOperation {
    fn from(span: Span) -> RecordedOperation {
        let Span { name, kind, thread, thread_name, start, end, is_deferred } = span;
        let (kind, thread_name) = (kind.to_string(), thread_name.to_string());
        RecordedOperation { name, kind, thread, thread_name, start, end, is_deferred }
    }
}

impl From<&RecordedOperation> for Span {
    fn from(ran: &RecordedOperation) -> Span {
        let known =
            [Kind::Compute, Kind::Copy, Kind::Communicate].into_iter().find(|kind| kind.name() == ran.kind);
        Span {
            name: ran.name.clone(),
            kind: known.unwrap_or(Kind::Communicate),
            thread: ran.thread,
            thread_name: ran.thread_name.as_str().into(),
            start: ran.start,
            end: ran.end,
            is_deferred: ran.is_deferred,
        }
    }
}

/// Writes all ranks' timelines as Chrome's trace events.
pub(super) fn write(path: &Path, ranks: &[Timeline]) -> anyhow::Result<()> {
    let named: Vec<(u32, String, Vec<Span>)> = (0..)
        .zip(ranks)
        .map(|(rank, timeline)| {
            (rank, format!("rank {rank}"), timeline.spans.iter().map(Span::from).collect())
        })
        .collect();
    let cannot = || format!("cannot write {}", path.display());
    let mut file = BufWriter::new(File::create(path).with_context(cannot)?);
    write_chrome(&mut file, named.iter().map(|(rank, name, spans)| (*rank, name.as_str(), spans.as_slice())))
        .and_then(|()| file.flush())
        .with_context(cannot)
}

impl Timeline {
    /// The last whole step, from the beginning of its forward pass to that of the next step.
    pub(super) fn panel(&self, title: String) -> Option<Panel> {
        let [.., from, to] = self.steps[..] else { return None };
        let place = |time: Duration| (time.as_secs_f64() - from).clamp(0.0, to - from);
        let rows = ROWS.map(|row| {
            let spans = self.spans.iter().filter(|ran| row_of(ran) == Some(row.0));
            let intervals = spans.map(|ran| Interval {
                from: place(ran.start),
                to: place(ran.end),
                colour: colour_of(&ran.name),
            });
            let within = intervals.filter(|interval| interval.from < interval.to);
            TimelineRow { name: row.1.to_owned(), intervals: within.collect() }
        });
        let is_used = |row: &TimelineRow| !row.intervals.is_empty();
        Some(Panel { title, length: to - from, rows: rows.into_iter().filter(is_used).collect() })
    }
}

/// The rows of a picture: the beginning of a thread's name, and the title.
const ROWS: [(&str, &str); 5] = [
    ("compute", "compute"),
    ("copy", "copy"),
    ("caller", "caller of push"),
    ("communicate 0", "communicate"),
    ("communicate 1", "communicate"),
];
/// The meaning of a picture's colours, by number.
pub(super) const COLOURS: [&str; 5] = ["forward", "backward", "collective", "copy, update", "barrier"];

fn row_of(ran: &RecordedOperation) -> Option<&'static str> {
    let by_engine = ROWS.iter().map(|(row, _)| *row).find(|row| ran.thread_name.starts_with(row));
    match by_engine {
        // An operation under way to a hub keeps no thread busy, so it has a row of its own.
        Some(_) if ran.is_deferred => Some("communicate 0"),
        Some(row) => Some(row),
        None => (ran.kind == Kind::Communicate.name()).then_some("caller"),
    }
}

fn colour_of(name: &str) -> usize {
    match name.split_whitespace().next() {
        Some("forward") => 0,
        Some("backward") => 1,
        Some("allreduce" | "push") => 2,
        Some("barrier") => 4,
        _ => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(name: &str, kind: Kind, thread_name: &str, milliseconds: [u64; 2]) -> RecordedOperation {
        let [start, end] = milliseconds.map(Duration::from_millis);
        let (name, kind, thread_name) = (name.into(), kind.to_string(), thread_name.into());
        RecordedOperation { name, kind, thread: 0, thread_name, start, end, is_deferred: false }
    }

    #[test]
    fn a_picture_has_the_last_whole_step_and_rows_of_threads() {
        let spans = vec![
            ran("forward a", Kind::Compute, "compute 0", [0, 5]),
            ran("forward a", Kind::Compute, "compute 0", [20, 25]),
            ran("allreduce a", Kind::Communicate, "main", [8, 12]),
            ran("copy a", Kind::Copy, "copy 0", [28, 40]),
        ];
        let timeline = Timeline { spans, steps: vec![0.0, 0.010, 0.030] };
        let Panel { length, rows, .. } = timeline.panel("one".into()).unwrap();
        assert!((length - 0.020).abs() < 1e-9);
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["compute", "copy", "caller of push"]);
        let places: Vec<(u32, u32)> = rows
            .iter()
            .flat_map(|row| &row.intervals)
            .map(|interval| [interval.from, interval.to].map(|at| (at * 1e3).round() as u32).into())
            .collect();
        assert_eq!(places, [(10, 15), (18, 20), (0, 2)], "cut off at its ends");
        assert!(Timeline::default().panel("none".into()).is_none());
    }

    #[test]
    fn spans_are_the_same_after_their_way_between_processes() {
        let span = Span::from(&ran("push and pull a", Kind::Communicate, "communicate 0", [1, 2]));
        let line = serde_json::to_string(&RecordedOperation::from(span.clone())).unwrap();
        assert_eq!(Span::from(&serde_json::from_str::<RecordedOperation>(&line).unwrap()), span);
    }
}
