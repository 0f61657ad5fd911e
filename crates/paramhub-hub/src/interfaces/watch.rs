use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Instant;

use paramhub_transport::interface::{InterfaceMonitor, LOOK, interfaces};
use tracing::{info, warn};

use super::Listening;
use crate::events::ControllerEvent;

/// Watches the interfaces until `stop` closes, and reports to the job controller which go down or come back.
/// Interfaces are numbered as in the hub's shape, where each is listed `copies` times.
pub(crate) fn watch(
    listening: &[Listening],
    copies: u16,
    controller: &SyncSender<ControllerEvent>,
    stop: &Receiver<()>,
) {
    let known = |(number, listening): (usize, &Listening)| {
        let name = listening.name.clone()?;
        Some((number as u16, (name, listening.address.ip())))
    };
    let (numbers, watched): (Vec<u16>, Vec<_>) = listening.iter().enumerate().filter_map(known).unzip();
    let mut watch = InterfaceMonitor::new(watched);
    let mut is_blind = false;
    while let Err(RecvTimeoutError::Timeout) = stop.recv_timeout(LOOK) {
        let found = match interfaces() {
            Ok(found) => found,
            Err(error) => {
                if !is_blind {
                    warn!("the hub cannot look after its interfaces: {error}");
                }
                is_blind = true;
                continue;
            }
        };
        is_blind = false;
        for change in watch.look(&found, Instant::now()) {
            match &change.down {
                Some(down) => warn!("{down}"),
                None => info!("{} is back", listening[usize::from(numbers[change.position])].called()),
            }
            let first = numbers[change.position] * copies;
            let event = ControllerEvent::Interfaces { numbers: first..first + copies, down: change.down };
            if controller.send(event).is_err() {
                return;
            }
        }
    }
}
