//! Who may hold a connection to the manager: a place for each, by what its caller has proved.
//!
//! Every connection begins among the strangers, who are few and have to make room for newer ones. A caller who proves
//! something, a token or a job's nonce, gets a place of its kind, which no stranger can take.

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

/// Places of one hub: a poll, a report, and connections that broke without the manager's knowing.
const HUB_PLACES: usize = 8;
/// Places of operators who showed the admin token.
const OPERATOR_PLACES: usize = 256;
/// Places of a job beyond two for each rank.
const JOB_SPARE: usize = 8;
/// Bytes that all strangers together have sent and the manager keeps, and that it has to send them.
const STRANGERS_BYTES_MAX: usize = 4 << 20;
/// A stranger who has just come does not make room yet: its request may be on its way.
const YOUNG: Duration = Duration::from_millis(50);
/// At most one line about strangers who made room in this time.
const TOLD_AGAIN: Duration = Duration::from_secs(60);

/// All places.
pub(crate) struct Places {
    strangers_max: usize,
    ranks_max: usize,
    state: Mutex<State>,
}

/// How many connections there are, for counting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) strangers: usize,
    pub(crate) hubs: usize,
    pub(crate) ranks: usize,
    pub(crate) operators: usize,
    /// Strangers who had to make room since the manager started.
    pub(crate) made_room: u64,
}

/// What a caller has proved to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Operator,
    Hub(u32),
    /// A rank of this job.
    Rank(Namespace),
}

/// One connection's place, for as long as it lives.
pub(crate) struct Guest {
    places: Arc<Places>,
    number: u64,
    /// As which it is counted, once it has proved something.
    kind: Mutex<Option<Kind>>,
    proven: AtomicBool,
    answering: AtomicBool,
    must_go: Arc<Notify>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By number, so that the oldest comes first.
    strangers: BTreeMap<u64, Stranger>,
    by_peer: HashMap<IpAddr, BTreeSet<u64>>,
    bytes: usize,
    /// Each kind's connections, the oldest first.
    proven: HashMap<Kind, BTreeMap<u64, Arc<Notify>>>,
    /// How many of the ranks' places are kept for each job whose ranks gather.
    reserved: HashMap<Namespace, usize>,
    made_room: u64,
    told: Option<(Instant, u64)>,
}

struct Stranger {
    peer: IpAddr,
    since: Instant,
    bytes: usize,
    /// Its request is complete and being answered: it is not its turn to make room.
    busy: bool,
    must_go: Arc<Notify>,
}

impl Places {
    pub(crate) fn new(strangers_max: usize, ranks_max: usize) -> Arc<Self> {
        Arc::new(Places { strangers_max, ranks_max, state: Mutex::default() })
    }

    /// A place among the strangers for a connection that was just accepted.
    pub(crate) fn enter(self: &Arc<Self>, peer: IpAddr) -> Guest {
        let peer = counted_as(peer);
        let must_go = Arc::new(Notify::new());
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        let since = Instant::now();
        state.by_peer.entry(peer).or_default().insert(number);
        state
            .strangers
            .insert(number, Stranger { peer, since, bytes: 0, busy: false, must_go: must_go.clone() });
        Guest {
            places: self.clone(),
            number,
            kind: Mutex::new(None),
            proven: AtomicBool::new(false),
            answering: AtomicBool::new(false),
            must_go,
        }
    }

