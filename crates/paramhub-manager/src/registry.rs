//! The [`World`] behind a lock, with the store, and what runs beside the requests: saving, and looking at the clock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paramhub_core::auth::{Namespace, Nonce, Proof, Purpose};
use paramhub_core::service::{
    CreateService, ErrorCode, JobState, JobStatus, LinkStatus, ServiceCreated, ServiceError, StopService,
    StopWhen,
};
use rustix::process::{Resource, getrlimit};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{Instant, timeout};

use crate::body::Tables;
use crate::clock::Now;
use crate::config::ManagerConfig;
use crate::error::{ManagerError, Refusal, refusal};
use crate::job::Job;
use crate::metrics::Requests;
use crate::places::{Guest, Places};
use crate::store::Store;
use crate::world::{Rank, World, check_reason, check_request};

/// How long an operator's stop waits for the hubs to say that they freed the job.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a launcher that is about to end its workers waits for the hubs' last checkpoints, which take 5 s at most where workers
/// reach a step together.
const KEEP_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a launcher whose workers have ended waits for the hubs to say how the job ended.
const CONCLUDE_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two looks at the clock.
const TICK: Duration = Duration::from_millis(250);
/// Between two attempts to save what could not be saved.
const SAVE_PAUSE: Duration = Duration::from_secs(1);

/// The manager's state, shared by all requests.
pub(crate) struct Registry {
    world: Mutex<World>,
    store: Arc<Store>,
    pub(crate) admin_token: Option<String>,
    pub(crate) hub_timeout: Duration,
    pub(crate) requests: Requests,
    pub(crate) places: Arc<Places>,
    pub(crate) tables: Tables,
    /// One placement at a time: a large one takes gigabytes.
    pub(crate) placing: Semaphore,
    changed: Notify,
    stopping: watch::Sender<bool>,
}

impl Registry {
    /// Opens the store and takes up what is in it.
    pub(crate) fn open(config: &ManagerConfig) -> Result<Arc<Self>, ManagerError> {
        let store = Store::open(config.state.as_deref())?;
        let records = store.load()?;
        let secret = random().map_err(|refused| ManagerError::System(std::io::Error::other(refused)))?;
        let world = World::new(
            records,
            config.core_rate,
            Nonce(secret),
            config.living_jobs_max,
            config.ended_jobs_max,
            Now::read(),
        );
        Ok(Arc::new(Registry {
            world: Mutex::new(world),
            store: Arc::new(store),
            admin_token: config.admin_token.clone(),
            hub_timeout: config.hub_timeout,
            requests: Requests::default(),
            places: places(config),
            tables: Tables::default(),
            placing: Semaphore::new(1),
            changed: Notify::new(),
            stopping: watch::channel(false).0,
        }))
    }

