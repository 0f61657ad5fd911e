//! Hubs that fall silent: what becomes of their jobs, and what shows that they are gone.

use super::*;
use crate::key::{Key, KeyTable};
use crate::placement::Imbalance;
use crate::scheme::Plan;
use crate::service::{CauseKind, HubEvent, JobEnd, Presence, StopWhen};
use crate::settings::Settings;

/// The hub that falls silent.
const SILENT: u32 = 1;

/// A manager with a job that runs at hubs 0 and 1, at some time.
struct Silence {
    state: Membership,
    seconds: f64,
}

fn settings() -> Arc<Settings> {
    Arc::new(Settings::new(KeyTable::new(vec![Key::new("w", [4])]).unwrap()))
}

/// Lets all ranks of a job hand in their settings, and asks hubs 0 and 1 to allocate.
fn place(state: &mut Membership, namespace: Namespace, now: Now) {
    let workers = state.job(namespace).unwrap().workers;
    for rank in 0..workers {
        let incarnation = Incarnation([rank as u8; 16]);
        let submission = state.submit(namespace, rank, incarnation, &settings(), now, now).unwrap();
        let (Submission::Wait(waiting)
        | Submission::Compare { waiting, .. }
        | Submission::Join { waiting, .. }) = submission;
        assert_eq!(state.agree(waiting.call, now).is_some(), rank + 1 == workers);
    }
    let roster = state.roster(namespace).unwrap();
    let plan = Plan::new(&settings(), &roster.cluster());
    let job = state.job(namespace).unwrap().name.clone();
    let imbalance = Imbalance { hubs: 1.0, interfaces: 1.0, cores: 1.0 };
    let placements = vec![SitePlacement { hash: "hash".into(), imbalance, empty_hubs: Vec::new() }];
    let book = Arc::new(InformationBook { job, roster, plan });
    assert_eq!(state.place(namespace, SettingsSummary::default(), placements, book), [0, 1]);
}

fn allocated(namespace: Namespace) -> HubEvent {
    let (placement_hash, resumed_step) = ("hash".to_owned(), None);
    HubEvent::Allocated {
        namespace,
        placement_hash,
        resumed_step,
        memory_bytes: 1,
        streams: 2,
        further: None,
    }
}

impl Silence {
    fn new() -> (Silence, Namespace) {
        let now = at(0.0);
        let mut state = new(now);
        assert_eq!([1, 2].map(|port| hub_on(&mut state, port, now).unwrap()), [0, 1]);
        let job = job_in(&mut state, "job", &["", ""], Reduction::Auto, now);
        place(&mut state, job, now);
        let mut silence = Silence { state, seconds: 0.0 };
        (0..2).for_each(|hub| silence.report(hub, allocated(job)));
        assert_eq!(silence.state_of(job), JobState::Running);
        (silence, job)
    }

    fn now(&self) -> Now {
        at(self.seconds)
    }

    fn report(&mut self, hub: u32, event: HubEvent) {
        let report = HubReport { events: vec![event], ..HubReport::default() };
        self.state.report(hub, Some("token"), report, at(self.seconds)).unwrap();
    }

    /// Lets time pass, in which all hubs but the silent one call.
    fn wait(&mut self, seconds: f64) {
        let end = self.seconds + seconds;
        while self.seconds < end {
            self.seconds = end.min(self.seconds + 0.25);
            let now = self.now();
            for hub in self.state.hub_statuses(now).iter().filter(|hub| hub.hub != SILENT) {
                self.state.admit_hub(hub.hub, Some("token"), now).unwrap();
            }
            self.state.check_time(now);
        }
    }

    /// Lets time pass until the silent hub is not heard any more.
    fn fall_silent(&mut self) {
        self.wait(10.0);
        assert!(self.is_unheard());
    }

    fn is_unheard(&self) -> bool {
        self.state.hub_statuses(self.now()).iter().any(|hub| hub.hub == SILENT && hub.unheard)
    }

    fn state_of(&self, job: Namespace) -> JobState {
        self.state.job(job).unwrap().state()
    }

