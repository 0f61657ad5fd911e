//! Limits the number of connections to the manager. Each connection holds a slot, and there is a number of
//! slots for each kind of caller. (This is not the slot of a chunk.)
//!
//! Every connection begins unauthenticated. There are few slots for these connections. If there are more
//! connections than slots, the oldest connection of the address with the most of them is evicted. A caller
//! that proves that it knows a token or a job's nonce gets a slot that no unauthenticated connection can
//! take.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use paramhub_core::auth::Namespace;
use paramhub_core::service::ErrorCode;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::Refusal;

/// Slots of one hub. It needs one for its poll and one for its report. The others are for connections that
/// are broken, which the manager has not noticed yet.
const HUB_SLOTS: usize = 8;
/// Slots of all operators together. An operator is a caller that showed the admin token.
const OPERATOR_SLOTS: usize = 256;
/// Slots of the callers with tokens of one team.
const TEAM_SLOTS: usize = 32;
/// Slots of the callers with tokens of teams together.
const ALL_TEAMS_SLOTS: usize = 512;
/// The slots that a job has in addition to two for each rank.
const JOB_SPARE: usize = 8;
/// The most bytes that the manager keeps for all unauthenticated callers together: bytes that it received,
/// and answers that it has yet to send.
const UNAUTHENTICATED_BYTES_MAX: usize = 4 << 20;
/// How long the manager has served an unauthenticated connection before it may be evicted. The request of a
/// younger connection may still be on its way. A connection that the manager has not begun to serve is not
/// evicted: under a flood that would be every connection before its turn, those with requests among them.
/// [`ConnectionSlots::evict_one`] ignores the age.
const MIN_AGE: Duration = Duration::from_millis(50);
/// The least time between two log lines about evictions.
const EVICTION_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The slots of all kinds, and the connections that hold them.
pub(crate) struct ConnectionSlots {
    unauthenticated_max: usize,
    /// The most ranks whose jobs are gathering, of all jobs together.
    ranks_max: usize,
    state: Mutex<SlotsState>,
}

/// The number of connections of each kind, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnectionCounts {
    pub(crate) unauthenticated: usize,
    pub(crate) hubs: usize,
    pub(crate) ranks: usize,
    pub(crate) operators: usize,
    pub(crate) teams: usize,
    /// The evictions of unauthenticated connections since the manager started.
    pub(crate) evictions: u64,
}

/// What a caller has proved to be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CallerKind {
    Operator,
    /// A caller with a token of the team of this name.
    Team(Arc<str>),
    /// The hub of this number.
    Hub(u32),
    /// Some rank of this job: all ranks of a job prove the same.
    Rank(Namespace),
}

/// The slot of one connection. Dropping it frees the slot.
pub(crate) struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    /// The connection's number, counted in the order in which connections were accepted.
    number: u64,
    /// What the caller has proved to be; `None` while it is unauthenticated.
    kind: Mutex<Option<CallerKind>>,
    /// `true` if `kind` is present. It is read without the lock.
    proven: AtomicBool,
    /// `true` once the manager begins to send the answer.
    answering: AtomicBool,
    /// Notified when the connection loses its slot to another one.
    evicted: Arc<Notify>,
}

#[derive(Default)]
struct SlotsState {
    /// The number of the next connection.
    next: u64,
    /// Unauthenticated connections by number, so that the oldest comes first.
    unauthenticated: BTreeMap<u64, UnauthenticatedConnection>,
    /// The numbers of the unauthenticated connections of each address.
    by_peer: HashMap<IpAddr, BTreeSet<u64>>,
    /// The bytes of all unauthenticated connections.
    bytes: usize,
    /// The connections of each proven kind by number, so that the oldest comes first.
    proven: HashMap<CallerKind, BTreeMap<u64, Arc<Notify>>>,
    /// The slots that are reserved for each job that had to gather: one for each of its ranks, until the
    /// job's last connection ends.
    reserved: HashMap<Namespace, usize>,
    /// Evictions of unauthenticated connections.
    evictions: u64,
    /// The time of the last warning about evictions, and the number of evictions at that time.
    last_warning: Option<(Instant, u64)>,
}

struct UnauthenticatedConnection {
    peer: IpAddr,
    /// When the manager began to serve the connection. `None` until then.
    served_since: Option<Instant>,
    /// The bytes that the manager keeps for the connection.
    bytes: usize,
    /// `true` while the manager works on the complete request, until it begins to send the answer. The
    /// connection is not evicted in that time.
    busy: bool,
    evicted: Arc<Notify>,
}

