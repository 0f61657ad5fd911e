//! The [`ManagerState`] behind a lock, with the store, and the work beside the requests: saving, and checking
//! times.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paramhub_core::auth::{Epoch, EpochSecret, Fingerprint, Namespace, Nonce, Proof, Purpose, StreamSecret};
use paramhub_core::membership::{Answer, Job, Membership, MembershipLimits, UNHEARD_MAX};
use paramhub_core::service::{
    AuthorityStatus, CreateService, CreateToken, ErrorCode, HubRegistered, JobState, JobStatus, LinkStatus,
    RegisterHub, ReplaceAuthority, ServiceCreated, ServiceError, StopService, TeamQuotas, TeamStatus,
    TokenCreated, TokenStatus,
};
use paramhub_core::teams::{TeamRecord, name_of_new};
use paramhub_core::tokens::{TokenBearer, TokenRecord, Tokens};
use paramhub_trust::{AUTHORITIES_MAX, ManagerIdentity};
use tokio::sync::{Notify, Semaphore, watch};

use crate::access::Access;
use crate::backup::Backup;
use crate::blocking::{blocking, broken};
use crate::caller::Caller;
use crate::clock::now;
use crate::config::ManagerConfig;
use crate::connection_slots::ConnectionSlot;
use crate::error::{ManagerError, Refusal, refusal};
use crate::key_table_budgets::KeyTableBudgets;
use crate::state::{CallingRank, Changes, ManagerState, check_reason, check_request};
use crate::store::{Store, WriteError};
use crate::term::{Term, lost_the_lead};

/// The time between two attempts to save.
const SAVE_PAUSE: Duration = Duration::from_secs(1);

/// The manager's state, shared by all requests. A manager that loses the lead drops it, and loads the state anew when it
/// leads again.
pub(crate) struct Registry {
    state: Mutex<ManagerState>,
    store: Arc<dyn Store>,
    pub(crate) access: Arc<Access>,
    /// How long this registry may answer.
    pub(crate) term: Term,
    pub(crate) hub_timeout: Duration,
    pub(crate) tables: KeyTableBudgets,
    /// Allows one placement at a time: a large one takes gigabytes.
    pub(crate) placing: Semaphore,
    changed: Notify,
    /// Held while records are saved.
    saving: tokio::sync::Mutex<()>,
    end: watch::Sender<Option<End>>,
}

/// Why a registry ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The manager stops.
    Stop,
    /// The manager does not lead any more.
    LostLead,
}

impl Registry {
    /// Restores the jobs, hubs and teams in the store. It blocks on the store.
    pub(crate) fn open(
        config: &ManagerConfig,
        store: Arc<dyn Store>,
        access: Arc<Access>,
        term: Term,
    ) -> Result<Arc<Self>, ManagerError> {
        let (jobs, hubs) = (store.load_jobs()?, store.load_hubs()?);
        let secret = random().map_err(|refused| ManagerError::System(std::io::Error::other(refused)))?;
        let limits = MembershipLimits {
            hub_timeout: config.hub_timeout,
            unheard_max: UNHEARD_MAX,
            living_jobs_max: config.living_jobs_max,
            ended_jobs_max: config.ended_jobs_max,
            core_rate: config.core_rate,
        };
        let mut state = ManagerState::new(Membership::new(jobs, hubs, limits, Nonce(secret), now()));
        store.load_teams()?.into_iter().for_each(|team| state.membership.set_team(team));
        state.carry_out();
        Ok(Arc::new(Registry {
            state: Mutex::new(state),
            store,
            access,
            term,
            hub_timeout: config.hub_timeout,
            tables: KeyTableBudgets::default(),
            placing: Semaphore::new(1),
            changed: Notify::new(),
            saving: tokio::sync::Mutex::new(()),
            end: watch::channel(None).0,
        }))
    }

