//! A core's thread: the streams of its workers, and nothing of its own but these.

use std::net::TcpStream as Socket;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use paramhub_core::exchange::Answer;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::wire::{Direction, Header, Operation};
use paramhub_transport::{
    Events, FrameSink, Interest, Landing, Outgoing, Poller, ReceiveError, Scratch, Stream, TcpStream,
};

use super::chunks::{Chunks, Owed};

/// As a hub's core: what one read brings, and what one write takes.
const RECEIVE_BUDGET_BYTES: usize = 256 << 10;
const SEND_BUDGET_BYTES: usize = 1 << 20;
const BATCH_FRAMES: usize = 32;
const WAKER: u64 = u64::MAX;

pub(super) struct Core {
    chunks: Arc<Chunks>,
    number: usize,
    poller: Poller,
    scratch: Scratch,
    /// Those that have left are none.
    lanes: Vec<Option<Lane>>,
    /// Room to work in.
    owed: Vec<Owed>,
}

/// One worker's stream.
struct Lane {
    stream: TcpStream,
    rank: u32,
    applied: ReadySet,
    parameters: ReadySet,
    /// Of each slot's answer.
    versions: Vec<u32>,
    /// The frame that has left in part, and its slot.
    begun: Option<(Header, u32)>,
    waits_writable: bool,
}

struct Sink<'a> {
    chunks: &'a Chunks,
    core: usize,
    rank: u32,
    owed: &'a mut Vec<Owed>,
}

impl FrameSink for Sink<'_> {
    type Error = anyhow::Error;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, anyhow::Error> {
        self.chunks.check(header)?;
        Ok(Landing::Staged)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), anyhow::Error> {
        self.chunks.frame(self.rank, header, payload.unwrap_or_default(), self.core, self.owed)
    }
}

impl Core {
    pub(super) fn new(
        chunks: &Arc<Chunks>,
        number: usize,
        workers: Vec<(u32, Socket)>,
    ) -> anyhow::Result<Core> {
        let poller = Poller::new()?;
        poller.add(chunks.waker(number), WAKER, Interest::READABLE)?;
        let mut lanes = Vec::new();
        for (token, (rank, socket)) in (0..).zip(workers) {
            let stream = TcpStream::new(socket, Direction::ToHub, chunks.chunk_bytes_max())?;
            poller.add(&stream, token, Interest::READABLE)?;
            lanes.push(Some(Lane {
                stream,
                rank,
                applied: ReadySet::new(chunks.len()),
                parameters: ReadySet::new(chunks.len()),
                versions: vec![0; chunks.len() as usize],
                begun: None,
                waits_writable: false,
            }));
        }
        let chunks = Arc::clone(chunks);
        Ok(Core { chunks, number, poller, scratch: Scratch::default(), lanes, owed: Vec::new() })
    }

