//! How long a connection manager may act as the leader of several that share one store.
//!
//! The store gives a lease to one manager at a time. The lease ends when the store has not been asked to renew it for as
//! long as it lasts, and then another manager may get it. The leader does not know when the store took its last renewal,
//! only that it was not before the leader asked for it. So it leads for a part of the lease that begins at the moment before
//! it asked, and the rest of the lease makes up for clocks of different speeds. A leader that was frozen finds, at the first
//! look at its clock, that it does not lead any more.
//!
//! Times are passed in, as durations since any fixed moment of the manager's own. Their clock must go on while the
//! machine sleeps.

use std::time::Duration;

/// A leader acts for the lease less one part in so many. Its clock may be slower than the store's by that part.
const SPARE_PART: u32 = 6;
/// A lease is renewed so many times while it lasts.
const RENEWALS_IN_LEASE: u32 = 3;
/// The pause before a renewal that was not answered is asked for again, as a part of the lease.
const REPEATS_IN_LEASE: u32 = 12;

/// One time during which a manager leads. The store gives each its own number, which no earlier one had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term(pub i64);

/// What a manager knows of its own leadership.
#[derive(Clone, Copy, Debug, Default)]
pub struct Leadership {
    reign: Option<Reign>,
}

/// A term that this manager has won.
#[derive(Clone, Copy, Debug)]
struct Reign {
    term: Term,
    lease: Duration,
    /// The moment from which on this manager must not act as leader.
    until: Duration,
    /// The moment at which the lease should be renewed.
    renew_at: Duration,
}

impl Leadership {
    /// The store has given this manager a term, with a lease that it asked for at the moment `asked`. Returns whether the
    /// manager leads: not if the answer has come too late.
    pub fn won(&mut self, term: Term, lease: Duration, asked: Duration, now: Duration) -> bool {
        let mut reign = Reign { term, lease, until: Duration::ZERO, renew_at: Duration::ZERO };
        reign.count_from(asked);
        self.reign = Some(reign);
        self.leads(term, now)
    }

    /// The store has renewed the lease of a term, as it was asked to at the moment `asked`. A term that has run out for this
    /// manager is over, even if the store would have let it go on: the manager's state of it is gone.
    pub fn renewed(&mut self, term: Term, asked: Duration, now: Duration) {
        if self.leads(term, now)
            && let Some(reign) = &mut self.reign
        {
            reign.count_from(asked);
        }
    }

    /// The store has not answered: a renewal is due again soon.
    pub fn not_renewed(&mut self, term: Term, now: Duration) {
        if let Some(reign) = self.reign.as_mut().filter(|reign| reign.term == term) {
            reign.renew_at = now + reign.lease / REPEATS_IN_LEASE;
        }
    }

    /// The term is over: the store says so, or the manager gives it up.
    pub fn ended(&mut self, term: Term) {
        self.reign = self.reign.filter(|reign| reign.term != term);
    }

    /// Whether this manager leads now, in this term.
    pub fn leads(&self, term: Term, now: Duration) -> bool {
        self.until(term).is_some_and(|until| now < until)
    }

    /// The moment at which this manager stops leading unless the lease is renewed; `None` if the term is over.
    pub fn until(&self, term: Term) -> Option<Duration> {
        self.of(term).map(|reign| reign.until)
    }

    /// The moment at which the lease is to be renewed; `None` if the term is over.
    pub fn renew_at(&self, term: Term) -> Option<Duration> {
        self.of(term).map(|reign| reign.renew_at)
    }

    fn of(&self, term: Term) -> Option<&Reign> {
        self.reign.as_ref().filter(|reign| reign.term == term)
    }
}

impl Reign {
    /// Counts from a moment at which the store was asked. An answer that was overtaken by a newer one shortens nothing.
    fn count_from(&mut self, asked: Duration) {
        self.until = self.until.max(asked + self.lease - self.lease / SPARE_PART);
        self.renew_at = self.renew_at.max(asked + self.lease / RENEWALS_IN_LEASE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);
    const FIRST: Term = Term(7);

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_leader_leads_for_less_than_its_lease_counted_from_before_it_asked() {
        let mut leadership = Leadership::default();
        assert!(leadership.won(FIRST, LEASE, at(1000), at(1400)));
        assert_eq!(leadership.until(FIRST), Some(at(3500)));
        assert_eq!(leadership.renew_at(FIRST), Some(at(2000)));
        leadership.renewed(FIRST, at(2000), at(2900));
        leadership.renewed(FIRST, at(1500), at(3000));
        assert!(leadership.leads(FIRST, at(4499)), "an older answer shortens nothing");
        assert!(!leadership.leads(FIRST, at(4500)));
        assert!(!leadership.leads(Term(8), at(3000)), "another term is not this one");
    }

    #[test]
    fn an_answer_that_comes_too_late_wins_and_renews_nothing() {
        let mut leadership = Leadership::default();
        assert!(!leadership.won(FIRST, LEASE, at(0), at(2500)));
        assert!(leadership.won(FIRST, LEASE, at(0), at(2499)));
        leadership.renewed(FIRST, at(2400), at(2500));
        assert!(!leadership.leads(FIRST, at(2500)), "its state is gone");
    }

    #[test]
    fn a_term_ends_when_it_is_given_up_and_only_then_the_next_counts() {
        let mut leadership = Leadership::default();
        leadership.won(FIRST, LEASE, at(0), at(0));
        leadership.ended(Term(6));
        assert!(leadership.leads(FIRST, at(1)));
        leadership.ended(FIRST);
        leadership.renewed(FIRST, at(1), at(2));
        assert_eq!((leadership.until(FIRST), leadership.renew_at(FIRST)), (None, None));
        assert!(leadership.won(Term(9), LEASE, at(5), at(6)));
        assert!(leadership.leads(Term(9), at(7)) && !leadership.leads(FIRST, at(7)));
    }

    #[test]
    fn a_renewal_without_an_answer_is_due_again_several_times_before_the_end() {
        let mut leadership = Leadership::default();
        leadership.won(FIRST, LEASE, at(0), at(0));
        leadership.not_renewed(FIRST, at(1000));
        assert_eq!(leadership.renew_at(FIRST), Some(at(1250)));
        assert_eq!(leadership.until(FIRST), Some(at(2500)));
    }
}