    /// Turns strangers away until no more are left than there are places: of the address with most of them the oldest. False
    /// where all who are left have only just come or are being answered.
    pub(crate) fn make_room(&self) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        while state.strangers.len() > self.strangers_max {
            if !state.turn_one_away(now) {
                return false;
            }
            state.tell(self.strangers_max, now);
        }
        true
    }

    /// Turns one stranger away, of whatever age, because the system has no descriptor left. False where there is none.
    pub(crate) fn free_one(&self) -> bool {
        let mut state = self.lock();
        let distant = Instant::now() + YOUNG;
        state.turn_one_away(distant)
    }

    pub(crate) fn taken(&self) -> Taken {
        let state = self.lock();
        let mut taken =
            Taken { strangers: state.strangers.len(), made_room: state.made_room, ..Taken::default() };
        for (kind, places) in &state.proven {
            match kind {
                Kind::Operator => taken.operators += places.len(),
                Kind::Hub(_) => taken.hubs += places.len(),
                Kind::Rank(_) => taken.ranks += places.len(),
            }
        }
        taken
    }

    /// Whether no connection is left.
    pub(crate) fn are_empty(&self) -> bool {
        let state = self.lock();
        state.strangers.is_empty() && state.proven.is_empty()
    }

    /// What happens under the lock cannot leave it half changed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guest {
    /// Gives a caller who showed the admin token a place among the operators.
    pub(crate) fn prove_operator(&self) -> Result<(), Refusal> {
        self.prove(Kind::Operator, |state| {
            if state.count(Kind::Operator) < OPERATOR_PLACES {
                return Ok(());
            }
            Err(busy(format!("{OPERATOR_PLACES} operators' calls are being answered: try again")))
        })
    }

    /// Gives a hub that showed its token one of its places; its oldest connection makes room.
    pub(crate) fn prove_hub(&self, hub: u32) -> Result<(), Refusal> {
        self.prove(Kind::Hub(hub), |state| {
            state.keep_newest(Kind::Hub(hub), HUB_PLACES - 1);
            Ok(())
        })
    }

    /// Gives a rank that proved its job's nonce one of the job's places; the job's oldest connection makes room. The ranks of
    /// a job that `gathers` wait for one another, so there must be a place for each of its `workers`, or none for any.
    pub(crate) fn prove_rank(&self, job: Namespace, workers: u32, gathers: bool) -> Result<(), Refusal> {
        let (workers, ranks_max) = (workers as usize, self.places.ranks_max);
        self.prove(Kind::Rank(job), |state| {
            if gathers && !state.reserved.contains_key(&job) {
                let reserved: usize = state.reserved.values().sum();
                if workers > ranks_max {
                    return Err(busy(format!(
                        "the {workers} ranks of this job wait for one another at the connection manager, which has places for \
                         {ranks_max}: raise its limit of open files (ulimit -n, or LimitNOFILE= of its systemd unit)"
                    )));
                }
                if reserved + workers > ranks_max {
                    return Err(busy(format!(
                        "jobs with {reserved} ranks wait at the connection manager, which has places for {ranks_max}: the \
                         {workers} of this job can come when others have begun"
                    )));
                }
                state.reserved.insert(job, workers);
            }
            state.keep_newest(Kind::Rank(job), 2 * workers + JOB_SPARE - 1);
            Ok(())
        })
    }

    /// Counts bytes that are kept for a stranger. Where all strangers have too many, the one with most of the others makes room.
    pub(crate) fn hold(&self, bytes: usize) -> Result<(), Refusal> {
        if self.is_proven() {
            return Ok(());
        }
        let mut state = self.places.lock();
        let Some(me) = state.strangers.get_mut(&self.number) else {
            return if self.is_proven() { Ok(()) } else { Err(made_room()) };
        };
        me.bytes += bytes;
        state.bytes += bytes;
        while state.bytes > STRANGERS_BYTES_MAX {
            let others = state.strangers.iter().filter(|(number, _)| **number != self.number);
            let holders = others.filter(|(_, stranger)| stranger.bytes > 0 && !stranger.busy);
            let Some((&most, _)) = holders.max_by_key(|(_, stranger)| stranger.bytes) else { break };
            state.turn_away(most);
        }
        // One alone may have as much as a request may be long, or an answer.
        Ok(())
    }

    /// The whole request is here, so that it is the manager's turn.
    pub(crate) fn complete(&self) {
        self.set_busy(true);
    }

    /// The answer is on its way, and a stranger who does not take it makes room again.
    pub(crate) fn answer(&self, bytes: usize) {
        self.answering.store(true, Ordering::Release);
        self.set_busy(false);
        // Whom nobody makes room for any more is about to be turned away in any case.
        let _ = self.hold(bytes);
    }

    /// Whether the caller has proved anything.
    pub(crate) fn is_proven(&self) -> bool {
        self.proven.load(Ordering::Acquire)
    }

    /// Whether bytes of an answer may have been sent.
    pub(crate) fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Acquire)
    }

    /// Returns when the connection has to make room.
    pub(crate) async fn must_go(&self) {
        self.must_go.notified().await;
    }

    fn set_busy(&self, busy: bool) {
        if let Some(me) = self.places.lock().strangers.get_mut(&self.number) {
            me.busy = busy;
        }
    }

    fn prove(
        &self,
        kind: Kind,
        admit: impl FnOnce(&mut State) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut mine = self.kind.lock().unwrap_or_else(PoisonError::into_inner);
        if mine.is_some() {
            return Ok(());
        }
        let mut state = self.places.lock();
        if !state.strangers.contains_key(&self.number) {
            return Err(made_room());
        }
        admit(&mut state)?;
        state.forget_stranger(self.number);
        state.proven.entry(kind).or_default().insert(self.number, self.must_go.clone());
        *mine = Some(kind);
        self.proven.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let kind = self.kind.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let mut state = self.places.lock();
        let Some(kind) = kind else {
            state.forget_stranger(self.number);
            return;
        };
        let Some(places) = state.proven.get_mut(&kind) else { return };
        places.remove(&self.number);
        if places.is_empty() {
            state.proven.remove(&kind);
            if let Kind::Rank(job) = kind {
                state.reserved.remove(&job);
            }
        }
    }
}

