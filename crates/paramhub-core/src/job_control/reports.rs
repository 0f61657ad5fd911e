//! What the manager hears of a hub's jobs: once when it happens, and again if the manager has restarted since.

use std::time::Duration;

use super::{JobControl, Output};
use crate::auth::Namespace;
use crate::service::{HubEvent, HubJobCounters, JobEnd, JobPlan};

/// The ends of jobs that a hub still reports to a manager that restarts, the newest.
pub const ENDS_KEPT: usize = 256;

/// How a job has ended at a hub.
#[derive(Clone, Debug)]
pub struct EndReport {
    /// How the job has ended.
    pub end: JobEnd,
    /// When that was decided.
    pub since: Duration,
    /// What the job has counted: its cores have forgotten it.
    pub counters: HubJobCounters,
}

/// How a job has ended, for a manager that restarts.
pub(super) struct KeptEnd {
    report: EndReport,
    /// Whether the hub had chunks of the job. One that had none was done as soon as it was asked, and is asked again by
    /// a manager that restarts before the job runs.
    held_chunks: bool,
    /// The epoch with which the job had begun, and the position of the hub in it.
    held_as: (u64, u16),
}

impl JobControl {
    /// Whether a job has ended here of which the hub had chunks, and which had begun with this epoch or a later one, and in which
    /// the hub had this position or a later one.
    pub(super) fn has_held(&self, namespace: Namespace, held_as: (u64, u16)) -> bool {
        let is_it = |end: &KeptEnd| end.report.end.namespace == namespace && end.held_as >= held_as;
        self.ends.iter().any(|end| end.held_chunks && is_it(end))
    }

    /// Forgets how a job has ended that begins again.
    pub(super) fn forget_end(&mut self, namespace: Namespace) {
        self.ends.retain(|end| end.report.end.namespace != namespace);
    }

    /// The manager wants a job allocated that this hub has already: an earlier command has come twice, or the manager has
    /// restarted since. A job that still opens is reported when it is open. While a former part of the job, with another
    /// position or from before the job began again, is still ending, the next one waits for that.
    pub(super) fn allocated_before(&mut self, plan: Box<JobPlan>) {
        let namespace = plan.namespace;
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let begins_again = plan.epoch.number > job.terms.epoch && job.is_ending();
        if !begins_again && plan.epoch.number != job.terms.epoch {
            return;
        }
        if begins_again || u32::from(job.terms.hub) != plan.hub {
            job.next_part = Some(plan);
        } else if job.has_opened {
            self.report_allocated(namespace);
        }
    }

    /// Reports what a job has taken.
    pub(super) fn report_allocated(&mut self, namespace: Namespace) {
        let job = &self.jobs[&namespace];
        let placement_hash = job.terms.placement().hash().to_hex().to_string();
        let (memory_bytes, streams) = (job.terms.memory_bytes(), job.terms.streams());
        let (resumed_step, further) = (job.resumed_step, job.allocated_further());
        self.report(HubEvent::Allocated {
            namespace,
            placement_hash,
            resumed_step,
            memory_bytes,
            streams,
            further,
        });
    }

    /// Reports how a job has ended, and keeps that for a manager that restarts.
    pub(super) fn report_end(&mut self, report: EndReport, held_chunks: bool, held_as: (u64, u16)) {
        if self.ends.len() == ENDS_KEPT {
            self.ends.pop_front();
        }
        self.ends.push_back(KeptEnd { report: report.clone(), held_chunks, held_as });
        self.outputs.push(Output::ReportEnd(report));
    }

    /// Reports every job: the manager has restarted.
    pub(super) fn report_jobs(&mut self, question: u32) {
        let open: Vec<Namespace> =
            self.jobs.iter().filter(|(_, job)| job.has_opened).map(|(&namespace, _)| namespace).collect();
        for namespace in open {
            self.report_allocated(namespace);
            self.report_lost_workers_again(namespace);
            self.report_lost_counterparts_again(namespace);
            self.report_copied_again(namespace);
        }
        self.outputs.extend(self.ends.iter().map(|end| Output::ReportEnd(end.report.clone())));
        self.report(HubEvent::AllReported { question });
    }
}