    /// Reads or changes the state under the lock. Changes are saved soon after.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut ManagerState) -> T) -> T {
        let mut state = self.lock();
        let value = look(&mut state);
        state.carry_out();
        if state.has_unsaved() {
            self.changed.notify_one();
        }
        value
    }

    /// CreateService. The job exists once its record is in the store. Returns its full name, too. A caller that repeats
    /// its call names the namespace of the job, so that the second call finds the job of the first.
    pub(crate) async fn create(
        self: &Arc<Self>,
        mut request: CreateService,
        by: &TokenBearer,
        wanted: Option<Namespace>,
    ) -> Result<(String, ServiceCreated), ServiceError> {
        request.name = name_of_new(by.team.as_deref(), &request.name)?;
        check_request(&request)?;
        let name = request.name.clone();
        let namespace = wanted.map_or_else(|| random().map(Namespace), Ok)?;
        let nonce = Nonce(random()?);
        let epoch = Some(Epoch { number: Epoch::FIRST, secret: EpochSecret(random()?) });
        let reserved = self.with(|state| {
            if let Some(team) = &by.team {
                // The team may have been removed since the token was checked.
                state.membership.team(team)?;
            }
            if let Some(created) = state.membership.created_before(&name, namespace)? {
                return Ok(Reserved::Before(created));
            }
            state.membership.check_checkpoints(&request)?;
            state.membership.give_way_to(&request, now());
            let order = state.membership.reserve(&request.name, request.options.weight, namespace)?;
            Ok::<_, ServiceError>(Reserved::Now(order))
        })?;
        let order = match reserved {
            Reserved::Now(order) => order,
            Reserved::Before(created) => {
                return Ok((name, ServiceCreated { authority: self.authority_of_jobs(), ..created }));
            }
        };
        let registry = self.clone();
        // This runs as a task of its own, so that a caller that hangs up cannot leave the name reserved for
        // ever.
        let writing = tokio::spawn(async move {
            let name = request.name.clone();
            let job = Job::new(order, request, namespace, nonce, epoch, now());
            let changes = Changes { jobs: vec![job.record(now())], ..Changes::default() };
            let store = registry.store.clone();
            let written = blocking(move || store.save(&changes)).await.and_then(|written| {
                written.map_err(|cause| {
                    let message = format!(
                        "job `{name}` was not created, because the connection manager could not save it to {cause}. \
                         Jobs that run are not affected; make room or mend the disk, then try again"
                    );
                    refusal(ErrorCode::Internal, message)
                })
            });
            registry.with(|state| match &written {
                Ok(()) => state.membership.admit(job),
                Err(_) => state.membership.give_back(&name),
            });
            written
        });
        writing.await.unwrap_or_else(|_| Err(broken()))?;
        Ok((name, ServiceCreated { namespace, nonce, authority: self.authority_of_jobs() }))
    }

    /// Lets a hub join. When this returns, its record is saved, unless the disk fails: then the hub would have to join
    /// again a manager that restarts.
    pub(crate) async fn register_hub(
        self: &Arc<Self>,
        offer: RegisterHub,
    ) -> Result<HubRegistered, ServiceError> {
        let token: String = Nonce(random()?).into();
        let hub = self.with(|state| state.membership.register_hub(offer, &token, now()))?;
        // A failure is logged, and saving tried again, by the task that saves all changes.
        let _ = self.save_once().await;
        Ok(HubRegistered { hub, token })
    }

    /// Replaces a job's nonce. The former one is refused from now on.
    pub(crate) fn replace_nonce(&self, namespace: Namespace) -> Result<ServiceCreated, ServiceError> {
        let nonce = Nonce(random()?);
        let replaced = self.with(|state| state.membership.replace_nonce(namespace, nonce))?;
        Ok(ServiceCreated { authority: self.authority_of_jobs(), ..replaced })
    }

    /// The fingerprint that the secrets of jobs carry.
    pub(crate) fn authority_of_jobs(&self) -> Option<Fingerprint> {
        self.access.needs_tls.then(|| self.access.identity.authority())
    }

    /// The authority that signs the manager's certificates.
    pub(crate) fn authority(&self) -> AuthorityStatus {
        let identity = &self.access.identity;
        AuthorityStatus {
            certificate: identity.authority_certificate(),
            fingerprint: identity.authority(),
            former: identity.authorities().len() - 1,
        }
    }

    /// Makes a new authority. It signs once it is in the store.
    pub(crate) async fn replace_authority(
        self: &Arc<Self>,
        request: ReplaceAuthority,
    ) -> Result<AuthorityStatus, ServiceError> {
        let registry = self.clone();
        // This runs as a task of its own, so that a caller that hangs up cannot leave the store ahead of what
        // the manager shows.
        let changing = tokio::spawn(async move {
            let _alone = registry.access.changing_authorities.lock().await;
            let failed = |cause: String| {
                refusal(ErrorCode::Internal, format!("the authority stays as it is: {cause}"))
            };
            let mut authorities =
                vec![ManagerIdentity::make_authority().map_err(|cause| failed(cause.to_string()))?];
            if !request.revoke_former {
                authorities.extend(registry.access.identity.authorities());
                authorities.truncate(AUTHORITIES_MAX);
            }
            let (store, records) = (registry.store.clone(), authorities.clone());
            let saved = blocking(move || store.save_authorities(&records)).await?;
            saved.map_err(|cause| failed(cause.to_string()))?;
            let identity = &registry.access.identity;
            identity.replace_authorities(authorities).map_err(|cause| failed(cause.to_string()))?;
            Ok(registry.authority())
        });
        changing.await.unwrap_or_else(|_| Err(broken()))
    }

    /// Everything that a manager keeps, as JSON, for [`restore`](crate::restore).
    pub(crate) async fn backup(self: &Arc<Self>) -> Result<Vec<u8>, ServiceError> {
        let failed =
            |cause: String| refusal(ErrorCode::Internal, format!("the state cannot be read: {cause}"));
        self.save_once().await.map_err(|cause| failed(cause.to_string()))?;
        let store = self.store.clone();
        blocking(move || {
            let backup = Backup::of(&*store).map_err(|cause| failed(cause.to_string()))?;
            Ok(serde_json::to_vec(&backup).expect("records are plain data"))
        })
        .await?
    }

    /// StopService: ends a job, or asks its hubs how it ends, and waits for that for a bounded time.
    pub(crate) async fn stop_job(
        &self,
        namespace: Namespace,
        stop: StopService,
    ) -> Result<JobStatus, ServiceError> {
        let reason = match stop.reason {
            None => "stopped by an operator".to_string(),
            Some(reason) => format!("stopped: {}", check_reason(reason)?),
        };
        let (mut call, deadline) = self.with(|state| {
            let waiting = state.membership.stop(namespace, reason, stop.when, now())?;
            Ok::<_, ServiceError>((Caller::wait(self, state, waiting.call), waiting.deadline))
        })?;
        match call.answer_by(deadline).await? {
            Answer::Stopped(stopped) => stopped.map(|status| *status),
            other => unreachable!("a stop is answered with {other:?}"),
        }
    }

    /// Lets hubs probe between racks and waits until they have, no longer than a probe run may take.
    pub(crate) async fn probe_links(&self) -> Result<Vec<LinkStatus>, ServiceError> {
        let mut call = self.with(|state| {
            let call = state.membership.probe_afresh(now())?;
            Ok::<_, ServiceError>(Caller::wait(self, state, call))
        })?;
        match call.answer().await? {
            Answer::Probed(links) => Ok(links),
            other => unreachable!("a probe run is answered with {other:?}"),
        }
    }

    /// The tokens that are valid now.
    pub(crate) fn tokens(&self) -> Arc<Tokens> {
        self.access.tokens()
    }

    /// Makes a token. It is valid once its record is in the store.
    pub(crate) async fn create_token(
        self: &Arc<Self>,
        request: CreateToken,
        by: TokenBearer,
    ) -> Result<TokenCreated, ServiceError> {
        let random = random()?;
        let registry = self.clone();
        self.change_tokens(move |tokens| {
            if let Some(team) = &request.team {
                registry.with(|state| state.membership.team(team))?;
            }
            let (token, record) = tokens.create(request, &by, random, now().unix_s)?;
            let status = record.status.clone();
            Ok((TokenCreated { token, status }, record, Vec::new()))
        })
        .await
    }

    /// Revokes a token. It is invalid once that is in the store.
    pub(crate) async fn revoke_token(self: &Arc<Self>, name: String) -> Result<TokenStatus, ServiceError> {
        self.change_tokens(move |tokens| {
            let (record, forgotten) = tokens.revoke(&name, now().unix_s)?;
            Ok((record.status.clone(), record, forgotten))
        })
        .await
    }

    /// Changes the tokens by `change`, which returns its result, the record to save, and the ids of records to
    /// remove.
    async fn change_tokens<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Tokens) -> Result<(T, TokenRecord, Vec<String>), ServiceError> + Send + 'static,
    ) -> Result<T, ServiceError> {
        let registry = self.clone();
        // This runs as a task of its own, so that a caller that hangs up cannot leave the store ahead of the
        // tokens in memory.
        let changing = tokio::spawn(async move {
            let _alone = registry.access.changing_tokens.lock().await;
            let mut tokens = Tokens::clone(&registry.tokens());
            let (result, record, forgotten) = change(&mut tokens)?;
            let store = registry.store.clone();
            blocking(move || store.save_token(&record, &forgotten)).await?.map_err(|cause| {
                let message =
                    format!("the tokens stay as they are, because they could not be saved to {cause}");
                refusal(ErrorCode::Internal, message)
            })?;
            registry.access.replace_tokens(tokens);
            Ok(result)
        });
        changing.await.unwrap_or_else(|_| Err(broken()))
    }

    /// Adds a team, or replaces its quotas. They count once they are in the store.
    pub(crate) async fn set_team(
        self: &Arc<Self>,
        name: String,
        quotas: TeamQuotas,
    ) -> Result<TeamStatus, ServiceError> {
        let registry = self.clone();
        self.change_teams(async move {
            registry.with(|state| state.membership.check_team_name(&name))?;
            let (store, record) = (registry.store.clone(), TeamRecord { name, quotas });
            let saved = record.clone();
            blocking(move || store.save_team(&saved)).await?.map_err(|cause| unsaved_team(&cause))?;
            registry.with(|state| {
                let name = record.name.clone();
                state.membership.set_team(record);
                state.membership.team(&name)
            })
        })
        .await
    }

    /// Removes a team that has neither jobs that live nor valid tokens.
    pub(crate) async fn remove_team(self: &Arc<Self>, name: String) -> Result<TeamStatus, ServiceError> {
        let registry = self.clone();
        self.change_teams(async move {
            let team = registry.with(|state| state.membership.team(&name))?;
            let tokens: Vec<String> =
                registry.tokens().of_team(&name).map(|token| format!("`{token}`")).collect();
            let busy = |message| Err(refusal(ErrorCode::Busy, message));
            if !tokens.is_empty() {
                return busy(format!(
                    "team `{name}` has tokens: revoke {} first with `paramhub tokens revoke`",
                    tokens.join(", ")
                ));
            }
            if team.jobs > 0 {
                return busy(format!(
                    "team `{name}` has {} jobs that live: end them first with `paramhub jobs stop`",
                    team.jobs
                ));
            }
            let (store, removed) = (registry.store.clone(), name.clone());
            blocking(move || store.remove_team(removed)).await?.map_err(|cause| unsaved_team(&cause))?;
            registry.with(|state| state.membership.remove_team(&name));
            Ok(team)
        })
        .await
    }

    /// Changes teams, one change at a time, as a task of its own: a caller that hangs up cannot leave the store
    /// ahead of the teams in memory.
    async fn change_teams<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl Future<Output = Result<T, ServiceError>> + Send + 'static,
    ) -> Result<T, ServiceError> {
        let registry = self.clone();
        let changing = tokio::spawn(async move {
            let _alone = registry.access.changing_tokens.lock().await;
            change.await
        });
        changing.await.unwrap_or_else(|_| Err(broken()))
    }

    /// Checks whether the caller knows the job's nonce or, once it has one, its rank's secret. A wrong
    /// namespace and a wrong proof get the same answer.
    pub(crate) fn check_proof(
        &self,
        caller: CallingRank,
        purpose: Purpose,
        proof: &Proof,
    ) -> Result<(), ServiceError> {
        let CallingRank { namespace, rank, incarnation } = caller;
        let secrets = self.with(|state| state.membership.call_secrets(namespace, rank, purpose));
        let is_proven = secrets.map(|secret| {
            let expected =
                secret.unwrap_or(StreamSecret([0; 32])).prove_rank(purpose, namespace, rank, incarnation);
            expected.matches(proof) & secret.is_some()
        });
        if is_proven[0] | is_proven[1] { Ok(()) } else { Err(wrong_nonce()) }
    }

    /// Gives a rank whose proof was checked a slot of its job.
    pub(crate) fn admit_rank(&self, slot: &ConnectionSlot, namespace: Namespace) -> Result<(), Refusal> {
        let known = self.with(|state| {
            let job = state.membership.job(namespace)?;
            Ok::<_, ServiceError>((job.workers, job.state() == JobState::Connecting))
        });
        let (workers, gathers) = known?;
        slot.prove_rank(namespace, workers, gathers)
    }

    /// Ends the registry: every call that waits is answered at once.
    pub(crate) fn end(&self, end: End) {
        self.end.send_replace(Some(end));
    }

    /// Returns when the registry ends.
    pub(crate) async fn ended(&self) -> End {
        // The sender lives as long as `self`, so this cannot fail.
        let ended = self.end.subscribe().wait_for(Option::is_some).await.map(|end| *end);
        ended.ok().flatten().unwrap_or(End::Stop)
    }

    /// The refusal of every call that still waits when the registry ends.
    pub(crate) fn end_refusal(&self) -> ServiceError {
        match *self.end.borrow() {
            Some(End::LostLead) => lost_the_lead(),
            // Another manager takes over.
            Some(End::Stop) if self.term.is_shared() => lost_the_lead(),
            Some(End::Stop) | None => refusal(ErrorCode::Internal, "the connection manager is shutting down"),
        }
    }

    /// Saves changes until the registry ends, and then once more if it still may.
    pub(crate) async fn save_changes(self: Arc<Self>) {
        loop {
            let end = tokio::select! {
                () = self.changed.notified() => None,
                end = self.ended() => Some(end),
            };
            if end == Some(End::LostLead) {
                return;
            }
            let saved = self.save_once().await;
            if end.is_some() {
                return;
            }
            if let Err(cause) = saved {
                tracing::error!("cannot save the jobs' states, will try again: {cause}");
                tokio::select! {
                    () = tokio::time::sleep(SAVE_PAUSE) => self.changed.notify_one(),
                    _ = self.ended() => {}
                }
            }
        }
    }

    /// Ends silent hubs and expired jobs until the registry ends.
    pub(crate) async fn watch_time(self: Arc<Self>) {
        let tick = self.with(|state| state.membership.tick());
        loop {
            tokio::select! {
                () = tokio::time::sleep(tick) => {}
                _ = self.ended() => return,
            }
            self.with(|state| state.membership.check_time(now()));
        }
    }

    /// Saves what has changed. When this returns without an error, all that had changed before it was called is saved.
    async fn save_once(self: &Arc<Self>) -> Result<(), WriteError> {
        let registry = self.clone();
        // This runs as a task of its own: callers wait for what it saves, also if the one that asked for it hangs up.
        let saving = tokio::spawn(async move {
            let _alone = registry.saving.lock().await;
            let Some(changes) = registry.lock().take_unsaved() else { return Ok(()) };
            let store = registry.store.clone();
            let saved = blocking(move || store.save(&changes))
                .await
                .unwrap_or_else(|refused| Err(WriteError::Refused(refused.message)));
            let mut state = registry.lock();
            match &saved {
                Ok(()) => state.saved(),
                Err(WriteError::Refused(_)) => state.not_saved(),
                Err(WriteError::Unanswered(_)) => state.perhaps_saved(),
            }
            saved
        });
        saving.await.unwrap_or_else(|_| Err(WriteError::Refused(broken().message)))
    }

    /// A panic in one request must not fail the jobs of others, so a poisoned lock is taken all the same.
    fn lock(&self) -> MutexGuard<'_, ManagerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The refusal of a caller that does not know the job's nonce.
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

/// What CreateService has found for a name.
enum Reserved {
    /// The name is free, and reserved for the job of this number.
    Now(u64),
    /// The job was created by an earlier call, whose answer was lost.
    Before(ServiceCreated),
}

fn unsaved_team(cause: &WriteError) -> ServiceError {
    refusal(
        ErrorCode::Internal,
        format!("the teams stay as they are, because they could not be saved to {cause}"),
    )
}
