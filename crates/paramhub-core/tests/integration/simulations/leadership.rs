//! Several managers and the store that gives one of them the lead, under every order, delay, loss and repetition of their
//! messages, with clocks of different speeds and managers that are frozen for any time. Two managers must never both
//! think that they lead.

use std::time::Duration;

use paramhub_core::leadership::{Leadership, Term};
use proptest::prelude::*;

const LEASE: Duration = Duration::from_secs(3);
const MANAGERS: usize = 3;
/// How fast each manager's clock goes, in percent of the store's.
const SPEEDS: std::ops::RangeInclusive<u32> = 84..=125;

#[derive(Clone, Debug)]
enum Action {
    /// Time passes. A manager that is asked nothing meanwhile is frozen, for all that the others know.
    Wait { ms: u64 },
    /// A manager asks for the lead or, if it leads, for a renewal.
    Ask { manager: usize },
    /// A manager gives the lead up, and tells the store.
    GiveUp { manager: usize },
    /// A request reaches the store, perhaps for the second time. Those that never do are lost.
    Arrive { request: usize },
    /// An answer reaches its manager.
    Answer { answer: usize },
    /// The store ends the lease although it has not run out yet, as its operator may.
    Revoke,
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Lead { manager: usize, asked: Duration },
    Renew { manager: usize, term: Term, asked: Duration },
    End { term: Term },
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Won { manager: usize, term: Term, asked: Duration },
    Renewed { manager: usize, term: Term, asked: Duration },
    NoLease { manager: usize, term: Term },
}

struct Simulation {
    now: Duration,
    speeds: Vec<u32>,
    managers: Vec<(Leadership, Term)>,
    /// The term that the store has given, and when it was last renewed.
    held: Option<(Term, Duration)>,
    terms: i64,
    requests: Vec<Request>,
    answers: Vec<Answer>,
    has_led: usize,
}

impl Simulation {
    fn new(speeds: Vec<u32>) -> Simulation {
        let managers = vec![(Leadership::default(), Term(0)); speeds.len()];
        let (requests, answers) = (Vec::new(), Vec::new());
        Simulation {
            now: Duration::ZERO,
            speeds,
            managers,
            held: None,
            terms: 0,
            requests,
            answers,
            has_led: 0,
        }
    }

    /// A manager's own clock. Each began to count at another moment.
    fn clock(&self, manager: usize) -> Duration {
        self.now * self.speeds[manager] / 100 + Duration::from_secs(1000 * manager as u64)
    }

    fn leads(&self, manager: usize) -> bool {
        let (leadership, term) = self.managers[manager];
        leadership.leads(term, self.clock(manager))
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Wait { ms } => self.now += Duration::from_millis(ms),
            Action::Ask { manager } => {
                let (term, asked) = (self.managers[manager].1, self.clock(manager));
                self.requests.push(match self.leads(manager) {
                    true => Request::Renew { manager, term, asked },
                    false => Request::Lead { manager, asked },
                });
            }
            Action::GiveUp { manager } => {
                let (leadership, term) = &mut self.managers[manager];
                leadership.ended(*term);
                self.requests.push(Request::End { term: *term });
            }
            Action::Arrive { request } if !self.requests.is_empty() => {
                self.arrive(self.requests[request % self.requests.len()]);
            }
            Action::Answer { answer } if !self.answers.is_empty() => {
                let answer = self.answers.swap_remove(answer % self.answers.len());
                self.answered(answer);
            }
            Action::Revoke => self.held = None,
            Action::Arrive { .. } | Action::Answer { .. } => {}
        }
        let leaders: Vec<usize> = (0..MANAGERS).filter(|&manager| self.leads(manager)).collect();
        assert!(leaders.len() <= 1, "managers {leaders:?} lead at {:?}", self.now);
        self.has_led += leaders.len();
    }

    /// The store handles a request. It ends a lease as soon as it may.
    fn arrive(&mut self, request: Request) {
        self.held = self.held.filter(|(_, renewed)| self.now < *renewed + LEASE);
        match request {
            Request::Lead { manager, asked } if self.held.is_none() => {
                self.terms += 1;
                self.held = Some((Term(self.terms), self.now));
                self.answers.push(Answer::Won { manager, term: Term(self.terms), asked });
            }
            Request::Lead { .. } => {}
            Request::Renew { manager, term, asked } => match &mut self.held {
                Some((held, renewed)) if *held == term => {
                    *renewed = self.now;
                    self.answers.push(Answer::Renewed { manager, term, asked });
                }
                _ => self.answers.push(Answer::NoLease { manager, term }),
            },
            Request::End { term } => self.held = self.held.filter(|(held, _)| *held != term),
        }
    }

    fn answered(&mut self, answer: Answer) {
        match answer {
            Answer::Won { manager, term, asked } => {
                let now = self.clock(manager);
                let (leadership, current) = &mut self.managers[manager];
                // A claim that the manager had given up hope of may be answered while it leads by another.
                if !leadership.leads(*current, now) && leadership.won(term, LEASE, asked, now) {
                    *current = term;
                }
            }
            Answer::Renewed { manager, term, asked } => {
                let now = self.clock(manager);
                self.managers[manager].0.renewed(term, asked, now);
            }
            Answer::NoLease { manager, term } => self.managers[manager].0.ended(term),
        }
    }
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (0..1500u64).prop_map(|ms| Action::Wait { ms }),
        1 => (2000..6000u64).prop_map(|ms| Action::Wait { ms }),
        6 => (0..MANAGERS).prop_map(|manager| Action::Ask { manager }),
        1 => (0..MANAGERS).prop_map(|manager| Action::GiveUp { manager }),
        7 => (0..64usize).prop_map(|request| Action::Arrive { request }),
        7 => (0..64usize).prop_map(|answer| Action::Answer { answer }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn two_managers_never_both_think_that_they_lead(
        speeds in prop::collection::vec(SPEEDS, MANAGERS),
        actions in prop::collection::vec(action(), 1..160),
    ) {
        let mut simulation = Simulation::new(speeds);
        actions.iter().for_each(|action| simulation.act(action));
    }
}

/// The simulation must be able to fail: a lease that its store ends too early is one that two managers can have.
#[test]
#[should_panic(expected = "managers [0, 1] lead")]
fn a_store_that_breaks_its_word_is_noticed() {
    let mut simulation = Simulation::new(vec![100; MANAGERS]);
    for manager in [0, 1] {
        simulation.act(&Action::Ask { manager });
        simulation.act(&Action::Arrive { request: manager });
        simulation.act(&Action::Answer { answer: 0 });
        simulation.act(&Action::Revoke);
    }
}

/// Without messages that are late, one manager leads all the time, and another after it.
#[test]
fn a_leader_that_renews_leads_on_and_is_followed_when_it_is_gone() {
    let mut simulation = Simulation::new(vec![100, 90, 110]);
    let exchange = |simulation: &mut Simulation, manager: usize| {
        simulation.act(&Action::Ask { manager });
        let request = simulation.requests.len() - 1;
        simulation.act(&Action::Arrive { request });
        simulation.act(&Action::Answer { answer: 0 });
    };
    for _ in 0..100 {
        exchange(&mut simulation, 0);
        exchange(&mut simulation, 1);
        assert!(simulation.leads(0) && !simulation.leads(1));
        simulation.act(&Action::Wait { ms: 1000 });
    }
    simulation.act(&Action::Wait { ms: 2000 });
    exchange(&mut simulation, 1);
    assert!(simulation.leads(1) && simulation.has_led > 300);
}