    /// Serves until its workers have left.
    pub(super) fn run(mut self) -> anyhow::Result<()> {
        let mut events = Events::with_capacity(256);
        while self.lanes.iter().any(Option::is_some) {
            self.poller.wait(&mut events, None)?;
            for event in events.iter() {
                if event.token == WAKER {
                    self.chunks.waker(self.number).drain();
                    self.answer()?;
                    continue;
                }
                if event.readable {
                    self.receive(event.token as usize)?;
                }
                if event.writable {
                    self.flush(event.token as usize)?;
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self, index: usize) -> anyhow::Result<()> {
        let Some(lane) = &mut self.lanes[index] else { return Ok(()) };
        let mut sink =
            Sink { chunks: &self.chunks, core: self.number, rank: lane.rank, owed: &mut self.owed };
        let received = lane.stream.receive(&mut sink, &mut self.scratch, RECEIVE_BUDGET_BYTES);
        let rank = lane.rank;
        let received = received.map_err(|error| match error {
            ReceiveError::Sink(error) => error,
            error => anyhow!("{error}"),
        });
        if received.with_context(|| format!("rank {rank}"))?.closed {
            let lane = self.lanes[index].take().expect("it was there");
            self.poller.remove(&lane.stream)?;
        }
        self.answer()
    }

    /// Sends what lies on this core's desk, whoever put it there.
    fn answer(&mut self) -> anyhow::Result<()> {
        let mut owed = std::mem::take(&mut self.owed);
        self.chunks.collect(self.number, &mut owed);
        for Owed { rank, slot, answer, version } in owed.drain(..) {
            // One that has left needs no answer.
            let lane = self.lanes.iter_mut().flatten().find(|lane| lane.rank == rank);
            let Some(lane) = lane else { continue };
            lane.versions[slot as usize] = version;
            match answer {
                Answer::Applied => lane.applied.insert(slot),
                Answer::Parameters | Answer::State(_) => lane.parameters.insert(slot),
            };
        }
        self.owed = owed;
        for index in 0..self.lanes.len() {
            if self.lanes[index].as_ref().is_some_and(|lane| lane.has_work() && !lane.waits_writable) {
                self.flush(index)?;
            }
        }
        Ok(())
    }

    fn flush(&mut self, index: usize) -> anyhow::Result<()> {
        let Some(lane) = &mut self.lanes[index] else { return Ok(()) };
        let mut bytes = 0;
        let mut is_full = false;
        while lane.has_work() && !is_full {
            let sent = lane.send(&self.chunks).with_context(|| format!("rank {}", lane.rank))?;
            bytes += sent.bytes;
            is_full = sent.is_blocked || bytes >= SEND_BUDGET_BYTES;
        }
        if is_full != lane.waits_writable {
            lane.waits_writable = is_full;
            let interest = if is_full { Interest::BOTH } else { Interest::READABLE };
            self.poller.modify(&lane.stream, index as u64, interest)?;
        }
        Ok(())
    }
}

/// What one write did.
struct Written {
    bytes: usize,
    is_blocked: bool,
}

impl Lane {
    fn has_work(&self) -> bool {
        self.begun.is_some() || !self.applied.is_empty() || !self.parameters.is_empty()
    }

    /// One write of what is most urgent.
    fn send(&mut self, chunks: &Chunks) -> anyhow::Result<Written> {
        let mut picks: [(u32, Answer); BATCH_FRAMES] = [(0, Answer::Applied); BATCH_FRAMES];
        let mut models = [const { None }; BATCH_FRAMES];
        let mut headers = [Header::bare(Operation::Heartbeat); BATCH_FRAMES];
        let mut count = 0;
        if let Some((header, slot)) = self.begun {
            let answer = if header.length == 0 { Answer::Applied } else { Answer::Parameters };
            (picks[0], headers[0], count) = ((slot, answer), header, 1);
            models[0] = (answer == Answer::Parameters).then(|| chunks.model(slot));
        }
        while count < BATCH_FRAMES {
            let next = self.applied.pop_first().map(|slot| (slot, Answer::Applied));
            let next = next.or_else(|| self.parameters.pop_first().map(|slot| (slot, Answer::Parameters)));
            let Some((slot, answer)) = next else { break };
            if answer == Answer::Parameters {
                // Waiting for one chunk while holding another would let cores wait for each other.
                let model = if count == 0 { Some(chunks.model(slot)) } else { chunks.model_at_once(slot) };
                if model.is_none() {
                    self.parameters.insert(slot);
                    break;
                }
                models[count] = model;
            }
            picks[count] = (slot, answer);
            headers[count] = chunks.header(slot, answer, self.versions[slot as usize]);
            count += 1;
        }
        let frame = |index: usize| Outgoing {
            header: headers[index],
            payload: models[index].as_ref().map_or(&[], |model| model.payload()),
        };
        let frames: [Outgoing<'_>; BATCH_FRAMES] = std::array::from_fn(frame);
        let sent = self.stream.send(&frames[..count])?;
        let begun = sent.frames + usize::from(self.stream.unfinished() > 0);
        self.begun = (begun > sent.frames).then(|| (headers[sent.frames], picks[sent.frames].0));
        for &(slot, answer) in &picks[begun..count.max(begun)] {
            match answer {
                Answer::Applied => self.applied.insert(slot),
                Answer::Parameters | Answer::State(_) => self.parameters.insert(slot),
            };
        }
        Ok(Written { bytes: sent.bytes, is_blocked: sent.blocked })
    }
}
