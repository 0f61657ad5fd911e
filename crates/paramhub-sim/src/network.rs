//! A network of streams: each brings messages in order, late, or not at all. A call to the manager has a stream of its own.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use crate::agenda::Agenda;
use crate::message::Message;
use crate::random::Random;
use crate::scenario::Scenario;
use crate::world::Event;

/// A process, and the host on which it runs alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Process {
    /// A worker: its rank, and its number among the processes that were started for this rank.
    Worker(u32, u8),
    /// A process that opens streams to hubs as if it were the worker of this rank, without having asked the manager.
    Twin(u32),
    /// The hub of this number.
    Hub(u16),
    /// The connection manager.
    Manager,
}

/// A stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamId(usize);

/// What an end of a stream learns.
#[derive(Clone, Debug)]
pub(crate) enum Arrival {
    /// A message has come.
    Message(Message),
    /// The other end has closed the stream, in order.
    Closed,
    /// The path is broken, as when an interface goes down.
    Broken,
    /// The stream was reset.
    Reset,
    /// Nobody listens at the other end.
    Refused,
}

/// All streams that there ever were.
#[derive(Debug)]
pub(crate) struct Network {
    streams: Vec<StreamState>,
    /// The directions in which nothing goes now.
    blocked: BTreeSet<(Process, Process)>,
    /// How long a message takes.
    delay: Range<Duration>,
    /// How many streams that replace others may yet have a first message that takes up to [`LATE`] longer.
    late_hellos: u32,
    /// How many answers of the manager may yet be lost with their stream.
    lost_answers: u32,
    random: Random,
}

/// How long the first message of a stream may take.
const LATE: Duration = Duration::from_secs(8);

#[derive(Debug)]
struct StreamState {
    ends: [EndState; 2],
    /// Nothing arrives any more, and neither end learns it.
    is_silent: bool,
    /// Nothing arrives any more, and an end that sends learns it.
    is_reset: bool,
}

#[derive(Debug)]
struct EndState {
    process: Process,
    is_open: bool,
    /// When the newest message for this end arrives; the next does not arrive before it.
    newest: Duration,
    /// What is on its way to this end, in the order in which it was sent.
    coming: VecDeque<Arrival>,
    /// How many of these would have arrived while the direction was blocked.
    stuck: usize,
}

impl Network {
    /// A network without streams.
    pub(crate) fn new(scenario: &Scenario, random: Random) -> Network {
        Network {
            streams: Vec::new(),
            blocked: BTreeSet::new(),
            delay: scenario.delay.clone(),
            late_hellos: scenario.late_hellos,
            lost_answers: scenario.lost_answers,
            random,
        }
    }

    /// Opens a stream. The hub learns of it with the first message.
    pub(crate) fn open(&mut self, from: Process, to: Process) -> StreamId {
        let end = |process| EndState {
            process,
            is_open: true,
            newest: Duration::ZERO,
            coming: VecDeque::new(),
            stuck: 0,
        };
        self.streams.push(StreamState { ends: [end(from), end(to)], is_silent: false, is_reset: false });
        StreamId(self.streams.len() - 1)
    }

    /// Sends a message from a process over its end of a stream.
    pub(crate) fn send(
        &mut self,
        stream: StreamId,
        from: Process,
        message: Message,
        agenda: &mut Agenda<Event>,
    ) {
        self.pass(stream, from, Arrival::Message(message), agenda);
    }

    /// Closes a process's end of a stream. The other end learns it after everything that was sent.
    pub(crate) fn close(&mut self, stream: StreamId, by: Process, agenda: &mut Agenda<Event>) {
        self.end_sending(stream, by, agenda);
        let side = self.side(stream, by);
        self.streams[stream.0].ends[side].is_open = false;
    }

    /// Ends what a process sends over a stream; what the other end sends still arrives.
    pub(crate) fn end_sending(&mut self, stream: StreamId, by: Process, agenda: &mut Agenda<Event>) {
        let side = self.side(stream, by);
        if self.streams[stream.0].ends[side].is_open {
            self.pass(stream, by, Arrival::Closed, agenda);
        }
    }

    /// Nobody is there to take the stream that has come to this process.
    pub(crate) fn refuse(&mut self, stream: StreamId, by: Process, agenda: &mut Agenda<Event>) {
        self.pass(stream, by, Arrival::Refused, agenda);
        let side = self.side(stream, by);
        self.streams[stream.0].ends[side].is_open = false;
    }

    /// Ends all streams of a process as the system does when it dies: it closes them, or resets those on which something
    /// has come that the process had not read.
    pub(crate) fn kill(&mut self, process: Process, agenda: &mut Agenda<Event>) {
        for stream in (0..self.streams.len()).map(StreamId) {
            let state = &self.streams[stream.0];
            let is_own = |end: &EndState| end.process == process && end.is_open;
            if !state.ends.iter().any(is_own) {
                continue;
            }
            let is_call = state.ends.iter().any(|end| end.process == Process::Manager);
            let has_unread = state.ends.iter().any(|end| is_own(end) && !end.coming.is_empty());
            if !is_call && has_unread && self.random.happens(50) {
                let learns = 1 - self.side(stream, process);
                self.reset(stream, &[learns], agenda);
            }
            self.close(stream, process, agenda);
        }
    }

