//! The report of a worker that has lost a hub to the manager, which may not know yet that the hub is gone, or whose own
//! way to the hub may be the one that is cut.

use std::thread::JoinHandle;
use std::time::Duration;

use paramhub_control::ManagerClient;
use paramhub_core::auth::Namespace;
use paramhub_core::service::LeaveService;

use crate::error::WorkerError;

/// The time that the report may take, since the worker ends when it is over. The manager may be gone with the hub.
const LOSS_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// What a rank needs to report a loss.
#[derive(Debug)]
pub(crate) struct LossReporter {
    pub(crate) manager: ManagerClient,
    pub(crate) namespace: Namespace,
    /// The call, proved, but for its reason and the hub.
    pub(crate) call: LeaveService,
}

impl LossReporter {
    /// Reports the hub whose loss this error is, on a thread of its own, so that the error itself does not wait for the
    /// manager. The caller joins the thread before the worker ends. `None` if no hub was lost.
    pub(crate) fn begin(self, error: &WorkerError) -> Option<JoinHandle<()>> {
        let (hub, reason) = error.lost_hub()?;
        let LossReporter { manager, namespace, call } = self;
        let call = LeaveService { reason, lost_hub: Some(hub.to_string()), ..call };
        // Best effort: without it the manager learns of the loss from others, or at last from the hub's silence.
        let report = move || drop(manager.report_lost_hub(namespace, &call, LOSS_REPORT_TIMEOUT));
        std::thread::Builder::new().name("paramhub-report".into()).spawn(report).ok()
    }
}
