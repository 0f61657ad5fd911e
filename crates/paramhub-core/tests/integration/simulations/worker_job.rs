//! The state machine of a job at a worker under random interleavings of programs that request, leave and give up,
//! of streams that break, block and are opened again or not, and of hubs that send a reason, die or are silent.
//! One thread, virtual time: a failure prints its seed and the shortest sequence of actions that leads to it.

mod action;
mod checks;
mod stream;

use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::resuming::{RESUME, ResumeTerms, SILENT};
use paramhub_core::wire::Failure;
use paramhub_core::worker_job::{
    Announcement, CommandsTaken, Consequence, FailureCause, Output, Progress, Reopening, WorkerJob,
};
use proptest::prelude::*;

use action::{Action, Attempt, Break, action};
use checks::Expected;
use stream::{Frame, SimulatedStream, State};

/// Longer than any wait of a job that ends.
const LONG: Duration = Duration::from_secs(60);

/// What a worker's program gets. A number makes each error different.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Error {
    LeftEarly,
    GaveUp(u32),
    Lost(u32),
    Silent(u32),
    CutOff(u32),
    /// The reason that a hub sent.
    Reason(u32),
}

struct Simulation {
    job: WorkerJob<Error>,
    resuming: ResumeTerms,
    now: Instant,
    requests: u32,
    streams: Vec<SimulatedStream>,
    /// By when the requests must be answered, once the program has left.
    leaves_by: Option<Instant>,
    /// How the job must end.
    expected: Expected,
    outcome: Option<Result<(), Error>>,
    errors: u32,
}

/// The requests and streams of the worker.
struct Situation {
    has_requests: bool,
    are_streams_closed: bool,
}

impl Progress<Error> for Situation {
    fn has_requests(&self) -> bool {
        self.has_requests
    }

    fn are_streams_closed(&self) -> bool {
        self.are_streams_closed
    }

    fn left_early(&self) -> Error {
        Error::LeftEarly
    }
}

impl Simulation {
    fn new(hubs: usize, streams_of_hub: usize, resuming: ResumeTerms) -> Simulation {
        let hubs = (0..hubs).map(|number| Arc::from(format!("hub {number}")));
        let streams = hubs.flat_map(|hub: Arc<str>| vec![SimulatedStream::new(hub); streams_of_hub]);
        Simulation {
            job: WorkerJob::new(resuming),
            resuming,
            now: Instant::now(),
            requests: 0,
            streams: streams.collect(),
            leaves_by: None,
            expected: Expected::Nothing,
            outcome: None,
            errors: 0,
        }
    }

    fn act(&mut self, action: &Action) {
        if self.outcome.is_some() {
            return;
        }
        match *action {
            Action::Request => self.request(),
            Action::Answer { all: true } => self.requests = 0,
            Action::Answer { all: false } => self.requests = self.requests.saturating_sub(1),
            Action::Leave { ms } => self.leave(Duration::from_millis(ms)),
            Action::GiveUp => self.give_up(),
            Action::Break { stream, how } => self.with(stream, |all, stream| all.break_stream(stream, how)),
            Action::Block { stream, is_blocked } => self.with(stream, |all, stream| {
                all.streams[stream].is_blocked = is_blocked;
            }),
            Action::HubCloses { stream } => self.with(stream, Simulation::hub_closes),
            Action::HubDies { stream } => self.with(stream, Simulation::hub_dies),
            Action::HubFails { stream } => self.with(stream, Simulation::hub_fails),
            Action::HubSilent { stream } => self.with(stream, Simulation::hub_silent),
            Action::StreamSilent { stream } => self.with(stream, |all, stream| {
                if all.job.resumes_after(SILENT + Duration::from_millis(1)) {
                    all.begin_resuming(stream);
                }
            }),
            Action::Reopen { stream, attempt } => self.with(stream, |all, stream| {
                all.reopened(stream, attempt);
            }),
            Action::Wait { ms } => return self.wait(Duration::from_millis(ms)),
        }
        self.turn();
    }

    fn with(&mut self, stream: usize, act: impl FnOnce(&mut Simulation, usize)) {
        act(self, stream % self.streams.len());
    }

    /// One turn of the worker's loop after the events.
    fn turn(&mut self) {
        (0..self.streams.len()).for_each(|stream| self.send(stream));
        self.progress();
        self.check();
    }

    fn progress(&mut self) {
        self.expect_passing_time();
        while self.outcome.is_none() {
            match self.job.check_time(self.now, &self.situation()) {
                None => return,
                Some(Output::SendLeave) => self.send_leave(),
                Some(Output::Announce(announcement)) => self.announce(announcement),
                Some(Output::Over(outcome)) => self.over(outcome),
            }
        }
    }

