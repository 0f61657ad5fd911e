use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Instant;

use paramhub_transport::interface::{InterfaceMonitor, LOOK_INTERVAL, interfaces};
use tracing::{info, warn};

use super::Listening;
use crate::events::ControllerEvent;

/// Watches the interfaces, and reports to the job controller which go down or come back. Returns when `stop`
/// gets a message or closes, or when the job controller is gone.
///
/// The reports number interfaces as the hub's shape does. The shape lists each interface of `listening`
/// `copies` times, side by side: once for each of the streams that a worker keeps to a core through it, so
/// that each stream has its own route.
pub(crate) fn watch(
    listening: &[Listening],
    copies: u16,
    controller: &SyncSender<ControllerEvent>,
    stop: &Receiver<()>,
) {
    let named = |(index, listening): (usize, &Listening)| {
        let name = listening.name.clone()?;
        Some((index, (name, listening.address.ip())))
    };
    // The monitor counts only what it watches: `indices` has the place of each of these in `listening`.
    let (indices, watched): (Vec<usize>, Vec<_>) = listening.iter().enumerate().filter_map(named).unzip();
    let mut monitor = InterfaceMonitor::new(watched);
    let mut is_blind = false;
    while let Err(RecvTimeoutError::Timeout) = stop.recv_timeout(LOOK_INTERVAL) {
        let found = match interfaces() {
            Ok(found) => found,
            Err(error) => {
                if !is_blind {
                    warn!("the hub cannot read the state of its interfaces: {error}");
                }
                is_blind = true;
                continue;
            }
        };
        is_blind = false;
        for change in monitor.look(&found, Instant::now()) {
            let index = indices[change.position];
            match &change.down {
                Some(down) => warn!("{down}"),
                None => info!("{} is back", listening[index].called()),
            }
            let first = index as u16 * copies;
            let event = ControllerEvent::Interfaces { numbers: first..first + copies, down: change.down };
            if controller.send(event).is_err() {
                return;
            }
        }
    }
}
