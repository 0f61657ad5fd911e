//! Shows the progress of a training: as a bar on a terminal, otherwise as a plain line now and then.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::spec::StepsDone;
use crate::config::{ExchangeKind, TrainSection};

/// The interval between plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(3);
const REDRAWS_PER_SECOND: u8 = 10;

/// The progress display. It writes to stderr, so that stdout holds the results alone.
pub(super) struct Display {
    bar: Option<ProgressBar>,
    /// The time at which the last plain line was printed.
    printed: Option<Instant>,
    /// Turns rank 0's examples into those of all workers.
    examples_factor: f64,
    /// The accuracy when it was last measured.
    accuracy: Option<f64>,
}

impl Display {
    pub(super) fn new(section: &TrainSection, examples_factor: f64) -> Self {
        let workers = match section.workers() {
            1 => "1 worker".to_owned(),
            workers => format!("{workers} workers"),
        };
        let processes = match section.exchange {
            ExchangeKind::Local => format!("one process in place of {workers}"),
            ExchangeKind::Hub => format!("{workers} and a hub"),
            collective => format!("{workers} by {collective}"),
        };
        let title = format!("training {} on {} with {processes}", section.net, section.data);
        let is_terminal = std::io::stderr().is_terminal();
        eprintln!("{title}");
        let bar = is_terminal.then(|| {
            let style = "{wide_bar} {pos}/{len} steps  {msg}  {eta} left";
            let target = ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND);
            let bar = ProgressBar::with_draw_target(Some(0), target);
            bar.set_style(ProgressStyle::with_template(style).expect("a correct template"));
            bar
        });
        Display { bar, printed: None, examples_factor, accuracy: None }
    }

    pub(super) fn update(&mut self, done: &StepsDone) {
        let speed = done.examples_per_second * self.examples_factor;
        self.accuracy = done.accuracy.or(self.accuracy);
        let accuracy = |accuracy: Option<f64>| {
            accuracy.map_or_else(String::new, |accuracy| format!("test accuracy {accuracy:.4}  "))
        };
        let state = |measured| format!("loss {:.4}  {}{speed:.0} examples/s", done.loss, accuracy(measured));
        match &self.bar {
            Some(bar) => {
                bar.set_length(done.of as u64);
                // A bar shows the newest accuracy. A plain line shows one only if it was measured after its
                // own step.
                bar.set_message(state(self.accuracy));
                bar.set_position(done.step as u64);
            }
            None => {
                let is_due = self.printed.is_none_or(|printed| printed.elapsed() >= LINE_INTERVAL);
                if is_due || done.accuracy.is_some() || done.step == done.of {
                    self.printed = Some(Instant::now());
                    let state = state(done.accuracy);
                    eprintln!("step {}/{}  epoch {}  {state}", done.step, done.of, done.epoch);
                }
            }
        }
    }

    /// Prints a line that is not about progress.
    pub(super) fn print(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    /// Removes the bar: the table has all numbers.
    pub(super) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