    fn message_of(&self, job: Namespace) -> &str {
        self.state.job(job).unwrap().message()
    }

    fn stop(&mut self, job: Namespace, when: StopWhen) -> WaitingCall {
        self.state.stop(job, "stopped: enough".into(), when, at(self.seconds)).unwrap()
    }

    fn rank_lost(&mut self, job: Namespace, rank: u32, address: &str) -> Result<(), ServiceError> {
        let call = LeaveService {
            rank,
            incarnation: Incarnation([rank as u8; 16]),
            proof: Proof([0; 32]),
            reason: "it closed the connection".into(),
            finished: false,
            lost_hub: Some(address.into()),
        };
        self.state.leave(job, &call, at(self.seconds))
    }

    /// The log, and the hubs that were commanded to stop a job.
    fn outputs(&mut self) -> (Vec<LogEvent>, Vec<u32>) {
        let (mut log, mut stopped) = (Vec::new(), Vec::new());
        for output in self.state.take_outputs(at(self.seconds)) {
            match output {
                Output::Log(event) => log.push(event),
                Output::Command { hub, command: HubCommand::Stop { .. }, .. } => stopped.push(hub),
                _ => {}
            }
        }
        (log, stopped)
    }

    /// How a call was answered, if it was since the last outputs.
    fn answer(&mut self, waiting: WaitingCall) -> Option<Result<JobState, String>> {
        self.state.take_outputs(at(self.seconds)).into_iter().find_map(|output| match output {
            Output::Answer { call, answer: Answer::Stopped(answer), .. } if call == waiting.call => {
                Some(answer.map(|status| status.state).map_err(|refused| refused.message))
            }
            _ => None,
        })
    }
}

fn ended(job: Namespace, reason: &str, cause: CauseKind) -> HubEvent {
    HubEvent::Ended(JobEnd::failed(job, reason.into(), cause))
}

fn finished(job: Namespace) -> HubEvent {
    HubEvent::Ended(JobEnd::finished(job))
}

#[test]
fn a_job_goes_on_while_its_hub_is_silent_and_when_it_is_heard_again() {
    let (mut silence, job) = Silence::new();
    silence.wait(9.75);
    assert!(!silence.is_unheard());
    let _ = silence.outputs();
    silence.wait(0.25);
    assert!(silence.is_unheard());
    silence.wait(600.0);
    assert_eq!(silence.state_of(job), JobState::Running);
    let notice =
        "hub 1 (127.0.0.1:2) has not been heard for 10 s; the job goes on while its workers reach it";
    assert_eq!(silence.message_of(job), notice);
    let (log, stopped) = silence.outputs();
    let [LogEvent::HubUnheard { message }] = &log[..] else { panic!("one line, not {log:?}") };
    let begins =
        "hub 1 (127.0.0.1:2) has not been heard for 10 s: it gets no new jobs, and running ones go on (1)";
    assert!(message.starts_with(begins) && message.contains("--hub-dead-after"), "{message}");
    assert!(stopped.is_empty());

    let now = silence.now();
    silence.state.admit_hub(SILENT, Some("token"), now).unwrap();
    assert!(!silence.is_unheard());
    let message = "hub 1 (127.0.0.1:2) is heard again, after 610 s".to_owned();
    assert_eq!(silence.message_of(job), message);
    assert_eq!(silence.outputs(), (vec![LogEvent::HubHeardAgain { message }], vec![]));
    (0..2).for_each(|hub| silence.report(hub, finished(job)));
    assert_eq!(silence.state_of(job), JobState::Finished);
}