impl State {
    fn count(&self, kind: Kind) -> usize {
        self.proven.get(&kind).map_or(0, BTreeMap::len)
    }

    fn keep_newest(&mut self, kind: Kind, most: usize) {
        let Some(places) = self.proven.get_mut(&kind) else { return };
        while places.len() > most {
            let Some((_, must_go)) = places.pop_first() else { return };
            must_go.notify_one();
        }
    }

    fn turn_one_away(&mut self, now: Instant) -> bool {
        let ready = |number: &&u64| {
            let stranger = &self.strangers[*number];
            !stranger.busy && now.saturating_duration_since(stranger.since) >= YOUNG
        };
        let oldest = self.by_peer.values().filter_map(|numbers| {
            let oldest = *numbers.iter().find(ready)?;
            Some((numbers.len(), std::cmp::Reverse(oldest)))
        });
        let Some((_, std::cmp::Reverse(oldest))) = oldest.max() else { return false };
        self.turn_away(oldest);
        true
    }

    fn turn_away(&mut self, number: u64) {
        if let Some(stranger) = self.forget_stranger(number) {
            self.made_room += 1;
            stranger.must_go.notify_one();
        }
    }

    fn forget_stranger(&mut self, number: u64) -> Option<Stranger> {
        let stranger = self.strangers.remove(&number)?;
        self.bytes -= stranger.bytes;
        if let Some(numbers) = self.by_peer.get_mut(&stranger.peer) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_peer.remove(&stranger.peer);
            }
        }
        Some(stranger)
    }

    /// Says that strangers make room: when it begins, and then now and then.
    fn tell(&mut self, strangers_max: usize, now: Instant) {
        let counted = match self.told {
            Some((at, _)) if now.saturating_duration_since(at) < TOLD_AGAIN => return,
            Some((_, counted)) => counted,
            None => 0,
        };
        self.told = Some((now, self.made_room));
        let most = self.by_peer.iter().max_by_key(|(_, numbers)| numbers.len());
        let Some((peer, numbers)) = most else { return };
        tracing::warn!(
            "all {strangers_max} places for callers who have proved nothing are taken, {} of them by {peer}: {} such \
             callers were turned away to make room for newer ones; hubs, jobs and operators with a token are not affected",
            numbers.len(),
            self.made_room - counted
        );
    }
}

/// The refusal of what finds no place. Nothing has been done yet, so the caller may try again.
pub(crate) fn busy(message: String) -> Refusal {
    Refusal::with_status(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Internal, message)
}

fn made_room() -> Refusal {
    busy("this call had to make room for others at the connection manager: try again".into())
}

/// An address that one caller has: of IPv6 the network, for a host there has as many addresses as it likes.
fn counted_as(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests;