    /// Resets one of the open streams between two processes, or all. These sides learn it, and the others when they send.
    pub(crate) fn reset_streams(
        &mut self,
        between: [Process; 2],
        nth: Option<usize>,
        learning: &[Process],
        agenda: &mut Agenda<Event>,
    ) -> usize {
        let open = (0..self.streams.len()).map(StreamId).filter(|stream| {
            let state = &self.streams[stream.0];
            let [a, b] = [0, 1].map(|side| state.ends[side].process);
            let is_between = between == [a, b] || between == [b, a];
            is_between && !state.is_silent && !state.is_reset && state.ends.iter().all(|end| end.is_open)
        });
        let mut open: Vec<StreamId> = open.collect();
        if let Some(nth) = nth.filter(|_| !open.is_empty()) {
            open = vec![open[nth % open.len()]];
        }
        for &stream in &open {
            let sides = learning.iter().map(|&process| self.side(stream, process));
            let sides: Vec<usize> = sides.collect();
            self.reset(stream, &sides, agenda);
        }
        open.len()
    }

    /// Besides these sides, one learns it whose messages are under way: the system repeats them.
    fn reset(&mut self, stream: StreamId, learning: &[usize], agenda: &mut Agenda<Event>) {
        let state = &mut self.streams[stream.0];
        state.is_reset = true;
        let has_sent = [0, 1].map(|side: usize| !state.ends[1 - side].coming.is_empty());
        for side in (0..2).filter(|side| learning.contains(side) || has_sent[*side]) {
            self.learn_reset(stream, side, agenda);
        }
    }

    fn learn_reset(&mut self, stream: StreamId, side: usize, agenda: &mut Agenda<Event>) {
        let at = agenda.now() + self.random.time(&self.delay);
        agenda.add(at, Event::Learn { stream, side, arrival: Arrival::Reset });
    }

    /// Breaks all open streams between two processes. If the break is silent, neither end learns it; otherwise both
    /// do. What was under way is lost.
    pub(crate) fn break_streams(
        &mut self,
        between: [Process; 2],
        is_silent: bool,
        agenda: &mut Agenda<Event>,
    ) -> usize {
        let mut broken = 0;
        for number in 0..self.streams.len() {
            let state = &mut self.streams[number];
            let [a, b] = [0, 1].map(|side| state.ends[side].process);
            if state.is_silent || !(between == [a, b] || between == [b, a]) {
                continue;
            }
            broken += 1;
            state.is_silent = true;
            if !is_silent {
                for side in 0..2 {
                    let at = agenda.now() + self.random.time(&self.delay);
                    agenda.add(at, Event::Learn { stream: StreamId(number), side, arrival: Arrival::Broken });
                }
            }
        }
        broken
    }

    /// Stops or resumes everything that one process sends to another.
    pub(crate) fn block(&mut self, from: Process, to: Process, is_blocked: bool, agenda: &mut Agenda<Event>) {
        if is_blocked {
            self.blocked.insert((from, to));
            return;
        }
        self.blocked.remove(&(from, to));
        for (number, state) in self.streams.iter_mut().enumerate() {
            for side in 0..2 {
                if state.ends[side].process == to && state.ends[1 - side].process == from {
                    for _ in 0..std::mem::take(&mut state.ends[side].stuck) {
                        // The sender repeats what was lost after a while.
                        let at = agenda.now() + self.random.time(&self.delay);
                        let at = at.max(state.ends[side].newest);
                        state.ends[side].newest = at;
                        agenda.add(at, Event::Arrive { stream: StreamId(number), side });
                    }
                }
            }
        }
    }

    /// What has come to an end of a stream, and for whom, if anything arrives.
    pub(crate) fn arrive(&mut self, stream: StreamId, side: usize) -> Option<(Process, Arrival)> {
        let state = &mut self.streams[stream.0];
        let (from, to) = (state.ends[1 - side].process, state.ends[side].process);
        if state.is_silent || state.is_reset || !state.ends[side].is_open {
            return None;
        }
        if self.blocked.contains(&(from, to)) {
            state.ends[side].stuck += 1;
            return None;
        }
        Some((to, state.ends[side].coming.pop_front()?))
    }

    /// Who learns of a broken path, unless its end is closed.
    pub(crate) fn listener(&self, stream: StreamId, side: usize) -> Option<Process> {
        let end = &self.streams[stream.0].ends[side];
        end.is_open.then_some(end.process)
    }

    fn pass(&mut self, stream: StreamId, from: Process, arrival: Arrival, agenda: &mut Agenda<Event>) {
        let side = 1 - self.side(stream, from);
        if self.streams[stream.0].is_reset {
            return self.learn_reset(stream, 1 - side, agenda);
        }
        let mut at = agenda.now() + self.random.time(&self.delay);
        let is_hello =
            matches!(arrival, Arrival::Message(Message::Hello(ref hello)) if hello.attempt.resumes());
        if is_hello && self.late_hellos > 0 && self.random.happens(30) {
            self.late_hellos -= 1;
            at += self.random.time(&(Duration::ZERO..LATE));
        }
        let is_answer = matches!(arrival, Arrival::Message(Message::Answer(_)));
        let is_lost = is_answer && self.lost_answers > 0 && self.random.happens(15);
        self.lost_answers -= u32::from(is_lost);
        let arrival = if is_lost { Arrival::Broken } else { arrival };
        let end = &mut self.streams[stream.0].ends[side];
        end.newest = end.newest.max(at);
        end.coming.push_back(arrival);
        agenda.add(end.newest, Event::Arrive { stream, side });
    }

    fn side(&self, stream: StreamId, process: Process) -> usize {
        usize::from(self.streams[stream.0].ends[1].process == process)
    }
}