#[test]
fn a_hub_that_is_not_heard_gets_no_jobs_and_those_that_open_there_fail() {
    let (mut silence, _) = Silence::new();
    let now = silence.now();
    let opens = job_in(&mut silence.state, "opens", &[""], Reduction::Auto, now);
    place(&mut silence.state, opens, now);
    silence.report(0, allocated(opens));
    silence.fall_silent();
    assert_eq!(silence.state_of(opens), JobState::Failed);
    let message = silence.message_of(opens);
    let begins = "hub 1 (127.0.0.1:2) has not been heard for 10 s. Look at its machine";
    assert!(message.starts_with(begins), "{message}");
    assert_eq!(silence.outputs().1, [0, 1], "the silent hub stops it when it calls");
    let hubs = |silence: &Silence, job| silence.state.job(job).unwrap().hubs().collect::<Vec<_>>();
    let now = silence.now();
    let later = job_in(&mut silence.state, "later", &[""], Reduction::Auto, now);
    assert_eq!(hubs(&silence, later), [0]);
    silence.state.admit_hub(SILENT, Some("token"), now).unwrap();
    let whole = job_in(&mut silence.state, "whole", &[""], Reduction::Auto, now);
    assert_eq!(hubs(&silence, whole), [0, 1]);
}

/// What happens, and how the message of the job begins if the job ends by it.
type Case = (&'static str, fn(&mut Silence, Namespace), Option<&'static str>);

#[test]
fn a_job_of_a_silent_hub_ends_when_something_shows_that_the_hub_is_gone() {
    const UNHEARD: &str = "hub 1 (127.0.0.1:2) has not been heard for 10 s. Look at";
    const LOST: &str =
        "rank 1 lost hub 1 (127.0.0.1:2), which the connection manager does not hear either: it closed";
    const REPLACED: &str = "hub 1 (127.0.0.1:2) was lost: another hub has joined at its address";
    const LONG: &str = "hub 1 (127.0.0.1:2) was lost: it has not been heard for 3600 s. Look at";
    let cases: [Case; 11] = [
        ("nothing", |_, _| {}, None),
        (
            "its workers have ended",
            |silence, job| {
                silence.stop(job, StopWhen::WorkersEnded);
                silence.wait(9.75);
                assert_eq!(silence.state_of(job), JobState::Running, "the hub may still say how it ended");
            },
            Some(UNHEARD),
        ),
        (
            "its workers are about to end",
            |silence, job| {
                silence.stop(job, StopWhen::WorkersEnding);
            },
            None,
        ),
        (
            "another hub reports the end",
            |silence, job| silence.report(0, ended(job, "rank 0 was lost", CauseKind::PeerLost)),
            Some("rank 0 was lost"),
        ),
        (
            "its workers have left another hub, which may have no chunks",
            |silence, job| silence.report(0, finished(job)),
            None,
        ),
        (
            "another hub joins at its address",
            |silence, _| {
                let now = silence.now();
                assert_eq!(hub_on(&mut silence.state, 2, now).unwrap(), 2);
            },
            Some(REPLACED),
        ),
        ("a rank has lost it", |silence, job| silence.rank_lost(job, 1, "127.0.0.1:2").unwrap(), Some(LOST)),
        (
            "a rank has lost the other hub, which calls",
            |silence, job| silence.rank_lost(job, 1, "127.0.0.1:1").unwrap(),
            None,
        ),
        (
            "a rank names a hub that is not the job's",
            |silence, job| {
                let refused = silence.rank_lost(job, 1, "127.0.0.1:3").unwrap_err();
                assert_eq!(refused.code, ErrorCode::BadRequest);
            },
            None,
        ),
        ("almost an hour passes", |silence, _| silence.wait(3584.0), None),
        ("an hour passes", |silence, _| silence.wait(3586.0), Some(LONG)),
    ];
    for (case, happens, ends) in cases {
        let (mut silence, job) = Silence::new();
        silence.fall_silent();
        happens(&mut silence, job);
        silence.wait(5.0);
        let state = if ends.is_some() { JobState::Failed } else { JobState::Running };
        let message = silence.message_of(job);
        assert_eq!(silence.state_of(job), state, "{case}: {message}");
        assert!(ends.is_none_or(|ends| message.starts_with(ends)), "{case}: {message}");
    }
}