    fn situation(&self) -> Situation {
        Situation { has_requests: self.requests > 0, are_streams_closed: self.are_streams_closed() }
    }

    fn are_streams_closed(&self) -> bool {
        self.streams.iter().all(|stream| stream.state == State::Closed)
    }

    /// The program requests something, which every stream carries.
    fn request(&mut self) {
        let takes = self.job.commands_taken() == CommandsTaken::All;
        assert_eq!(takes, self.is_serving() && self.leaves_by.is_none(), "commands are taken while it runs");
        if takes {
            self.requests += 1;
            self.streams.iter_mut().for_each(|stream| stream.queue.push_back(Frame::Chunk));
        }
    }

    fn leave(&mut self, patience: Duration) {
        if self.job.commands_taken() == CommandsTaken::All && self.leaves_by.is_none() {
            self.leaves_by = Some(self.now + patience);
            self.job.leave(self.now + patience);
        }
    }

    fn give_up(&mut self) {
        let takes = self.job.commands_taken() != CommandsTaken::None;
        assert_eq!(takes, self.is_serving(), "a job that is not closing is given up");
        let cause = self.cause(Error::GaveUp, None);
        self.give_up_for(cause);
    }

    /// Reports that the worker cannot go on, which counts only while nothing has decided how the job ends.
    fn give_up_for(&mut self, cause: FailureCause<Error>) {
        let is_serving = self.is_serving();
        self.expect_announced(&cause);
        let announcement = self.job.give_up(cause, self.now);
        assert_eq!(announcement.is_some(), is_serving, "{announcement:?}");
        if let Some(announcement) = announcement {
            self.announce(announcement);
        }
    }

    fn break_stream(&mut self, index: usize, how: Break) {
        match how {
            Break::Receiving if self.streams[index].may_receive() => match self.may_resume(index) {
                true => self.begin_resuming(index),
                false => self.end_stream(index),
            },
            Break::Receiving => {}
            Break::Sending => self.streams[index].fails_to_send = true,
        }
    }

    /// The hub closes a stream, properly if the worker has left.
    fn hub_closes(&mut self, index: usize) {
        if self.streams[index].may_receive() {
            self.end_stream(index);
        }
    }

    /// The hub's process ends, and all its streams with it.
    fn hub_dies(&mut self, index: usize) {
        let hub = Arc::clone(&self.streams[index].hub);
        for other in 0..self.streams.len() {
            if self.streams[other].hub == hub {
                self.hub_closes(other);
            }
        }
    }

    fn hub_fails(&mut self, index: usize) {
        if !self.streams[index].may_receive() {
            return;
        }
        let hub = Arc::clone(&self.streams[index].hub);
        let cause = self.cause(Error::Reason, Some(hub));
        self.expect_reason(&cause);
        match self.job.failed(cause, self.now) {
            Some(announcement) => self.announce(announcement),
            None => self.end_stream(index),
        }
    }

    fn hub_silent(&mut self, index: usize) {
        assert_eq!(self.job.watches_hubs(), self.is_serving());
        if self.streams[index].state != State::Resuming {
            let hub = Arc::clone(&self.streams[index].hub);
            let cause = self.cause(Error::Silent, Some(hub));
            self.give_up_for(cause);
        }
    }

    fn may_resume(&self, index: usize) -> bool {
        let may = self.job.may_resume();
        assert_eq!(may, self.may_reopen(), "streams are opened again while the worker has something to say");
        may && self.streams[index].state != State::Closed
    }

    fn begin_resuming(&mut self, index: usize) {
        let may_resume = self.may_resume(index);
        let stream = &mut self.streams[index];
        if may_resume && stream.state != State::Resuming {
            stream.state = State::Resuming;
            stream.resumes_until = self.now + RESUME;
        }
    }

