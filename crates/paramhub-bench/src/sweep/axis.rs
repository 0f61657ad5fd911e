//! The quantity that a sweep varies, and its values.

use clap::ValueEnum;
use paramhub::limits::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, CORES_MAX, INTERFACES_MAX, WORKERS_MAX};
use paramhub_harness::Usage;
use paramhub_harness::exchange::ExchangeFlags;
use paramhub_harness::values::Bytes;
use serde::Serialize;

use crate::plot::Scale;

/// A number of streams, cores or workers, or bytes of a chunk.
pub(super) type Value = u64;

/// The quantity that differs from point to point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Axis {
    /// The size of a chunk (PHub, figure 16, left)
    Chunk,
    /// The streams of a worker to each core (PHub's queue pairs, figure 16, right)
    Streams,
    /// The cores of the hub
    Cores,
    /// The workers (PHub, figures 15 and 17)
    Workers,
}

impl Axis {
    /// The default points.
    fn default_points(self) -> Vec<Value> {
        match self {
            Axis::Chunk => [4, 8, 16, 32, 64, 128, 256, 1024, 4096].map(|kib| kib << 10).into(),
            Axis::Streams | Axis::Workers => vec![1, 2, 4, 8],
            Axis::Cores => {
                let processors = std::thread::available_parallelism().map_or(1, usize::from).max(2) as Value;
                let doublings = std::iter::successors(Some(1), |cores| Some(cores * 2));
                doublings.take_while(|&cores| cores < processors).chain([processors]).collect()
            }
        }
    }

    fn bounds(self) -> (Value, Value) {
        match self {
            Axis::Chunk => (CHUNK_BYTES_MIN.into(), CHUNK_BYTES_MAX.into()),
            Axis::Streams => (1, INTERFACES_MAX as Value),
            Axis::Cores => (1, CORES_MAX as Value),
            Axis::Workers => (1, WORKERS_MAX.into()),
        }
    }

    /// The points to measure, ascending.
    ///
    /// # Errors
    /// If a requested point is invalid; the error names it and says why.
    pub(super) fn points(self, asked_for: Option<&[String]>) -> Result<Vec<Value>, Usage> {
        let Some(texts) = asked_for else { return Ok(self.default_points()) };
        let (least, most) = self.bounds();
        let mut points = Vec::new();
        for text in texts {
            let refuse = |problem: String| Usage(format!("--points {text}: {problem}"));
            let point = match self {
                Axis::Chunk => text.parse::<Bytes>().map(|Bytes(bytes)| bytes),
                _ => text.trim().parse::<Value>().map_err(|_| "expected a whole number".to_owned()),
            };
            let point = point.map_err(refuse)?;
            if point < least || point > most {
                let (least, most) = (self.text(least), self.text(most));
                return Err(refuse(format!("expected {least} to {most}")));
            }
            if points.contains(&point) {
                return Err(refuse("it is there twice".into()));
            }
            points.push(point);
        }
        if points.len() < 2 {
            return Err(Usage(format!("--points {}: a sweep needs two points at least", texts.join(","))));
        }
        points.sort_unstable();
        Ok(points)
    }

    /// The flags of one point.
    pub(super) fn at(self, point: Value, flags: &ExchangeFlags) -> ExchangeFlags {
        let mut flags = flags.clone();
        // Points are within their bounds.
        match self {
            Axis::Chunk => flags.chunk = Bytes(point),
            Axis::Streams => flags.streams = point as u16,
            Axis::Cores => flags.cores = point as u16,
            Axis::Workers => flags.workers = point as u32,
        }
        flags
    }

    /// A value as people write it.
    pub(super) fn text(self, value: Value) -> String {
        match self {
            Axis::Chunk => Bytes(value).to_string(),
            _ => value.to_string(),
        }
    }

    /// The quantity's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Axis::Chunk => "chunk size",
            Axis::Streams => "streams",
            Axis::Cores => "cores",
            Axis::Workers => "workers",
        }
    }

    /// The quantity with its unit, below a plot.
    pub(super) fn label(self) -> &'static str {
        match self {
            Axis::Chunk => "chunk size in bytes (logarithmic)",
            Axis::Streams => "streams of a worker to each core (logarithmic)",
            Axis::Cores => "cores of the hub",
            Axis::Workers => "workers",
        }
    }

    pub(super) fn scale(self) -> Scale {
        match self {
            Axis::Chunk | Axis::Streams => Scale::Logarithmic,
            Axis::Cores | Axis::Workers => Scale::Linear,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(axis: Axis, points: &[&str]) -> Result<Vec<Value>, String> {
        let points: Vec<String> = points.iter().map(|&point| point.into()).collect();
        axis.points(Some(&points)).map_err(|Usage(problem)| problem)
    }

    #[test]
    fn points_come_ascending_and_in_the_units_of_their_axis() {
        assert_eq!(asked(Axis::Chunk, &["1M", "4K"]), Ok(vec![4096, 1 << 20]));
        assert_eq!(asked(Axis::Workers, &["8", "1", "2"]), Ok(vec![1, 2, 8]));
    }

    #[test]
    fn default_points_are_within_their_bounds() {
        for axis in [Axis::Chunk, Axis::Streams, Axis::Cores, Axis::Workers] {
            let texts: Vec<String> =
                axis.points(None).unwrap().iter().map(|&point| axis.text(point)).collect();
            assert_eq!(axis.points(Some(&texts)).unwrap(), axis.points(None).unwrap(), "{axis:?}");
        }
    }

    #[test]
    fn a_value_that_is_no_point_is_named() {
        for (axis, points, part) in [
            (Axis::Chunk, &["4K", "10"][..], "--points 10: expected 1K to 16M"),
            (Axis::Chunk, &["4K", "32M"], "--points 32M: expected 1K to 16M"),
            (Axis::Streams, &["1", "65"], "expected 1 to 64"),
            (Axis::Workers, &["0", "1"], "expected 1 to 1024"),
            (Axis::Cores, &["two"], "--points two: expected a whole number"),
            (Axis::Cores, &["2", "2"], "there twice"),
            (Axis::Cores, &["2"], "two points at least"),
        ] {
            let refused = asked(axis, points).unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
    }
}
