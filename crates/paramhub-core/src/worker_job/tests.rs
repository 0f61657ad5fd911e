use super::*;
use crate::resuming::SILENT;

const TICK: Duration = Duration::from_millis(1);
/// How long a leaving program waits for its requests.
const PATIENCE: Duration = Duration::from_secs(5);

type Error = &'static str;

/// The requests and streams of a worker.
#[derive(Clone, Copy, Debug, Default)]
struct Situation {
    has_requests: bool,
    are_streams_closed: bool,
}

/// Requests are under way, and streams are open.
const BUSY: Situation = Situation { has_requests: true, are_streams_closed: false };
/// All requests have been answered, and streams are open.
const IDLE: Situation = Situation { has_requests: false, are_streams_closed: false };
/// No stream is left.
const CLOSED: Situation = Situation { has_requests: true, are_streams_closed: true };

impl Progress<Error> for Situation {
    fn has_requests(&self) -> bool {
        self.has_requests
    }

    fn are_streams_closed(&self) -> bool {
        self.are_streams_closed
    }

    fn left_early(&self) -> Error {
        "left early"
    }
}

/// The cause that a hub is lost.
fn loss(error: Error) -> FailureCause<Error> {
    FailureCause { lost_hub: Some("10.0.0.1:1".into()), ..cause(error) }
}

/// A cause that lies at this worker.
fn cause(error: Error) -> FailureCause<Error> {
    let announced = Failure { rank: Some(3), message: format!("announced: {error}") };
    FailureCause { error, announced, lost_hub: None }
}

/// What a worker sends for a cause.
fn announcement(cause: FailureCause<Error>) -> Announcement {
    Announcement { announced: cause.announced, lost_hub: cause.lost_hub }
}

/// A job, and the time at which it came into its phase.
struct Case {
    name: &'static str,
    job: WorkerJob<Error>,
    since: Instant,
}

/// A job in each phase but the last.
fn cases(resumes: bool) -> [Case; 6] {
    let since = Instant::now();
    let case = |name, act: &dyn Fn(&mut WorkerJob<Error>)| {
        let mut job = WorkerJob::new(ResumeTerms { moves: resumes, ..ResumeTerms::default() });
        act(&mut job);
        Case { name, job, since }
    };
    let leave = |job: &mut WorkerJob<Error>| job.leave(since + PATIENCE);
    [
        case("running", &|_| {}),
        case("leaving", &leave),
        case("stream lost", &|job| job.stream_lost(loss("lost"), since)),
        case("left", &|job| {
            leave(job);
            assert_eq!(job.check_time(since, &IDLE), Some(Output::SendLeave));
        }),
        case("left early", &|job| {
            job.leave(since);
            assert_eq!(job.check_time(since, &BUSY), Some(Output::SendLeave));
        }),
        case("failing", &|job| {
            assert!(job.give_up(cause("given up"), since).is_some());
        }),
    ]
}

/// What a property of the job is in each phase.
fn in_each_phase<T>(resumes: bool, property: impl Fn(Case) -> T) -> [(&'static str, T); 6] {
    cases(resumes).map(|case| (case.name, property(case)))
}

/// How a job in this phase ends if nothing more happens: the outputs, each with the time since the phase began.
/// Every deadline is met at its moment and not before.
fn end(case: &mut Case, situation: Situation) -> Vec<(Duration, Output<Error>)> {
    let (mut outputs, mut now) = (Vec::new(), case.since);
    loop {
        while let Some(output) = case.job.check_time(now, &situation) {
            outputs.push((now - case.since, output));
        }
        let Some(deadline) = case.job.deadline() else { return outputs };
        assert_eq!(case.job.check_time(deadline - TICK, &situation), None, "{}", case.name);
        now = deadline;
    }
}

#[test]
fn each_phase_says_what_is_taken_sent_watched_and_opened_again() {
    use CommandsTaken::{All, GiveUpOnly, None};
    let commands = in_each_phase(true, |case| case.job.commands_taken()).map(|(_, taken)| taken);
    assert_eq!(commands, [All, GiveUpOnly, None, None, None, None]);
    let holds = |property: fn(&WorkerJob<Error>) -> bool| {
        in_each_phase(true, |case| property(&case.job)).into_iter().filter(|(_, holds)| *holds)
    };
    let names = |property| holds(property).map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(WorkerJob::is_sending), ["running", "leaving", "left", "left early", "failing"]);
    assert_eq!(names(WorkerJob::is_closing), ["left", "left early", "failing"]);
    assert_eq!(names(WorkerJob::watches_hubs), ["running", "leaving"]);
    assert_eq!(names(WorkerJob::may_resume), ["running", "leaving", "left"]);
    assert_eq!(names(|job| job.resumes_after(SILENT + TICK)), ["running", "leaving", "left"]);
    assert_eq!(names(|job| job.resumes_after(SILENT)), [""; 0]);
    assert!(in_each_phase(false, |case| case.job.may_resume()).iter().all(|(_, may)| !may));
}