#[test]
fn a_rank_that_loses_a_hub_ends_its_job_unless_the_hub_calls() {
    // The hub has died.
    let (mut silence, job) = Silence::new();
    silence.wait(1.0);
    silence.rank_lost(job, 0, "127.0.0.1:2").unwrap();
    silence.wait(2.75);
    assert_eq!(silence.state_of(job), JobState::Running);
    silence.wait(0.5);
    assert_eq!(silence.state_of(job), JobState::Failed);
    let message = silence.message_of(job);
    assert!(
        message.starts_with("rank 0 lost hub 1 (127.0.0.1:2), which the connection manager"),
        "{message}"
    );
    assert_eq!(silence.outputs().1, [0, 1]);
    // It was only cut off, and knows better what has happened.
    silence.report(SILENT, ended(job, "core 0 of its hub panicked", CauseKind::Known));
    assert_eq!(silence.message_of(job), "core 0 of its hub panicked");

    // The hub has died, and the manager read its last call after the rank's report.
    let (mut silence, job) = Silence::new();
    silence.rank_lost(job, 0, "127.0.0.1:2").unwrap();
    silence.wait(0.25);
    let now = silence.now();
    silence.state.admit_hub(SILENT, Some("token"), now).unwrap();
    silence.wait(0.25);
    assert_eq!(silence.state_of(job), JobState::Running);
    let now = silence.now();
    silence.state.hub_hung_up(SILENT, now);
    assert_eq!(silence.state_of(job), JobState::Failed);

    // Only the rank's way to the hub is cut: the hub itself reports how the job ends.
    let (mut silence, job) = Silence::new();
    silence.rank_lost(job, 0, "127.0.0.1:2").unwrap();
    silence.wait(2.0);
    let now = silence.now();
    silence.state.admit_hub(SILENT, Some("token"), now).unwrap();
    silence.wait(30.0);
    assert!(silence.is_unheard() && silence.state_of(job) == JobState::Running);
}

#[test]
fn only_its_own_ranks_say_of_a_running_job_that_a_hub_is_lost() {
    let (mut silence, job) = Silence::new();
    silence.fall_silent();
    let stranger = LeaveService {
        rank: 0,
        incarnation: Incarnation([9; 16]),
        proof: Proof([0; 32]),
        reason: String::new(),
        finished: false,
        lost_hub: Some("127.0.0.1:2".into()),
    };
    let now = silence.now();
    assert_eq!(silence.state.leave(job, &stranger, now).unwrap_err().code, ErrorCode::RankTaken);
    silence.wait(5.0);
    assert_eq!(silence.state_of(job), JobState::Running);
    silence.stop(job, StopWhen::Now);
    silence.rank_lost(job, 0, "127.0.0.1:2").unwrap();
    silence.wait(5.0);
    assert_eq!(silence.message_of(job), "stopped: enough");
}

#[test]
fn a_stop_ends_the_job_of_a_silent_hub_which_frees_it_when_it_calls() {
    let (mut silence, job) = Silence::new();
    silence.fall_silent();
    let stop = silence.stop(job, StopWhen::Now);
    assert_eq!(silence.state_of(job), JobState::Failed);
    silence.report(0, ended(job, "stopped", CauseKind::Hearsay));
    silence.wait(5.0);
    assert_eq!(silence.answer(stop), None);
    let now = silence.now();
    silence.state.expire(stop.call, now);
    let refused = silence.answer(stop).unwrap().unwrap_err();
    let begins = "job `job` is stopped, but hub 1 (127.0.0.1:2) did not confirm within 5 s";
    assert!(refused.starts_with(begins), "{refused}");
    let again = silence.stop(job, StopWhen::Now);
    silence.report(SILENT, ended(job, "stopped", CauseKind::Hearsay));
    assert_eq!(silence.answer(again), Some(Ok(JobState::Failed)));
}