impl ConnectionSlots {
    pub(crate) fn new(unauthenticated_max: usize, ranks_max: usize) -> Arc<Self> {
        Arc::new(ConnectionSlots { unauthenticated_max, ranks_max, state: Mutex::default() })
    }

    /// Gives an unauthenticated slot to a connection that was just accepted.
    pub(crate) fn accept(self: &Arc<Self>, peer: IpAddr) -> ConnectionSlot {
        let peer = counted_as(peer);
        let evicted = Arc::new(Notify::new());
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.by_peer.entry(peer).or_default().insert(number);
        state.unauthenticated.insert(
            number,
            UnauthenticatedConnection {
                peer,
                served_since: None,
                bytes: 0,
                busy: false,
                evicted: evicted.clone(),
            },
        );
        ConnectionSlot {
            slots: self.clone(),
            number,
            kind: Mutex::new(None),
            proven: AtomicBool::new(false),
            answering: AtomicBool::new(false),
            evicted,
        }
    }

    /// Evicts unauthenticated connections until there is a slot for each that is left. Returns `false` if
    /// there are still too many, because each is too young or waits for the manager.
    pub(crate) fn evict_excess(&self) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        let may_be_evicted = |connection: &UnauthenticatedConnection| {
            connection.served_since.is_some_and(|since| now.saturating_duration_since(since) >= MIN_AGE)
        };
        while state.unauthenticated.len() > self.unauthenticated_max {
            if !state.evict_oldest(may_be_evicted) {
                return false;
            }
            state.warn_of_evictions(self.unauthenticated_max, now);
        }
        true
    }

    /// Evicts one unauthenticated connection of any age, because the system has no descriptor left. Returns
    /// `false` if no connection can be evicted.
    pub(crate) fn evict_one(&self) -> bool {
        self.lock().evict_oldest(|_| true)
    }

    pub(crate) fn counts(&self) -> ConnectionCounts {
        let state = self.lock();
        let mut counts = ConnectionCounts {
            unauthenticated: state.unauthenticated.len(),
            evictions: state.evictions,
            ..ConnectionCounts::default()
        };
        for (kind, slots) in &state.proven {
            match kind {
                CallerKind::Operator => counts.operators += slots.len(),
                CallerKind::Team(_) => counts.teams += slots.len(),
                CallerKind::Hub(_) => counts.hubs += slots.len(),
                CallerKind::Rank(_) => counts.ranks += slots.len(),
            }
        }
        counts
    }

    /// Returns whether no connection is left.
    pub(crate) fn are_empty(&self) -> bool {
        let state = self.lock();
        state.unauthenticated.is_empty() && state.proven.is_empty()
    }

    /// Takes the lock, even if it is poisoned: a panic under the lock leaves no half-made change.
    fn lock(&self) -> MutexGuard<'_, SlotsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Marks that the manager begins to serve the connection. From now on its age counts.
    pub(crate) fn begin_service(&self) {
        if let Some(me) = self.slots.lock().unauthenticated.get_mut(&self.number) {
            me.served_since = Some(Instant::now());
        }
    }

    /// Gives a caller that showed the admin token an operator slot.
    pub(crate) fn prove_operator(&self) -> Result<(), Refusal> {
        self.prove(CallerKind::Operator, |state| {
            if state.count(&CallerKind::Operator) < OPERATOR_SLOTS {
                return Ok(());
            }
            Err(no_room(format!("{OPERATOR_SLOTS} operators' calls are being answered: try again")))
        })
    }

    /// Gives a caller that showed a token of this team one of the team's slots.
    pub(crate) fn prove_team(&self, team: &str) -> Result<(), Refusal> {
        let kind = CallerKind::Team(team.into());
        self.prove(kind.clone(), |state| {
            if state.count(&kind) >= TEAM_SLOTS {
                return Err(no_room(format!(
                    "{TEAM_SLOTS} calls of team `{team}` are being answered: try again"
                )));
            }
            let of_teams = state.proven.iter().filter(|(kind, _)| matches!(kind, CallerKind::Team(_)));
            if of_teams.map(|(_, slots)| slots.len()).sum::<usize>() >= ALL_TEAMS_SLOTS {
                return Err(no_room(format!(
                    "{ALL_TEAMS_SLOTS} calls of teams are being answered: try again"
                )));
            }
            Ok(())
        })
    }

    /// Gives a hub that showed its token one of the hub's slots. If all are taken, the hub's oldest
    /// connection is evicted.
    pub(crate) fn prove_hub(&self, hub: u32) -> Result<(), Refusal> {
        self.prove(CallerKind::Hub(hub), |state| {
            state.keep_newest(&CallerKind::Hub(hub), HUB_SLOTS - 1);
            Ok(())
        })
    }

    /// Gives a rank that proved its job's nonce one of the job's slots. If all are taken, the job's oldest
    /// connection is evicted. The ranks of a job that `gathers` wait for one another, so a slot is reserved
    /// for each of its `workers`, or the job is refused.
    pub(crate) fn prove_rank(&self, job: Namespace, workers: u32, gathers: bool) -> Result<(), Refusal> {
        let (workers, ranks_max) = (workers as usize, self.slots.ranks_max);
        self.prove(CallerKind::Rank(job), |state| {
            if gathers && !state.reserved.contains_key(&job) {
                let reserved: usize = state.reserved.values().sum();
                if workers > ranks_max {
                    return Err(no_room(format!(
                        "the {workers} ranks of this job wait for one another at the connection manager, which has places for \
                         {ranks_max}: raise its limit of open files (ulimit -n, or LimitNOFILE= of its systemd unit)"
                    )));
                }
                if reserved + workers > ranks_max {
                    return Err(no_room(format!(
                        "jobs with {reserved} ranks wait at the connection manager, which has places for {ranks_max}: the \
                         {workers} of this job can come when others have begun"
                    )));
                }
                state.reserved.insert(job, workers);
            }
            state.keep_newest(&CallerKind::Rank(job), 2 * workers + JOB_SPARE - 1);
            Ok(())
        })
    }

    /// Counts bytes that the manager keeps for this connection while it is unauthenticated. While the
    /// unauthenticated connections together have too many bytes, the one with the most is evicted, but not
    /// this one.
    pub(crate) fn count_bytes(&self, bytes: usize) -> Result<(), Refusal> {
        if self.is_proven() {
            return Ok(());
        }
        let mut state = self.slots.lock();
        let Some(me) = state.unauthenticated.get_mut(&self.number) else {
            return if self.is_proven() { Ok(()) } else { Err(evicted_refusal()) };
        };
        me.bytes += bytes;
        state.bytes += bytes;
        while state.bytes > UNAUTHENTICATED_BYTES_MAX {
            let others = state.unauthenticated.iter().filter(|(number, _)| **number != self.number);
            let holders = others.filter(|(_, connection)| connection.bytes > 0 && !connection.busy);
            // If no other connection can be evicted, this one keeps its bytes: they are at most a request or
            // an answer.
            let Some((&most, _)) = holders.max_by_key(|(_, connection)| connection.bytes) else { break };
            state.evict(most);
        }
        Ok(())
    }

    /// Marks the request as complete: the connection is not evicted while the manager works on it.
    pub(crate) fn complete_request(&self) {
        self.set_busy(true);
    }

    /// Marks the answer, of this many bytes, as being sent. From now on an unauthenticated connection may be
    /// evicted again, since its peer may never read the answer.
    pub(crate) fn begin_answer(&self, bytes: usize) {
        self.answering.store(true, Ordering::Release);
        self.set_busy(false);
        // The only error is that the connection has been evicted. It ends in any case.
        let _ = self.count_bytes(bytes);
    }

    /// Returns whether the caller has proved anything.
    pub(crate) fn is_proven(&self) -> bool {
        self.proven.load(Ordering::Acquire)
    }

    /// Returns whether bytes of an answer may have been sent.
    pub(crate) fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Acquire)
    }

    /// Waits until the connection is evicted.
    pub(crate) async fn evicted(&self) {
        self.evicted.notified().await;
    }

    /// Sets `busy` if the connection is unauthenticated.
    fn set_busy(&self, busy: bool) {
        if let Some(me) = self.slots.lock().unauthenticated.get_mut(&self.number) {
            me.busy = busy;
        }
    }

    /// Moves the connection from its unauthenticated slot to one of this kind, or fails as `admit` does. A
    /// connection whose caller has proved something before keeps the slot that it has.
    fn prove(
        &self,
        kind: CallerKind,
        admit: impl FnOnce(&mut SlotsState) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut mine = self.kind.lock().unwrap_or_else(PoisonError::into_inner);
        if mine.is_some() {
            return Ok(());
        }
        let mut state = self.slots.lock();
        if !state.unauthenticated.contains_key(&self.number) {
            return Err(evicted_refusal());
        }
        admit(&mut state)?;
        state.remove_unauthenticated(self.number);
        state.proven.entry(kind.clone()).or_default().insert(self.number, self.evicted.clone());
        *mine = Some(kind);
        self.proven.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let kind = self.kind.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let mut state = self.slots.lock();
        let Some(kind) = kind else {
            state.remove_unauthenticated(self.number);
            return;
        };
        let Some(slots) = state.proven.get_mut(&kind) else { return };
        slots.remove(&self.number);
        if slots.is_empty() {
            state.proven.remove(&kind);
            if let CallerKind::Rank(job) = kind {
                state.reserved.remove(&job);
            }
        }
    }
}