#[test]
fn each_phase_ends_at_its_deadline() {
    let ends = |resumes, situation| cases(resumes).map(|mut case| end(&mut case, situation));
    let lost = || Output::Announce(announcement(loss("lost")));
    let at = |seconds| Duration::from_secs(seconds);
    let [running, leaving, stream_lost, left, left_early, failing] = ends(false, BUSY);
    assert_eq!(running, []);
    let over = Output::Over(Err("left early"));
    assert_eq!(leaving, [(PATIENCE, Output::SendLeave), (PATIENCE + LEAVE_TIMEOUT, over.clone())]);
    assert_eq!(stream_lost, [(at(1), lost()), (at(2), Output::Over(Err("lost")))]);
    assert_eq!(left, [(LEAVE_TIMEOUT, Output::Over(Ok(())))]);
    assert_eq!(left_early, [(LEAVE_TIMEOUT, over.clone())]);
    assert_eq!(failing, [(FINAL_MESSAGE_TIMEOUT, Output::Over(Err("given up")))]);
    // If streams may have to be opened again, the Leave message takes longer, and no other message.
    let [_, _, stream_lost, left, left_early, failing] = ends(true, BUSY).map(|end| end.last().cloned());
    assert_eq!(stream_lost, Some((at(2), Output::Over(Err("lost")))));
    assert_eq!(left, Some((LEAVE_TIMEOUT_MOVING, Output::Over(Ok(())))));
    assert_eq!(left_early, Some((LEAVE_TIMEOUT_MOVING, over)));
    assert_eq!(failing, Some((FINAL_MESSAGE_TIMEOUT, Output::Over(Err("given up")))));
}

#[test]
fn a_job_is_over_at_once_when_no_stream_is_left() {
    let [running, leaving, stream_lost, left, left_early, failing] =
        cases(false).map(|mut case| end(&mut case, CLOSED));
    assert_eq!(running, []);
    let over = |error| (Duration::ZERO, Output::Over(Err(error)));
    let announced = |cause| (Duration::ZERO, Output::Announce(announcement(cause)));
    assert_eq!(leaving[1..], [(PATIENCE, Output::Over(Err("left early")))], "requests may not end before");
    assert_eq!(stream_lost, [announced(loss("lost")), over("lost")]);
    assert_eq!(left, [(Duration::ZERO, Output::Over(Ok(())))]);
    assert_eq!((left_early, failing), (vec![over("left early")], vec![over("given up")]));
}

#[test]
fn a_worker_leaves_when_its_last_request_is_answered() {
    let mut case = cases(false).into_iter().nth(1).unwrap();
    let answered = case.since + TICK;
    assert_eq!(case.job.check_time(answered - TICK, &BUSY), None);
    assert_eq!(case.job.check_time(answered, &IDLE), Some(Output::SendLeave));
    assert_eq!(case.job.check_time(answered, &IDLE), None);
    assert_eq!(case.job.deadline(), Some(answered + LEAVE_TIMEOUT));
    let closed = Situation { are_streams_closed: true, ..IDLE };
    assert_eq!(case.job.check_time(answered + TICK, &closed), Some(Output::Over(Ok(()))));
}

#[test]
fn a_program_leaves_once() {
    let later = |case: &Case| case.since + PATIENCE * 2;
    let deadlines = |acts: bool| {
        in_each_phase(false, |mut case| {
            if acts {
                case.job.leave(later(&case));
            }
            case.job.deadline().map(|deadline| deadline - case.since)
        })
    };
    assert_eq!(deadlines(true)[0], ("running", Some(PATIENCE * 2)));
    assert_eq!(deadlines(true)[1..], deadlines(false)[1..]);
}

#[test]
fn the_loss_of_a_stream_counts_before_the_job_closes_and_the_first_counts() {
    let ends = in_each_phase(false, |mut case| {
        let was_waiting = !case.job.is_sending();
        case.job.stream_lost(loss("second"), case.since);
        let outputs = end(&mut case, BUSY);
        case.job.stream_lost(loss("third"), case.since);
        assert_eq!(case.job.deadline(), None, "it is over");
        (was_waiting, outputs.into_iter().map(|(_, output)| output).collect::<Vec<_>>())
    });
    let lost = |error| vec![Output::Announce(announcement(loss(error))), Output::Over(Err(error))];
    assert_eq!(ends[0], ("running", (false, lost("second"))));
    assert_eq!(ends[1], ("leaving", (false, lost("second"))));
    assert_eq!(ends[2], ("stream lost", (true, lost("lost"))));
    assert_eq!(ends[3], ("left", (false, vec![Output::Over(Ok(()))])));
    assert_eq!(ends[4], ("left early", (false, vec![Output::Over(Err("left early"))])));
    assert_eq!(ends[5], ("failing", (false, vec![Output::Over(Err("given up"))])));
}

