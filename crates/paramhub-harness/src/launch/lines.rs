//! Carries what workers print, line by line.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::SyncSender;

/// Longer lines arrive in pieces, so that a worker cannot fill the launcher's memory.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// The stream of a process to which it wrote a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

/// One line, without its end.
pub struct Line {
    /// The worker, by its place among those of this launch.
    pub rank: usize,
    /// The output stream to which the worker wrote it.
    pub stream: OutputStream,
    /// The bytes, which need not be text.
    pub bytes: Vec<u8>,
}

/// A line, or `None` at the end of the pipe.
pub(super) type PipeLine = Option<Line>;

/// Reads a pipe to its end on a thread of its own. A full channel makes the worker wait, as a slow terminal would.
pub(super) fn forward(
    pipe: impl Read + Send + 'static,
    rank: usize,
    stream: OutputStream,
    to: SyncSender<PipeLine>,
) -> std::io::Result<()> {
    let read = move || {
        let mut pipe = BufReader::new(pipe);
        loop {
            let mut bytes = Vec::new();
            match pipe.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes) {
                Ok(1..) => {
                    if bytes.last() == Some(&b'\n') {
                        bytes.pop();
                    }
                    if to.send(Some(Line { rank, stream, bytes })).is_err() {
                        return;
                    }
                }
                Ok(0) | Err(_) => break,
            }
        }
        // The receiver is gone once the launcher has given up on this pipe.
        let _ = to.send(None);
    };
    std::thread::Builder::new().name(format!("output of rank {rank}")).spawn(read).map(drop)
}