    fn reopened(&mut self, index: usize, attempt: Attempt) {
        if self.streams[index].state != State::Resuming {
            return;
        }
        let reopening = match attempt {
            Attempt::Opens => Reopening::Opened(()),
            Attempt::FindsJobEnded => {
                let hub = Arc::clone(&self.streams[index].hub);
                let cause = self.cause(Error::Reason, Some(hub));
                self.expect_announced(&cause);
                Reopening::Failed(cause)
            }
            Attempt::Fails => {
                let cause = self.cause(Error::CutOff, None);
                self.expect_announced(&cause);
                Reopening::Failed(cause)
            }
        };
        let replaces = attempt == Attempt::Opens && self.may_reopen();
        let consequence = self.job.reopened(reopening, false, self.now);
        assert_eq!(matches!(consequence, Consequence::Replace { .. }), replaces, "{consequence:?}");
        match consequence {
            // The attempts are over, and the stream waits for the end of the job.
            Consequence::Ignore => self.streams[index].resumes_until = self.now + LONG,
            Consequence::Close => self.streams[index].state = State::Closed,
            Consequence::Replace { stream: (), leaves } => {
                let hub = Arc::clone(&self.streams[index].hub);
                self.streams[index] = SimulatedStream::new(hub);
                let queue = &mut self.streams[index].queue;
                queue.extend((self.requests > 0).then_some(Frame::Chunk));
                queue.extend(leaves.then_some(Frame::Leave));
                self.send(index);
            }
            Consequence::Announce(announcement) => self.announce(announcement),
        }
    }

    fn send_leave(&mut self) {
        let leaves_by = self.leaves_by.expect("the program has left");
        assert!(self.requests == 0 || self.now >= leaves_by, "requests are under way");
        self.check_last_message(None);
        self.send_last(Frame::Leave);
    }

    fn announce(&mut self, announcement: Announcement) {
        self.check_last_message(Some(&announcement));
        let lost = announcement.lost_hub.as_ref();
        for stream in self.streams.iter_mut().filter(|stream| Some(&stream.hub) == lost) {
            (stream.state, stream.is_lost) = (State::Closed, true);
        }
        self.send_last(Frame::Reason);
    }

    fn send_last(&mut self, frame: Frame) {
        for index in 0..self.streams.len() {
            if self.streams[index].state != State::Closed {
                self.streams[index].queue.retain(|frame| *frame != Frame::Chunk);
                self.streams[index].queue.push_back(frame);
                self.send(index);
            }
        }
    }

    /// Sends what waits, as the worker's loop does.
    fn send(&mut self, index: usize) {
        let (is_sending, stream) = (self.job.is_sending(), &mut self.streams[index]);
        if stream.state != State::Open || self.outcome.is_some() {
            return;
        }
        if !stream.queue.is_empty() && is_sending {
            if stream.fails_to_send {
                if self.may_resume(index) {
                    return self.begin_resuming(index);
                }
                (self.streams[index].state, self.streams[index].is_lost) = (State::SendClosed, true);
                return self.lose_stream(index);
            }
            stream.deliver();
        }
        let stream = &mut self.streams[index];
        if self.job.is_closing() && stream.queue.is_empty() {
            stream.close_sending();
        }
    }

    /// No more frames will come from a stream.
    fn end_stream(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        (stream.state, stream.is_lost) = (State::Closed, true);
        self.lose_stream(index);
    }

    fn lose_stream(&mut self, index: usize) {
        let hub = Arc::clone(&self.streams[index].hub);
        let cause = self.cause(Error::Lost, Some(hub));
        self.expect_loss(&cause);
        self.job.stream_lost(cause, self.now);
    }

    /// Lets time pass. The loop wakes up at the deadline that the job names, and when attempts to open a stream
    /// again are over.
    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until && self.outcome.is_none() {
            let resuming = self.streams.iter().filter(|stream| stream.state == State::Resuming);
            let wakes = resuming.map(|stream| stream.resumes_until).chain(self.job.deadline());
            self.now = wakes.fold(until, Instant::min).max(self.now);
            for index in 0..self.streams.len() {
                if self.outcome.is_none() && self.now >= self.streams[index].resumes_until {
                    self.reopened(index, Attempt::Fails);
                }
            }
            self.turn();
        }
    }

    fn cause(&mut self, error: fn(u32) -> Error, lost_hub: Option<Arc<str>>) -> FailureCause<Error> {
        let error = self.error(error);
        let announced = Failure { rank: Some(0), message: format!("{error:?}") };
        FailureCause { error, announced, lost_hub }
    }

    fn error(&mut self, error: fn(u32) -> Error) -> Error {
        self.errors += 1;
        error(self.errors)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_job_of_a_worker_ends_once_with_its_first_cause_in_every_order_of_events(
        hubs in 1usize..4,
        streams_of_hub in 1usize..3,
        resumes in any::<bool>(),
        actions in prop::collection::vec(action(), 1..60),
    ) {
        let mut simulation = Simulation::new(hubs, streams_of_hub, ResumeTerms { moves: resumes, ..ResumeTerms::default() });
        for action in &actions {
            simulation.act(action);
        }
        simulation.act(&Action::Leave { ms: 1000 });
        simulation.wait(LONG);
        prop_assert!(simulation.outcome.is_some(), "the job has no end");
        simulation.check_silence();
    }
}