#[test]
fn the_reason_of_a_hub_ends_a_job_that_is_not_closing_and_replaces_the_loss_of_a_stream() {
    let failed = in_each_phase(false, |mut case| {
        let announced = case.job.failed(loss("reason"), case.since);
        (announced, end(&mut case, BUSY), case.job.commands_taken())
    });
    for (name, (announced, ends, commands)) in failed {
        let counts = ["running", "leaving", "stream lost"].contains(&name);
        assert_eq!(announced, counts.then(|| announcement(loss("reason"))), "{name}");
        let is_the_reason = ends == [(FINAL_MESSAGE_TIMEOUT, Output::Over(Err("reason")))];
        assert_eq!((ends.len(), is_the_reason), (1, counts), "{name} ends once");
        assert_eq!(commands, CommandsTaken::None, "{name}");
    }
}

#[test]
fn a_job_is_given_up_while_it_runs_or_leaves() {
    for cause in [cause("second"), loss("second")] {
        let given_up = in_each_phase(true, |mut case| {
            let announced = case.job.give_up(cause.clone(), case.since);
            (announced, end(&mut case, BUSY).pop())
        });
        for (name, (announced, end)) in given_up {
            let counts = ["running", "leaving"].contains(&name);
            assert_eq!(announced, counts.then(|| announcement(cause.clone())), "{name}");
            if counts {
                assert_eq!(end, Some((FINAL_MESSAGE_TIMEOUT, Output::Over(Err("second")))), "{name}");
            } else {
                assert_ne!(end.unwrap().1, Output::Over(Err("second")), "{name}");
            }
        }
    }
}

#[test]
fn what_becomes_of_a_stream_that_was_to_be_opened_again() {
    let reopenings = || [Reopening::Opened(7), Reopening::Failed(cause("cut off"))];
    let after = |resumes, is_closed| {
        in_each_phase(resumes, |case| case.name).map(|(name, _)| {
            let consequences = reopenings().map(|reopening| {
                let mut case = cases(resumes).into_iter().find(|case| case.name == name).unwrap();
                let consequence = case.job.reopened(reopening, is_closed, case.since);
                let goes_on = !matches!(consequence, Consequence::Announce(_));
                let last = end(&mut case, BUSY).pop().map(|(_, output)| output);
                match &consequence {
                    Consequence::Announce(_) => assert_eq!(last, Some(Output::Over(Err("cut off")))),
                    _ => assert!(goes_on && last != Some(Output::Over(Err("cut off"))), "{name}"),
                }
                consequence
            });
            (name, consequences)
        })
    };
    use Consequence::{Announce, Close, Ignore, Replace};
    let serving = [Replace { stream: 7, leaves: false }, Announce(announcement(cause("cut off")))];
    let expected = [
        ("running", serving.clone()),
        ("leaving", serving),
        // The reason may still come.
        ("stream lost", [Ignore, Ignore]),
        // The worker sends its Leave message again, and no longer reacts to a failure of the job.
        ("left", [Replace { stream: 7, leaves: true }, Close]),
        ("left early", [Close, Close]),
        ("failing", [Close, Close]),
    ];
    assert_eq!(after(true, false), expected);
    for (name, consequences) in after(true, true).into_iter().chain(after(false, false)) {
        let is_closing = ["left", "left early", "failing"].contains(&name);
        let expected = if is_closing { [Close, Close] } else { [Ignore, Ignore] };
        assert_eq!(consequences, expected, "{name}");
    }
}

#[test]
fn nothing_happens_to_a_job_that_is_over() {
    let now = Instant::now();
    let mut job: WorkerJob<Error> = WorkerJob::new(ResumeTerms { moves: true, ..ResumeTerms::default() });
    assert!(job.failed(cause("reason"), now).is_some());
    assert_eq!(job.check_time(now, &CLOSED), Some(Output::Over(Err("reason"))));
    job.leave(now);
    job.stream_lost(loss("lost"), now);
    assert_eq!((job.failed(cause("second"), now), job.give_up(cause("third"), now)), (None, None));
    assert_eq!(job.reopened(Reopening::Opened(()), false, now), Consequence::Ignore);
    for situation in [BUSY, IDLE, CLOSED] {
        assert_eq!((job.check_time(now, &situation), job.deadline()), (None, None));
    }
    assert!(!job.may_resume() && !job.watches_hubs());
    assert_eq!(job.commands_taken(), CommandsTaken::None);
}
