//! What one job may take of a hub, so that room is left for the next.

use crate::config::JobLimits;

use super::{HubJob, mebibytes};

/// Descriptors that are needed besides those of jobs' streams: for ports, queues, the log, the manager and
/// handshakes.
const DESCRIPTORS_SPARE: u64 = 32;

/// Checks that each stream of the job can have a descriptor besides those of the others. Streams over shared
/// memory have two, but which streams these are is not known before they connect.
pub(super) fn check_descriptors<'a>(
    job: &HubJob,
    others: impl Iterator<Item = &'a HubJob>,
    most: u64,
) -> Result<(), String> {
    let streams = streams_of(job);
    let taken: u64 = others.map(streams_of).sum();
    if taken + streams + DESCRIPTORS_SPARE <= most {
        return Ok(());
    }
    Err(format!(
        "job `{}` would open {streams} streams to this hub, whose process may have {most} files and sockets open, {taken} of them for \
         streams of other jobs: raise that limit (ulimit -n, or LimitNOFILE= of its systemd unit), or use more hubs",
        job.name
    ))
}

fn streams_of(job: &HubJob) -> u64 {
    job.ports.values().map(|ports| u64::from(ports.len())).sum()
}

impl JobLimits {
    /// Checks that the hub can take the job besides its others, or returns what would fit.
    pub(super) fn admit<'a>(
        &self,
        job: &HubJob,
        others: impl Iterator<Item = &'a HubJob> + Clone,
    ) -> Result<(), String> {
        self.memory(job)?;
        self.streams(job)?;
        self.share(job, others)
    }

    fn memory(&self, job: &HubJob) -> Result<(), String> {
        match self.memory_bytes {
            Some(most) if job.memory_bytes > most => Err(format!(
                "job `{}` needs {} MiB at this hub, which gives {} MiB to a job: use more hubs, an optimizer with less state \
                 or a smaller model, or raise the hub's --job-memory",
                job.name,
                mebibytes(job.memory_bytes),
                most >> 20
            )),
            _ => Ok(()),
        }
    }

    fn streams(&self, job: &HubJob) -> Result<(), String> {
        let streams = streams_of(job);
        let Some(most) = self.streams.map(u64::from).filter(|&most| streams > most) else { return Ok(()) };
        let routes = job.ports.len() as u64;
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
    fn share<'a>(
        &self,
        job: &HubJob,
        others: impl Iterator<Item = &'a HubJob> + Clone,
    ) -> Result<(), String> {
        let Some(percent) = self.share_percent.map(u64::from) else { return Ok(()) };
        let needed = u64::from(job.weight) * percent;
        for core in job.cores() {
            let here = others.clone().filter(|other| other.cores().any(|its| its == core));
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
