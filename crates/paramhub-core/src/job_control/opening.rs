//! How a job opens: it is admitted, its checkpoint is read, and every core allocates.

use std::time::Duration;

use super::job::{Job, Phase};
use super::{Beginning, JobControl, JobTerms, Output, mebibytes};
use crate::auth::Namespace;
use crate::service::HubEvent;

/// The part of a job's rendezvous timeout within which its checkpoint must be read. After all of it the ranks
/// give up, for a reason that does not name the folder.
pub const READING_SHARE: f64 = 0.9;

impl JobControl {
    /// Takes a job that the hub has planned, or refuses it.
    pub(super) fn admit(&mut self, terms: JobTerms, now: Duration) {
        let namespace = terms.namespace;
        if !self.wants(namespace, terms.epoch, terms.hub) {
            return;
        }
        if let Err(reason) = self.check_admission(&terms) {
            return self.refuse(namespace, reason);
        }
        self.info(admitted(&terms));
        self.forget_end(namespace);
        let (none, resumes) = (terms.routes.is_empty(), terms.resumes);
        let mut job = Job::new(terms);
        if none {
            // The job is so small that this hub has none of its chunks.
            self.jobs.insert(namespace, job);
            self.opened(namespace, now);
            return self.finished(namespace, now);
        }
        if resumes {
            job.phase = Phase::Loading { until: now.saturating_add(reading_limit(&job.terms)) };
        }
        self.jobs.insert(namespace, job);
        self.outputs.push(if resumes { Output::Load(namespace) } else { Output::Open(namespace) });
    }

    /// Refuses a job that the hub cannot serve.
    pub(super) fn refuse(&mut self, namespace: Namespace, reason: String) {
        if !self.is_serving() || self.jobs.contains_key(&namespace) {
            return;
        }
        self.warn(format!("a job was refused: {reason}"));
        self.report(HubEvent::Refused { namespace, reason });
        self.outputs.push(Output::Forget(namespace));
    }

    /// Opens a job whose checkpoint has been read, or which begins without one, or refuses it if the checkpoint
    /// cannot be read.
    pub(super) fn loaded(&mut self, namespace: Namespace, result: Result<Beginning, String>) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if let Phase::Ending { routes, .. } = &mut job.phase {
            // The job was stopped meanwhile. Its routes have nothing to free.
            *routes = 0;
            return self.closed(namespace);
        }
        if let Phase::Refused = job.phase {
            self.jobs.remove(&namespace);
            return self.outputs.push(Output::Forget(namespace));
        }
        let Phase::Loading { .. } = job.phase else { return };
        match result {
            Ok(beginning) => {
                job.phase = Phase::Opening { routes: job.terms.routes.len() };
                let name = &job.terms.name;
                let message = match beginning {
                    Beginning::Checkpoint(step) => {
                        job.resumed_step = Some(step);
                        format!("job `{name}` goes on from its checkpoint of step {step}")
                    }
                    Beginning::Anew(why) => format!("job `{name}` begins anew: {why}"),
                };
                self.info(message);
                self.outputs.push(Output::Open(namespace));
            }
            Err(why) => {
                let reason = format!("job `{}` cannot go on: {why}", job.terms.name);
                self.withdraw(namespace, reason);
            }
        }
    }

    /// Refuses the jobs whose checkpoints have been read for too long.
    pub(super) fn check_loading(&mut self, now: Duration) {
        let mut late = Vec::new();
        for (&namespace, job) in &mut self.jobs {
            if let Phase::Loading { until } = job.phase
                && now >= until
            {
                // The thread that reads may hang and keeps its memory, so the job stays until the thread answers.
                job.phase = Phase::Refused;
                late.push((namespace, late_reading(&job.terms)));
            }
        }
        for (namespace, reason) in late {
            self.warn(reason.clone());
            self.report(HubEvent::Refused { namespace, reason });
        }
    }

    /// Notes that a core has allocated a route of a job, or could not.
    pub(super) fn route_opened(
        &mut self,
        namespace: Namespace,
        missing_bytes: Option<u64>,
        has_snapshot: bool,
        now: Duration,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        job.has_snapshots |= has_snapshot;
        match (&mut job.phase, missing_bytes) {
            // The other routes need not open, since the job is refused.
            (Phase::Opening { .. }, Some(missing)) => self.refuse_opened(namespace, missing),
            (Phase::Opening { routes }, None) => {
                *routes -= 1;
                if *routes == 0 {
                    self.opened(namespace, now);
                }
            }
            // The job was stopped before it was open, and this route has nothing to close.
            (Phase::Ending { .. }, Some(_)) => self.route_closed(namespace),
            (Phase::Ending { .. } | Phase::Loading { .. } | Phase::Refused, _) => {}
            (Phase::Connecting { .. } | Phase::Running | Phase::Finishing { .. }, missing_bytes) => {
                self.further_opened(namespace, missing_bytes);
            }
        }
    }

    /// Admits streams: every core has allocated.
    fn opened(&mut self, namespace: Namespace, now: Duration) {
        let job = self.jobs.get_mut(&namespace).expect("an opened job is here");
        job.phase = Phase::Connecting { until: now.saturating_add(job.terms.rendezvous) };
        job.writes_checkpoints = job.terms.writes_checkpoints && job.has_snapshots;
        job.has_opened = true;
        let writes = job.writes_checkpoints;
        self.outputs.push(Output::AdmitStreams(namespace));
        if writes {
            self.outputs.push(Output::StartCheckpoints(namespace));
        }
        self.report_allocated(namespace);
    }

    /// Frees what was allocated, because some core could not allocate.
    fn refuse_opened(&mut self, namespace: Namespace, missing_bytes: u64) {
        let terms = &self.jobs[&namespace].terms;
        let (missing, needed) = (mebibytes(missing_bytes), mebibytes(terms.memory_bytes()));
        let reason = format!(
            "job `{}` needs {needed} MiB at this hub, but the operating system had no {missing} MiB left for one part",
            terms.name
        );
        for core in terms.cores() {
            self.outputs.push(Output::End { namespace, core, failure: None });
        }
        self.withdraw(namespace, reason);
    }

    /// Refuses a job that was admitted already.
    fn withdraw(&mut self, namespace: Namespace, reason: String) {
        self.jobs.remove(&namespace);
        self.warn(reason.clone());
        self.report(HubEvent::Refused { namespace, reason });
        self.outputs.push(Output::Forget(namespace));
    }
}

/// How long the checkpoint of a job may take to be read.
fn reading_limit(terms: &JobTerms) -> Duration {
    terms.rendezvous.mul_f64(READING_SHARE)
}

/// Why a job cannot begin whose checkpoint is not read in time.
fn late_reading(terms: &JobTerms) -> String {
    format!(
        "job `{}` cannot go on: its checkpoint in {} was not read within {:.0} s, nine tenths of rendezvous_timeout_s. Its disk \
         is slow, which a longer rendezvous_timeout_s allows for, or does not answer",
        terms.name,
        terms.checkpoint_folder,
        reading_limit(terms).as_secs_f64()
    )
}

/// What the log says of a job that is admitted.
fn admitted(terms: &JobTerms) -> String {
    let uneven = terms.placement().imbalance();
    format!(
        "job `{}`: {} workers, {} routes, {} MiB; largest over mean load {:.3} between hubs, {:.3} between \
         interfaces, {:.3} between cores",
        terms.name,
        terms.composed.composition.workers(),
        terms.routes.len(),
        mebibytes(terms.memory_bytes()),
        uneven.hubs,
        uneven.interfaces,
        uneven.cores
    )
}
