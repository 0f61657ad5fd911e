//! Carries what workers print, line by line.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::SyncSender;

/// Longer lines arrive in pieces, so that a worker cannot fill the launcher's memory.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// Where a line was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Output,
    Error,
}

/// One line, without its end.
pub(crate) struct Line {
    pub(crate) rank: usize,
    pub(crate) stream: Stream,
    pub(crate) bytes: Vec<u8>,
}

/// `None` when the pipe is at its end.
pub(crate) type Post = Option<Line>;

/// Reads a pipe to its end on a thread of its own. A full channel makes the worker wait, as a slow terminal would.
pub(crate) fn forward(
    pipe: impl Read + Send + 'static,
    rank: usize,
    stream: Stream,
    to: SyncSender<Post>,
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
        // Nobody listens any more once the launcher has given up on this pipe.
        let _ = to.send(None);
    };
    std::thread::Builder::new().name(format!("output of rank {rank}")).spawn(read).map(drop)
}
