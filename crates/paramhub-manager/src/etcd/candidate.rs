//! A manager among several: it follows, leads while it holds the lease, and follows again.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, Error, EventType, PutOptions, Txn, TxnOp, WatchFilterType, WatchOptions,
};
use paramhub_core::leadership::Term as TermNumber;
use paramhub_core::tokens::Tokens;
use paramhub_trust::AuthorityRecord;
use tokio::time::{sleep, timeout};

use super::connection::{CALL_TIMEOUT, CallError, WRITE_TIMEOUT};
use super::records::{Etcd, EtcdStore, first_of};
use crate::access::Access;
use crate::clock::since_boot;
use crate::config::ManagerConfig;
use crate::error::ManagerError;
use crate::etcd_address::EtcdAddress;
use crate::follower::Following;
use crate::frontend::Frontend;
use crate::registry::{End, Registry};
use crate::store::{Store, Table};
use crate::term::{HeldTerm, Term};

/// The lease of a leader. Another leads so long after the death of one, and a little more.
pub(super) const LEASE: Duration = Duration::from_secs(3);
/// The time between two looks of a follower at the leader's key, which it also watches.
const LOOK: Duration = Duration::from_secs(1);
/// The pause of a manager that has the lead and cannot read the state.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(5);

/// A manager that leads in turn with others.
pub(crate) struct Candidate {
    config: ManagerConfig,
    etcd: Arc<Etcd>,
    frontend: Arc<Frontend>,
    /// The URL under which this manager calls itself as leader.
    url: String,
}

/// A term that this manager has won.
pub(super) struct Won {
    pub(super) term: Arc<HeldTerm>,
    /// The number of its lease at etcd.
    pub(super) lease: i64,
}

/// What a follower has seen of the leader.
struct Look {
    leader: Option<String>,
    /// The revision of the key that changes with tokens and authorities.
    access: i64,
    /// The revision of all keys at that moment.
    revision: i64,
}

impl Candidate {
    /// A manager that follows. `url` is that for others.
    pub(crate) async fn open(
        config: ManagerConfig,
        address: &EtcdAddress,
        url: String,
    ) -> Result<Candidate, ManagerError> {
        let (etcd, is_new) = Etcd::open(address).await?;
        let authorities = etcd.authorities_or_new(is_new).await?;
        let tokens = etcd.parsed(Table::Tokens).await;
        let tokens = tokens.map_err(|cause| etcd.refuse(cause, super::prepare::ADVICE))?;
        let tokens = Tokens::new(config.admin_token.as_deref(), tokens);
        let access = Arc::new(Access::new(&config, authorities, tokens)?);
        Ok(Candidate { config, etcd, frontend: Frontend::new(access), url })
    }

    pub(crate) fn frontend(&self) -> Arc<Frontend> {
        self.frontend.clone()
    }

    /// Follows and leads until the manager stops.
    pub(crate) async fn lead_in_turn(self) {
        loop {
            let won = tokio::select! {
                won = self.win() => won,
                () = self.frontend.stopped() => return,
            };
            let lease = won.lease;
            let renewing = tokio::spawn(renew(self.etcd.clone(), won.term.clone(), lease));
            let outcome = self.lead(won.term.clone()).await;
            won.term.end();
            renewing.abort();
            // Others need not wait for the lease to run out.
            leave(&self.etcd, lease).await;
            match outcome {
                Outcome::Stops => return,
                Outcome::Lost => {}
                // Another may read it, or an operator mend it.
                Outcome::Unreadable => tokio::select! {
                    () = sleep(UNREADABLE_PAUSE) => {}
                    () = self.frontend.stopped() => return,
                },
            }
        }
    }

    /// Follows until this manager has a term.
    async fn win(&self) -> Won {
        let mut following = Following::default();
        // The leader before may have changed both since this manager read them.
        let mut access = None;
        loop {
            match self.follow_once(&mut following, &mut access).await {
                Ok(Some(won)) => return won,
                Ok(None) => {}
                Err(trouble) => {
                    let trouble = Some(trouble.to_string());
                    self.follow(&mut following, Following { leader: None, trouble });
                    sleep(LOOK).await;
                }
            }
        }
    }

