//! The standard streams. What `std` prints with panics where the reader of a pipe has gone away, as in `paramhub jobs list | head -1`,
//! and a panic in a thread of a hub would end it with all of its jobs.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::Mutex;

/// The first write to standard output that failed, other than for want of a reader.
static FAILURE: Mutex<Option<std::io::Error>> = Mutex::new(None);

/// [`std::print`] that does not panic.
macro_rules! print {
    ($($part:tt)*) => { $crate::cli::output::out(format_args!($($part)*), false) };
}

/// [`std::println`] that does not panic.
macro_rules! println {
    ($($part:tt)*) => { $crate::cli::output::out(format_args!($($part)*), true) };
}

/// [`std::eprint`] that does not panic.
macro_rules! eprint {
    ($($part:tt)*) => { $crate::cli::output::err(format_args!($($part)*), false) };
}

/// [`std::eprintln`] that does not panic.
macro_rules! eprintln {
    ($($part:tt)*) => { $crate::cli::output::err(format_args!($($part)*), true) };
}

/// Writes to standard output, and remembers what goes wrong. A reader that has gone away wants no more, which is no failure.
pub(crate) fn out(text: Arguments<'_>, ends_line: bool) {
    let mut output = std::io::stdout().lock();
    let end = if ends_line { "\n" } else { "" };
    if let Err(error) = output.write_fmt(format_args!("{text}{end}")) {
        remember(error);
    }
}

/// Writes to standard error. There is nowhere to say that it failed.
pub(crate) fn err(text: Arguments<'_>, ends_line: bool) {
    let end = if ends_line { "\n" } else { "" };
    let _ = std::io::stderr().lock().write_fmt(format_args!("{text}{end}"));
}

/// Writes what is still held back, and gives the first failure there was: a full disk, for example.
pub(super) fn finish() -> Option<std::io::Error> {
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
