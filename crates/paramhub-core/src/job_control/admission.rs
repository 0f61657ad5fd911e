//! What one job may take of a hub, so that room is left for the next.

use super::{JobControl, JobLimits, JobTerms, mebibytes};
use crate::service::Allowance;

/// Descriptors that are needed besides those of jobs' streams: for ports, queues, the log, the manager and
/// handshakes.
const DESCRIPTORS_SPARE: u64 = 32;

impl JobControl {
    /// Checks that the hub can take the job besides its others, or returns what would fit.
    pub(super) fn check_admission(&self, job: &JobTerms) -> Result<(), String> {
        check_team(job)?;
        self.check_room(job)
    }

    /// Checks that the hub can take further routes of a job that it has: `all` has all routes, `added` these.
    pub(super) fn check_admission_of_further(&self, all: &JobTerms, added: &JobTerms) -> Result<(), String> {
        check_team(added)?;
        self.check_room(all)
    }

    fn check_room(&self, job: &JobTerms) -> Result<(), String> {
        let others = || {
            let all = self.jobs.values().map(|other| &other.terms);
            all.filter(|other| other.namespace != job.namespace)
        };
        self.hub.job_limits.admit(job, others)?;
        check_descriptors(job, others(), self.hub.descriptors_max)?;
        check_memory(job, others(), self.hub.memory_bytes)?;
        let down = job.routes.iter().find_map(|route| self.interfaces_down.get(&route.interface));
        down.map_or(Ok(()), |down| {
            Err(format!(
                "job `{}` would have chunks at an interface of this hub that does not work: {}. Mend it, or start the \
                 hub without it",
                job.name, down.reason
            ))
        })
    }
}

/// Checks this hub's part of the job against what the job's team may still have. The manager adds up the parts of
/// all hubs when they have opened.
fn check_team(job: &JobTerms) -> Result<(), String> {
    let (name, streams) = (&job.name, job.streams());
    Allowance::check(job.team.memory_bytes.as_ref(), job.memory_bytes()).map_err(|terms| {
        format!("job `{name}` needs {} MiB at this hub, and {terms}", mebibytes(job.memory_bytes()))
    })?;
    Allowance::check(job.team.streams.as_ref(), streams)
        .map_err(|terms| format!("job `{name}` would open {streams} streams to this hub, and {terms}"))
}

/// Checks that each stream of the job can have a descriptor besides those of the others. Streams over shared
/// memory have two, but which streams these are is not known before they connect.
fn check_descriptors<'a>(
    job: &JobTerms,
    others: impl Iterator<Item = &'a JobTerms>,
    most: u64,
) -> Result<(), String> {
    let streams = job.streams();
    let taken: u64 = others.map(JobTerms::streams).sum();
    if taken + streams + DESCRIPTORS_SPARE <= most {
        return Ok(());
    }
    Err(format!(
        "job `{}` would open {streams} streams to this hub, whose process may have {most} files and sockets open, {taken} of them for \
         streams of other jobs: raise that limit (ulimit -n, or LimitNOFILE= of its systemd unit), or use more hubs",
        job.name
    ))
}

/// Checks that the job's buffers fit besides those of the others.
fn check_memory<'a>(
    job: &JobTerms,
    others: impl Iterator<Item = &'a JobTerms>,
    all: u64,
) -> Result<(), String> {
    let taken: u64 = others.map(|other| other.memory_bytes()).sum();
    let free = all.saturating_sub(taken);
    if job.memory_bytes() <= free {
        return Ok(());
    }
    let [needed, free, all] = [job.memory_bytes(), free, all].map(mebibytes);
    Err(format!(
        "job `{}` needs {needed} MiB at this hub, which has {free} of {all} MiB free: use more hubs, end other \
         jobs, or give the hub more with --memory",
        job.name
    ))
}

impl JobLimits {
    fn admit<'a, Others: Iterator<Item = &'a JobTerms>>(
        &self,
        job: &JobTerms,
        others: impl Fn() -> Others,
    ) -> Result<(), String> {
        self.memory(job)?;
        self.streams(job)?;
        self.share(job, others)
    }

    fn memory(&self, job: &JobTerms) -> Result<(), String> {
        match self.memory_bytes {
            Some(most) if job.memory_bytes() > most => Err(format!(
                "job `{}` needs {} MiB at this hub, which gives {} MiB to a job: use more hubs, an optimizer with less state \
                 or a smaller model, or raise the hub's --job-memory",
                job.name,
                mebibytes(job.memory_bytes()),
                most >> 20
            )),
            _ => Ok(()),
        }
    }

    fn streams(&self, job: &JobTerms) -> Result<(), String> {
        let streams = job.streams();
        let Some(most) = self.streams.map(u64::from).filter(|&most| streams > most) else { return Ok(()) };
        let routes = job.routes.len() as u64;
        let fits = match most / routes {
            0 => "no worker would fit: start the hub with fewer cores or --streams".to_owned(),
            1 => "1 worker would fit".to_owned(),
            members => format!("{members} workers would fit"),
        };
        Err(format!(
            "job `{}` would open {streams} streams to this hub, {routes} from each worker, and the hub takes {most} of a job: \
             {fits}; or raise the hub's --job-streams",
            job.name
        ))
    }

    /// Checks the promise of a core's time to the job. The promises to all jobs together must not exceed one
    /// core.
    fn share<'a, Others: Iterator<Item = &'a JobTerms>>(
        &self,
        job: &JobTerms,
        others: impl Fn() -> Others,
    ) -> Result<(), String> {
        let Some(percent) = self.share_percent.map(u64::from) else { return Ok(()) };
        let needed = u64::from(job.weight) * percent;
        for core in job.cores() {
            let here = others().filter(|other| other.routes.iter().any(|route| route.core == core));
            let promised: u64 = here.map(|other| u64::from(other.weight) * percent).sum();
            let free = 100_u64.saturating_sub(promised);
            if needed > free {
                let fits = match free / percent {
                    0 => "end other jobs".to_owned(),
                    weight => format!("a weight of {weight} would fit"),
                };
                return Err(format!(
                    "job `{}` of weight {} is to have {needed} % of core {core} of this hub, of which {free} % are not \
                     promised to other jobs: {fits}, use other hubs or more of them, or lower the hub's --job-share",
                    job.name, job.weight
                ));
            }
        }
        Ok(())
    }
}
