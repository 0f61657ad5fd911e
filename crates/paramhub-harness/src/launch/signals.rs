//! Ctrl-C and its kin, as values.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals as Source;

/// Catches SIGINT, SIGTERM and SIGHUP from now on.
pub struct Signals {
    receiver: Receiver<i32>,
    handle: signal_hook::iterator::Handle,
}

impl Signals {
    /// Catches the signals from now on.
    ///
    /// # Errors
    /// If the system refuses that.
    pub fn catch() -> std::io::Result<Self> {
        let mut source = Source::new([SIGINT, SIGTERM, SIGHUP])?;
        let handle = source.handle();
        let (sender, receiver) = channel();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in source.forever() {
                if sender.send(signal).is_err() {
                    return;
                }
            }
        })?;
        Ok(Signals { receiver, handle })
    }

    /// A signal that has arrived, if one has.
    pub fn poll(&self) -> Option<i32> {
        self.receiver.try_recv().ok()
    }

    /// Waits for a signal.
    pub fn wait(&self, at_most: Duration) -> Option<i32> {
        match self.receiver.recv_timeout(at_most) {
            Ok(signal) => Some(signal),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("the signal thread outlives its receiver"),
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handle.close();
    }
}