impl SlotsState {
    fn count(&self, kind: &CallerKind) -> usize {
        self.proven.get(kind).map_or(0, BTreeMap::len)
    }

    /// Evicts the oldest connections of a proven kind, so that at most `most` are left.
    fn keep_newest(&mut self, kind: &CallerKind, most: usize) {
        let Some(slots) = self.proven.get_mut(kind) else { return };
        while slots.len() > most {
            let Some((_, evicted)) = slots.pop_first() else { return };
            evicted.notify_one();
        }
    }

    /// Evicts an unauthenticated connection that `may_be_evicted` and whose request the manager does not work on:
    /// the oldest of the address with the most of them, and of no other address while that one's may all not be
    /// evicted, since its own newer connections would drive the others out. Returns `false` if there is none.
    fn evict_oldest(&mut self, may_be_evicted: impl Fn(&UnauthenticatedConnection) -> bool) -> bool {
        let may_be_evicted = |number: &&u64| {
            let connection = &self.unauthenticated[*number];
            !connection.busy && may_be_evicted(connection)
        };
        let most = self.by_peer.values().map(BTreeSet::len).max();
        let busiest = self.by_peer.values().filter(|numbers| Some(numbers.len()) == most);
        let oldest = busiest.filter_map(|numbers| numbers.iter().find(may_be_evicted)).min().copied();
        if let Some(oldest) = oldest {
            self.evict(oldest);
        }
        oldest.is_some()
    }

