//! A core that panics: its state is dropped, its jobs fail with the reason, and it starts again for others.
//!
//! What it did when it panicked is half done, so that nothing it keeps of any job can be trusted. Other cores share nothing with it.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use paramhub_core::wire::Failure;
use tracing::error;

use super::{Core, CoreEvent};

/// Panics in a row while no job was here, after which the core gives up: no job can be at fault, and it would go on for ever.
const PANICS_ALONE_MAX: u32 = 3;

impl Core {
    /// Serves until told to stop, whatever a job does to it.
    pub(crate) fn run(mut self) -> io::Result<()> {
        loop {
            // What is left of it is looked at by `start_again` alone, which expects nothing of it.
            match catch_unwind(AssertUnwindSafe(|| self.serve_until_stopped())) {
                Ok(ended) => return ended,
                Err(panic) => self = self.start_again(&*panic)?,
            }
        }
    }

    /// A core like this one without any job. Each of its jobs is reported as failed, and then each of its routes as closed.
    fn start_again(self, panic: &(dyn Any + Send)) -> io::Result<Core> {
        let what = panic_text(panic);
        let Core { number, mailbox, spin, shards, shard_of, lanes, turns, farewells, busy, idle, .. } = self;
        let panics_alone = if shard_of.is_empty() { self.panics_alone + 1 } else { 0 };
        if panics_alone == PANICS_ALONE_MAX {
            return Err(io::Error::other(format!(
                "it panicked {panics_alone} times without any job: {what}"
            )));
        }
        error!("core {number} of the hub panicked: {what}. Its jobs fail, and it starts again without them");
        mailbox.report.clear_poison();
        // Commands may be waiting that the panic came before.
        mailbox.waker.wake();
        let mut core = Core::new(number, mailbox, spin)?;
        (core.farewells, core.busy, core.idle, core.panics_alone) = (farewells, busy, idle, panics_alone);
        let reason = format!(
            "core {number} of its hub panicked ({what}). This is a fault of the hub, or of an optimizer or aggregator registered \
             with it: report it with the hub's log, and start the job again, from its last checkpoint if it has any"
        );
        let (mut events, mut failed) = (Vec::new(), Vec::new());
        for (&(namespace, _), &index) in &shard_of {
            let hosted = shards.index(index);
            let mut counters = hosted.shard.counters();
            if !failed.contains(&namespace) {
                failed.push(namespace);
                let busy =
                    turns.times().find(|&(job, _)| job == namespace).map_or(0, |(_, busy)| busy.as_nanos());
                counters.busy_ns = busy as u64;
                if !hosted.ending {
                    let message = format!("job `{}` failed: {reason}", hosted.shard.plan().name);
                    core.farewells.remember(namespace, Failure { rank: None, message });
                    core.mailbox.tell(CoreEvent::Panicked { namespace, reason: reason.clone() });
                }
            }
            counters.memory_bytes = 0;
            let left_out = hosted.shard.left_out().to_vec();
            events.push(CoreEvent::Closed { namespace, counters, left_out });
        }
        let now = Instant::now();
        for mut lane in lanes.into_values() {
            let hosted = shards.index(lane.shard);
            let begun = hosted.shard.outboxes[lane.port as usize].begun.map(|begun| begun.header);
            let namespace = hosted.shard.plan().namespace;
            // A lane that the panic met half way may panic again.
            let told = catch_unwind(AssertUnwindSafe(|| {
                core.farewells.tell_lane(namespace, &mut lane, begun);
                lane
            }));
            if let Ok(lane) = told {
                core.farewells.keep(lane, now);
            }
        }
        // It frees what jobs have registered, whose own code may panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(shards)));
        core.publish();
        // Only now is their memory free.
        events.into_iter().for_each(|event| core.mailbox.tell(event));
        Ok(core)
    }
}

/// What a panic says, on one line.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    let text = text.unwrap_or_else(|| "it does not say why".to_owned());
    text.chars().take(TEXT_MAX).map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// Letters of a panic's text that are told; the log has all.
const TEXT_MAX: usize = 200;
