//! The probe whose streams the acceptor passes on.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard};

use paramhub_core::auth::{Namespace, Nonce};
use paramhub_core::service::ProbeOrder;

/// The probe for whose streams this hub waits, at most one. Job controller and acceptor share it.
#[derive(Debug, Default)]
pub(crate) struct ExpectedProbe(Mutex<Option<Expected>>);

#[derive(Debug)]
struct Expected {
    probe: Namespace,
    nonce: Nonce,
    streams: SyncSender<OwnedFd>,
}

impl ExpectedProbe {
    /// The secret of a probe that the hub waits for.
    pub(crate) fn nonce(&self, probe: Namespace) -> Option<Nonce> {
        self.expected().as_ref().filter(|expected| expected.probe == probe).map(|expected| expected.nonce)
    }

    /// Takes a stream that has proven itself, and closes it if there are enough or it is late.
    pub(crate) fn admit(&self, probe: Namespace, stream: OwnedFd) {
        if let Some(expected) = self.expected().as_ref().filter(|expected| expected.probe == probe) {
            let _ = expected.streams.try_send(stream);
        }
    }

    /// Waits for the streams of this probe from now on.
    pub(crate) fn expect(&self, order: &ProbeOrder) -> Receiver<OwnedFd> {
        let (sender, receiver) = sync_channel(order.streams.into());
        *self.expected() = Some(Expected { probe: order.probe, nonce: order.nonce, streams: sender });
        receiver
    }

    /// Waits for no probe any more.
    pub(crate) fn forget(&self) {
        *self.expected() = None;
    }

    fn expected(&self) -> MutexGuard<'_, Option<Expected>> {
        self.0.lock().expect("no panic while holding it")
    }
}