    fn evict(&mut self, number: u64) {
        if let Some(connection) = self.remove_unauthenticated(number) {
            self.evictions += 1;
            connection.evicted.notify_one();
        }
    }

    fn remove_unauthenticated(&mut self, number: u64) -> Option<UnauthenticatedConnection> {
        let connection = self.unauthenticated.remove(&number)?;
        self.bytes -= connection.bytes;
        if let Some(numbers) = self.by_peer.get_mut(&connection.peer) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_peer.remove(&connection.peer);
            }
        }
        Some(connection)
    }

    /// Logs that unauthenticated connections are evicted: at the first eviction, and then at most once in
    /// every [`EVICTION_WARNING_INTERVAL`].
    fn warn_of_evictions(&mut self, unauthenticated_max: usize, now: Instant) {
        let evictions_logged = match self.last_warning {
            Some((at, _)) if now.saturating_duration_since(at) < EVICTION_WARNING_INTERVAL => return,
            Some((_, evictions)) => evictions,
            None => 0,
        };
        self.last_warning = Some((now, self.evictions));
        let most = self.by_peer.iter().max_by_key(|(_, numbers)| numbers.len());
        let Some((peer, numbers)) = most else { return };
        tracing::warn!(
            "all {unauthenticated_max} places for callers who have proved nothing are taken, {} of them by {peer}: {} such \
             callers were turned away to make room for newer ones; hubs, jobs and operators with a token are not affected",
            numbers.len(),
            self.evictions - evictions_logged
        );
    }
}

/// The refusal of a call for which the manager has no room now. The call has had no effect, so the caller may
/// try again.
pub(crate) fn no_room(message: String) -> Refusal {
    Refusal::with_status(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Internal, message)
}

fn evicted_refusal() -> Refusal {
    no_room("this call had to make room for others at the connection manager: try again".into())
}

/// The address under which a caller's connections are counted. For IPv6 it is the /64 network, because a host
/// can have any number of addresses in its network.
fn counted_as(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests;