    /// Answers by what is known now, and logs what has changed: one line each.
    fn follow(&self, before: &mut Following, now: Following) {
        if *before == now {
            return;
        }
        if before.trouble.is_some() && now.trouble.is_none() {
            tracing::warn!("etcd answers again at {}", self.etcd.address);
        }
        match &now {
            Following { trouble: Some(trouble), .. } if before.trouble.is_none() => {
                tracing::warn!(
                    "this connection manager cannot lead: {trouble}. Jobs that run go on; it asks again"
                );
            }
            Following { leader: Some(leader), .. } => {
                tracing::info!("this connection manager follows the one at {leader}");
            }
            _ => {}
        }
        self.frontend.follow(now.clone());
        *before = now;
    }

    /// Looks who leads. Takes the lead if nobody does, or waits for a moment for the leader's end.
    async fn follow_once(
        &self,
        following: &mut Following,
        access: &mut Option<i64>,
    ) -> Result<Option<Won>, CallError> {
        let look = self.look().await?;
        if *access != Some(look.access) {
            self.read_access().await?;
            *access = Some(look.access);
        }
        self.follow(following, Following { leader: look.leader.clone(), trouble: None });
        if look.leader.is_none() {
            return win_once(&self.etcd, &self.url, LEASE).await;
        }
        self.await_end(look.revision).await;
        Ok(None)
    }

    async fn look(&self) -> Result<Look, CallError> {
        let keys = &self.etcd.keys;
        let gets = Txn::new().and_then([TxnOp::get(keys.leader(), None), TxnOp::get(keys.access(), None)]);
        let found = self.etcd.connection.call(CALL_TIMEOUT, |mut client| {
            let gets = gets.clone();
            async move { client.txn(gets).await }
        });
        let found = found.await?;
        let revision = found.header().map_or(0, etcd_client::ResponseHeader::revision);
        let found = found.op_responses();
        let first = |index: usize| found.get(index).and_then(first_of);
        Ok(Look {
            leader: first(0).map(|leader| String::from_utf8_lossy(leader.value()).into_owned()),
            access: first(1).map_or(0, |access| access.mod_revision()),
            revision,
        })
    }

    /// Waits until the leader's key is gone, or for a moment.
    async fn await_end(&self, seen: i64) {
        let watching = self.etcd.connection.call(CALL_TIMEOUT, |mut client| {
            let options =
                WatchOptions::new().with_start_revision(seen + 1).with_filters([WatchFilterType::NoPut]);
            let key = self.etcd.keys.leader();
            async move { client.watch(key, Some(options)).await }
        });
        let gone = async {
            let Ok(mut watch) = watching.await else { return std::future::pending().await };
            while let Ok(Some(message)) = watch.message().await {
                if message.events().iter().any(|event| event.event_type() == EventType::Delete) {
                    return;
                }
                if message.canceled() {
                    break;
                }
            }
            // The look says what the watch cannot.
            std::future::pending().await
        };
        let _ = timeout(LOOK, gone).await;
    }

    /// Reads the tokens and the authorities, by which callers recognise this manager although it does not lead.
    async fn read_access(&self) -> Result<(), CallError> {
        let access = &self.frontend.access;
        // What a term of this manager has saved last must not replace what is read here.
        let _tokens_alone = access.changing_tokens.lock().await;
        let _authorities_alone = access.changing_authorities.lock().await;
        let tokens = self.etcd.parsed(Table::Tokens).await.map_err(CallError::Unusable)?;
        access.replace_tokens(Tokens::new(self.config.admin_token.as_deref(), tokens));
        let authorities: Vec<AuthorityRecord> =
            self.etcd.parsed(Table::Authorities).await.map_err(CallError::Unusable)?;
        let certificates = |records: &[AuthorityRecord]| {
            records.iter().map(|record| record.certificate.clone()).collect::<Vec<_>>()
        };
        if certificates(&access.identity.authorities()) != certificates(&authorities) {
            let replaced = access.identity.replace_authorities(authorities);
            replaced.map_err(|cause| CallError::Unusable(format!("an authority cannot be used: {cause}")))?;
        }
        Ok(())
    }

    /// Serves jobs for a term, until it is over or the manager stops.
    async fn lead(&self, term: Arc<HeldTerm>) -> Outcome {
        let registry = tokio::select! {
            registry = self.load(term.clone()) => registry,
            () = term.over() => return Outcome::Lost,
            () = self.frontend.stopped() => return Outcome::Stops,
        };
        let registry = match registry {
            Ok(registry) => registry,
            Err(cause) => {
                tracing::error!("this connection manager gives up the lead: {cause}");
                self.frontend.follow(Following { leader: None, trouble: Some(cause.to_string()) });
                return Outcome::Unreadable;
            }
        };
        self.frontend.lead(&registry);
        tracing::info!("this connection manager leads");
        let saving = tokio::spawn(registry.clone().save_changes());
        tokio::spawn(registry.clone().watch_time());
        tokio::select! {
            () = term.over() => {
                tracing::warn!("this connection manager does not lead any more: its lease has ended");
                self.frontend.follow(Following::default());
                registry.end(End::LostLead);
                Outcome::Lost
            }
            () = self.frontend.stopped() => {
                registry.end(End::Stop);
                let _ = saving.await;
                Outcome::Stops
            }
        }
    }

