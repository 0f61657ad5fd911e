//! The standard streams. What `std` prints with panics where the reader of a pipe has gone away, as in `paramhub jobs list | head -1`,
//! and a panic in a thread of a hub would end it with all of its jobs.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::Mutex;

/// The first write to standard output that failed for another reason than a closed pipe.
static FAILURE: Mutex<Option<std::io::Error>> = Mutex::new(None);

/// [`std::print`] that does not panic.
#[macro_export]
macro_rules! print {
    ($($part:tt)*) => { $crate::output::out(format_args!($($part)*), false) };
}

/// [`std::println`] that does not panic.
#[macro_export]
macro_rules! println {
    ($($part:tt)*) => { $crate::output::out(format_args!($($part)*), true) };
}

/// [`std::eprint`] that does not panic.
#[macro_export]
macro_rules! eprint {
    ($($part:tt)*) => { $crate::output::err(format_args!($($part)*), false) };
}

/// [`std::eprintln`] that does not panic.
#[macro_export]
macro_rules! eprintln {
    ($($part:tt)*) => { $crate::output::err(format_args!($($part)*), true) };
}

/// Writes to standard output and records a failure. A closed pipe is no failure: the reader wants no more.
pub fn out(text: Arguments<'_>, ends_line: bool) {
    let mut output = std::io::stdout().lock();
    let end = if ends_line { "\n" } else { "" };
    if let Err(error) = output.write_fmt(format_args!("{text}{end}")) {
        remember(error);
    }
}

/// Writes to standard error. A failure is ignored, as no stream is left to report it on.
pub fn err(text: Arguments<'_>, ends_line: bool) {
    let end = if ends_line { "\n" } else { "" };
    let _ = std::io::stderr().lock().write_fmt(format_args!("{text}{end}"));
}

/// Flushes the output and returns the first failure there was: a full disk, for example.
pub fn finish() -> Option<std::io::Error> {
    if let Err(error) = std::io::stdout().lock().flush() {
        remember(error);
    }
    FAILURE.lock().expect("no panic while holding it").take()
}

fn remember(error: std::io::Error) {
    if error.kind() != ErrorKind::BrokenPipe {
        FAILURE.lock().expect("no panic while holding it").get_or_insert(error);
    }
}