    /// Looks at the world, or changes it, under the lock; what changed is saved soon after.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut World) -> T) -> T {
        let mut world = self.lock();
        let value = look(&mut world);
        if world.has_unsaved() {
            self.changed.notify_one();
        }
        value
    }

    /// CreateService. The job exists once its record is in the store.
    pub(crate) async fn create(
        self: &Arc<Self>,
        request: CreateService,
    ) -> Result<ServiceCreated, ServiceError> {
        check_request(&request)?;
        let (namespace, nonce) = (Namespace(random()?), Nonce(random()?));
        let order = self.with(|world| {
            world.check_checkpoints(&request)?;
            world.reserve(&request.name, namespace)
        })?;
        let registry = self.clone();
        // On its own, so that a caller who hangs up leaves no name reserved for ever.
        let writing = tokio::spawn(async move {
            let name = request.name.clone();
            let job = Job::new(order, request, namespace, nonce, Now::read());
            let (store, record) = (registry.store.clone(), job.record());
            let written = blocking(move || store.save(&[record], &[])).await.and_then(|written| {
                written.map_err(|cause| {
                    let message = format!(
                        "job `{name}` was not created, because the connection manager could not save it to {cause}. \
                         Jobs that run are not affected; make room or mend the disk, then try again"
                    );
                    refusal(ErrorCode::Internal, message)
                })
            });
            registry.with(|world| match &written {
                Ok(()) => world.admit(job),
                Err(_) => world.give_back(&name),
            });
            written
        });
        writing.await.unwrap_or_else(|_| Err(broken()))?;
        Ok(ServiceCreated { namespace, nonce })
    }

    /// StopService: ends a job, or asks its hubs how it ends, and waits, within bounds, for what that is about.
    pub(crate) async fn stop_job(&self, text: &str, stop: StopService) -> Result<JobStatus, ServiceError> {
        let reason = match stop.reason {
            None => "stopped by an operator".to_string(),
            Some(reason) => format!("stopped: {}", check_reason(reason)?),
        };
        let (now, when) = (Now::read(), stop.when);
        let (namespace, mut stage) = self.with(|world| {
            let namespace = world.find(text)?.namespace;
            let stage = world.change(namespace, |job| {
                let transition = match when {
                    StopWhen::Now => job.fail(ErrorCode::JobEnded, reason, now),
                    StopWhen::WorkersEnding => job.announce(reason, now),
                    StopWhen::WorkersEnded => job.conclude(reason, now),
                };
                (job.subscribe(), transition)
            })?;
            Ok::<_, ServiceError>((namespace, stage))
        })?;
        let (bound, is_done): (Duration, fn(&Job) -> bool) = match when {
            StopWhen::Now => (STOP_TIMEOUT, Job::is_cleared),
            StopWhen::WorkersEnding => (KEEP_TIMEOUT, Job::is_kept),
            StopWhen::WorkersEnded => (CONCLUDE_TIMEOUT, Job::is_cleared),
        };
        let waits = async {
            loop {
                stage.mark_unchanged();
                if self.with(|world| world.job(namespace).map(is_done))? {
                    return Ok::<_, ServiceError>(());
                }
                // A job that is forgotten is found out by the next look.
                let _ = stage.changed().await;
            }
        };
        let in_time = tokio::select! {
            done = timeout(bound, waits) => done.map_or(Ok(false), |done| done.map(|()| true))?,
            () = self.stopped() => return Err(shutting_down()),
        };
        self.with(|world| {
            let job = world.job(namespace)?;
            // A launcher that ends its workers waits no longer than this for a checkpoint.
            if in_time || when == StopWhen::WorkersEnding {
                return Ok(job.status());
            }
            let (name, holding, seconds) = (&job.name, job.hubs_not_cleared(), bound.as_secs());
            let message = match job.state().has_ended() {
                true => format!(
                    "job `{name}` is stopped, but {holding} did not confirm within {seconds} s that its memory is free; it \
                     frees it when it next hears from the connection manager"
                ),
                false => format!(
                    "{holding} did not say within {seconds} s how job `{name}` ended, whose workers have ended: `paramhub jobs \
                     show {name}` says it later"
                ),
            };
            Err(refusal(ErrorCode::Missing, message))
        })
    }

    /// Lets hubs probe between racks and waits, within the bound of a campaign, until they have.
    pub(crate) async fn probe_links(&self) -> Result<Vec<LinkStatus>, ServiceError> {
        let mut ended = self.with(|world| world.probe_afresh(Now::read()))?;
        tokio::select! {
            // The sender lives as long as the world.
            _ = ended.changed() => Ok(self.with(|world| world.link_statuses(Now::read()))),
            () = self.stopped() => Err(shutting_down()),
        }
    }

    /// Whether the caller knows the job's nonce. A wrong namespace and a wrong proof look the same from outside.
    pub(crate) fn check_proof(
        &self,
        caller: Rank,
        purpose: Purpose,
        proof: &Proof,
    ) -> Result<(), ServiceError> {
        let nonce = self.with(|world| world.nonce(caller.namespace));
        let known = nonce.is_some();
        let expected = nonce.unwrap_or(Nonce([0; 32])).prove_rank(
            purpose,
            caller.namespace,
            caller.rank,
            caller.incarnation,
        );
        if expected.matches(proof) & known { Ok(()) } else { Err(wrong_nonce()) }
    }

    /// Gives a rank whose proof was checked a place among those of its job.
    pub(crate) fn seat(&self, guest: &Guest, namespace: Namespace) -> Result<(), Refusal> {
        let known = self.with(|world| {
            let job = world.job(namespace)?;
            Ok::<_, ServiceError>((job.workers, job.state() == JobState::Connecting))
        });
        let (workers, gathers) = known?;
        guest.prove_rank(namespace, workers, gathers)
    }

    /// Begins to stop: everyone who waits is answered at once.
    pub(crate) fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Returns when the manager stops.
    pub(crate) async fn stopped(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }

    /// Saves changes until the manager stops, and once more then.
    pub(crate) async fn save_changes(self: Arc<Self>) {
        loop {
            let stopping = tokio::select! {
                () = self.changed.notified() => false,
                () = self.stopped() => true,
            };
            let saved = self.save_once().await;
            if stopping {
                return;
            }
            if let Err(cause) = saved {
                tracing::error!("cannot save the jobs' states, will try again: {cause}");
                tokio::select! {
                    () = tokio::time::sleep(SAVE_PAUSE) => self.changed.notify_one(),
                    () = self.stopped() => {}
                }
            }
        }
    }

    /// Ends silent hubs and expired jobs until the manager stops.
    pub(crate) async fn watch_time(self: Arc<Self>) {
        let tick = TICK.min(self.hub_timeout / 4);
        let mut last = Instant::now();
        loop {
            tokio::select! {
                () = tokio::time::sleep(tick) => {}
                () = self.stopped() => return,
            }
            let now = Now::read();
            let overslept = now.instant.duration_since(last) > tick + self.hub_timeout / 2;
            last = now.instant;
            self.with(|world| {
                // A manager that was stopped for a while has not heard the hubs, which may well have spoken.
                if overslept {
                    world.hubs.forgive(now);
                }
                world.check_time(self.hub_timeout.as_secs_f64(), now);
            });
        }
    }

    async fn save_once(&self) -> Result<(), String> {
        let (changed, removed) = self.lock().take_unsaved();
        if changed.is_empty() && removed.is_empty() {
            return Ok(());
        }
        let store = self.store.clone();
        let saving = blocking(move || {
            let saved = store.save(&changed, &removed);
            (saved, changed, removed)
        });
        let (saved, changed, removed) = saving.await.map_err(|refused| refused.message)?;
        if saved.is_err() {
            self.lock().keep_unsaved(&changed, removed);
        }
        saved
    }

    /// A panic in one request is no reason to fail every other job's, so a poisoned lock is taken all the same.
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs what takes long, or blocks, beside the executor's threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| broken())
}

/// The refusal of everything that still waits when the manager stops.
pub(crate) fn shutting_down() -> ServiceError {
    refusal(ErrorCode::Internal, "the connection manager is shutting down")
}

/// The refusal of a caller who does not know the job's nonce.
pub(crate) fn wrong_nonce() -> ServiceError {
    refusal(
        ErrorCode::WrongNonce,
        "there is no job of this namespace whose nonce the caller has proved to know: check that the job still exists \
         and that every worker was given the namespace and the nonce that CreateService answered",
    )
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], ServiceError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|cause| {
        refusal(ErrorCode::Internal, format!("the operating system gives no random numbers: {cause}"))
    })?;
    Ok(bytes)
}

/// As many places as the configuration says and the descriptors of the process allow.
fn places(config: &ManagerConfig) -> Arc<Places> {
    let descriptors = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
    Places::new(config.strangers_max.min(descriptors / 8), config.ranks_max.min(descriptors / 2))
}

fn broken() -> ServiceError {
    refusal(ErrorCode::Internal, "the connection manager failed at this request; its log says why")
}