#[test]
fn launchers_do_not_wait_long_for_a_silent_hub() {
    let (mut silence, job) = Silence::new();
    silence.fall_silent();
    let ending = silence.stop(job, StopWhen::WorkersEnding);
    assert_eq!(silence.answer(ending), None);
    silence.report(0, HubEvent::Kept { namespace: job });
    assert_eq!(silence.answer(ending), Some(Ok(JobState::Running)));
    let end = silence.stop(job, StopWhen::WorkersEnded);
    silence.report(0, finished(job));
    silence.wait(10.0);
    assert!(silence.now().monotonic < end.deadline);
    assert_eq!(silence.answer(end), Some(Ok(JobState::Failed)));

    // A hub that is heard in time says how the job ended.
    let (mut silence, job) = Silence::new();
    silence.fall_silent();
    let end = silence.stop(job, StopWhen::WorkersEnded);
    silence.wait(9.0);
    (0..2).for_each(|hub| silence.report(hub, finished(job)));
    assert_eq!(silence.answer(end), Some(Ok(JobState::Finished)));
}

#[test]
fn a_hub_that_shuts_down_and_falls_silent_is_lost() {
    let (mut silence, job) = Silence::new();
    let report = HubReport { presence: Presence::Leaving, ..HubReport::default() };
    silence.state.report(SILENT, Some("token"), report, at(0.0)).unwrap();
    silence.wait(10.0);
    assert_eq!(silence.state_of(job), JobState::Failed);
    let expected = "hub 1 (127.0.0.1:2) was lost: it was shutting down, and has not been heard for 10 s";
    assert_eq!(silence.message_of(job), expected);
}

#[test]
fn jobs_go_on_whose_hub_is_silent_when_the_manager_restarts() {
    let (mut silence, job) = Silence::new();
    silence.fall_silent();
    let now = silence.now();
    let jobs = silence.state.jobs().map(|job| job.record(now)).collect();
    let hubs = (0..2).map(|hub| silence.state.hub_record(hub).unwrap()).collect();
    silence.state = Membership::new(jobs, hubs, silence.state.limits, Nonce([9; 32]), now);
    let question = silence.state.question;
    silence.wait(600.0);
    assert!(silence.is_unheard());
    silence.report(SILENT, allocated(job));
    silence.report(SILENT, HubEvent::AllReported { question });
    assert_eq!(silence.state_of(job), JobState::Running);
    silence.report(0, HubEvent::AllReported { question });
    assert_eq!(silence.message_of(job), "hub 0 (127.0.0.1:1) does not have the job any more");
}

#[test]
fn a_pause_of_the_manager_itself_is_no_silence() {
    let (mut silence, job) = Silence::new();
    silence.wait(1.0);
    silence.rank_lost(job, 0, "127.0.0.1:1").unwrap();
    let waits = create(&mut silence.state, "waits", 1).unwrap();
    silence.seconds += 3000.0;
    let now = silence.now();
    silence.state.check_time(now);
    assert!(!silence.is_unheard());
    assert_eq!(silence.state_of(waits), JobState::Connecting, "its lease has not run out");
    silence.wait(9.0);
    assert_eq!(silence.state_of(job), JobState::Running, "hub 0 has called after the pause");
}

#[test]
fn hubs_that_are_not_heard_make_room_for_others() {
    let (mut silence, job) = Silence::new();
    let hubs_max = crate::limits::HUBS_MAX as u32;
    (2..hubs_max).for_each(|hub| assert!(hub_on(&mut silence.state, hub + 1, at(0.0)).is_ok()));
    let refused = hub_on(&mut silence.state, 5000, at(5.0)).unwrap_err();
    assert_eq!(refused.code, ErrorCode::DoesNotFit);
    for seconds in [5.0, 10.0] {
        silence.state.check_time(at(seconds));
    }
    assert_eq!(hub_on(&mut silence.state, 5000, at(10.0)).unwrap(), hubs_max);
    let left: Vec<u32> = silence.state.hub_statuses(at(10.0)).iter().map(|hub| hub.hub).collect();
    assert!(left.len() == hubs_max as usize && left.starts_with(&[0, 1, 3]), "{:?}", &left[..4]);
    assert_eq!(silence.state_of(job), JobState::Running);
}