    /// Loads the state as a manager that restarts does.
    async fn load(&self, term: Arc<HeldTerm>) -> Result<Arc<Registry>, ManagerError> {
        // No follower's look has seen what the leader before wrote last.
        let unread = |cause: CallError| self.etcd.refuse(cause, super::prepare::ADVICE);
        self.read_access().await.map_err(unread)?;
        let store: Arc<dyn Store> = Arc::new(EtcdStore::open(self.etcd.clone(), term.clone()).await?);
        let (config, access) = (self.config.clone(), self.frontend.access.clone());
        let open = move || Registry::open(&config, store, access, Term::Held(term));
        match tokio::task::spawn_blocking(open).await {
            Ok(opened) => opened,
            Err(panicked) => Err(ManagerError::System(std::io::Error::other(panicked))),
        }
    }
}

/// How a term has ended.
enum Outcome {
    /// The manager stops.
    Stops,
    /// The lease has run out, or is another's.
    Lost,
    /// The state cannot be read.
    Unreadable,
}

/// Asks for the lead once, with a lease of whole seconds. `None` if another has it.
pub(super) async fn win_once(etcd: &Etcd, url: &str, lease: Duration) -> Result<Option<Won>, CallError> {
    let asked = since_boot();
    let seconds = i64::try_from(lease.as_secs()).unwrap_or(i64::MAX);
    let granted = etcd
        .connection
        .call(CALL_TIMEOUT, |mut client| async move { client.lease_grant(seconds, None).await });
    let granted = granted.await?;
    let lease = granted.id();
    let key = etcd.keys.leader();
    let claim = Txn::new()
        .when([Compare::version(key.clone(), CompareOp::Equal, 0)])
        .and_then([TxnOp::put(key.clone(), url, Some(PutOptions::new().with_lease(lease)))])
        .or_else([TxnOp::get(key, None)]);
    let claimed = etcd.connection.call(WRITE_TIMEOUT, |mut client| {
        let claim = claim.clone();
        async move { client.txn(claim).await }
    });
    let claimed = match claimed.await {
        Ok(claimed) => claimed,
        Err(cause) => {
            leave(etcd, lease).await;
            return Err(cause);
        }
    };
    let number = match (claimed.succeeded(), claimed.op_responses().first().and_then(first_of)) {
        (true, _) => claimed.header().map(etcd_client::ResponseHeader::revision),
        // The same claim was made before, and its answer lost.
        (false, Some(leader)) if leader.lease() == lease => Some(leader.create_revision()),
        (false, _) => None,
    };
    // etcd may give a longer lease than was asked for, never a shorter one.
    let lasting = Duration::from_secs(u64::try_from(granted.ttl()).unwrap_or(0));
    let term = number.and_then(|number| HeldTerm::won(TermNumber(number), lasting, asked));
    if term.is_none() {
        leave(etcd, lease).await;
    }
    Ok(term.map(|term| Won { term, lease }))
}

/// Renews the lease of a term until that is over.
pub(super) async fn renew(etcd: Arc<Etcd>, term: Arc<HeldTerm>, lease: i64) {
    while let Some(pause) = term.until_renewal() {
        sleep(pause).await;
        let asked = since_boot();
        let renewed = etcd.connection.call(CALL_TIMEOUT, |mut client| async move {
            // The answer to the first request comes with the stream, and fails if there is no such lease.
            match client.lease_keep_alive(lease).await {
                Ok(_) => Ok(true),
                Err(Error::LeaseKeepAliveError(_)) => Ok(false),
                Err(other) => Err(other),
            }
        });
        match renewed.await {
            Ok(true) => term.renewed(asked),
            Ok(false) => term.end(),
            Err(_) => term.not_renewed(),
        }
    }
}

/// Gives a lease back, and with it the lead. If that fails, the lease runs out.
pub(super) async fn leave(etcd: &Etcd, lease: i64) {
    let revoked =
        etcd.connection.call(CALL_TIMEOUT, |mut client| async move { client.lease_revoke(lease).await });
    let _ = timeout(CALL_TIMEOUT, revoked).await;
}
