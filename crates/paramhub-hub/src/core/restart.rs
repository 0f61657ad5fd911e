//! A core that panics: its state is dropped, its jobs end here with the reason, and the core starts again for
//! other jobs.
//!
//! Whatever it was doing is half done, so nothing that it keeps of any job can be trusted. Other cores share
//! nothing with it.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use paramhub_core::wire::Failure;
use tracing::error;

use super::{Core, CoreEvent};

/// Panics in a row without a job, after which the core gives up: no job can be at fault, and it would panic
/// for ever.
const PANICS_ALONE_MAX: u32 = 3;

impl Core {
    /// Serves until it receives the command to stop, even if a job makes it panic.
    pub(crate) fn run(mut self) -> io::Result<()> {
        loop {
            // Only `start_again` uses the remaining state, and it assumes nothing about it.
            match catch_unwind(AssertUnwindSafe(|| self.serve_until_stopped())) {
                Ok(ended) => return ended,
                Err(panic) => self = self.start_again(&*panic)?,
            }
        }
    }

    /// A core like this one without any jobs. It reports each job of the old core as failed, and then each of
    /// its routes as closed.
    fn start_again(self, panic: &(dyn Any + Send)) -> io::Result<Core> {
        let what = panic_text(panic);
        let Core {
            number,
            mailbox,
            spin,
            shards,
            shard_of,
            lanes,
            scheduler,
            final_messages,
            busy,
            idle,
            ..
        } = self;
        let panics_alone = if shard_of.is_empty() { self.panics_alone + 1 } else { 0 };
        if panics_alone == PANICS_ALONE_MAX {
            return Err(io::Error::other(format!(
                "it panicked {panics_alone} times without any job: {what}"
            )));
        }
        error!(
            "core {number} of the hub panicked: {what}. Its jobs end here, and it starts again without them"
        );
        mailbox.report.clear_poison();
        // Commands may wait that the panic has kept from being read.
        mailbox.waker.wake();
        let mut core = Core::new(number, mailbox, spin)?;
        (core.final_messages, core.busy, core.idle, core.panics_alone) =
            (final_messages, busy, idle, panics_alone);
        let cause = format!(
            "core {number} of its hub panicked ({what}). This is a fault of the hub, or of an optimizer or aggregator registered \
             with it: report it with the hub's log"
        );
        let (mut events, mut failed) = (Vec::new(), Vec::new());
        for (&(namespace, _), &index) in &shard_of {
            let hosted = shards.index(index);
            let mut counters = hosted.shard.counters();
            if !failed.contains(&namespace) {
                failed.push(namespace);
                let busy = scheduler
                    .times()
                    .find(|&(job, _)| job == namespace)
                    .map_or(0, |(_, busy)| busy.as_nanos());
                counters.busy_ns = busy as u64;
                if !hosted.ending {
                    // Workers that find their streams closed dial the standby, or join a job anew that begins again.
                    let plan = hosted.shard.plan();
                    let goes_on = plan.outlives_hubs || plan.resuming.has_standbys;
                    let mut reason = cause.clone();
                    if !goes_on {
                        reason += ", and start the job again, from its last checkpoint if it has any";
                        let message = format!("job `{}` failed: {reason}", plan.name);
                        core.final_messages.remember(namespace, Failure { rank: None, message });
                    }
                    core.mailbox.send_event(CoreEvent::Panicked { namespace, reason });
                }
            }
            counters.memory_bytes = 0;
            let left_out = hosted.shard.left_out_by_rank();
            events.push(CoreEvent::Closed { namespace, counters, left_out });
        }
        let now = Instant::now();
        for mut lane in lanes.into_values() {
            let hosted = shards.index(lane.shard);
            let begun = hosted.shard.begun(lane.port);
            let namespace = hosted.shard.plan().namespace;
            // A lane that the panic interrupted may panic again.
            let sent = catch_unwind(AssertUnwindSafe(|| {
                core.final_messages.send_to_lane(namespace, &mut lane, begun);
                lane
            }));
            if let Ok(lane) = sent {
                core.final_messages.keep(lane, now);
            }
        }
        // This drops what jobs have registered, whose own code may panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(shards)));
        core.publish();
        // Their memory is free only now.
        events.into_iter().for_each(|event| core.mailbox.send_event(event));
        Ok(core)
    }
}

/// The text of a panic, on one line.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    let text = text.unwrap_or_else(|| "it does not say why".to_owned());
    text.chars().take(TEXT_MAX).map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// Characters of a panic's text that are reported; the log has the whole text.
const TEXT_MAX: usize = 200;
