//! A core's thread in this ablation: it owns the streams of its workers, and shares the chunks with all other
//! cores.

use std::net::TcpStream as Socket;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use paramhub_core::exchange::Answer;
use paramhub_core::ready_set::ReadySet;
use paramhub_core::wire::{Direction, Header, Operation};
use paramhub_transport::{
    Events, FrameSink, Interest, Landing, Outgoing, Poller, ReceiveError, Scratch, Stream, TcpStream,
};

use super::chunks::{Chunks, PendingAnswer};

/// The bytes that a stream receives, and that it sends, before the others have their turn, as in a hub's core.
const RECEIVE_BUDGET_BYTES: usize = 256 << 10;
const SEND_BUDGET_BYTES: usize = 1 << 20;
const BATCH_FRAMES: usize = 32;
const WAKER: u64 = u64::MAX;

/// The thread and the streams of its workers.
pub(super) struct ByWorkerCore {
    chunks: Arc<Chunks>,
    number: usize,
    poller: Poller,
    scratch: Scratch,
    /// The streams of the core's workers; `None` for those that have left.
    senders: Vec<Option<WorkerStream>>,
    /// Answers that the frames of one read have made due.
    pending: Vec<PendingAnswer>,
}

/// One worker's stream.
struct WorkerStream {
    stream: TcpStream,
    rank: u32,
    /// The slots whose acknowledgement is still to be sent.
    applied: ReadySet,
    /// The slots whose parameters are still to be sent.
    parameters: ReadySet,
    /// The version in each slot's answer.
    versions: Vec<u32>,
    /// The frame that was sent in part, and its slot.
    begun: Option<(Header, u32)>,
    waits_writable: bool,
}

/// Passes the frames of one worker to the chunks.
struct Sink<'a> {
    chunks: &'a Chunks,
    core: usize,
    rank: u32,
    pending: &'a mut Vec<PendingAnswer>,
}

impl FrameSink for Sink<'_> {
    type Error = anyhow::Error;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, anyhow::Error> {
        self.chunks.check(header)?;
        Ok(Landing::Staged)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), anyhow::Error> {
        self.chunks.frame(self.rank, header, payload.unwrap_or_default(), self.core, self.pending)
    }
}

impl ByWorkerCore {
    pub(super) fn new(
        chunks: &Arc<Chunks>,
        number: usize,
        workers: Vec<(u32, Socket)>,
    ) -> anyhow::Result<ByWorkerCore> {
        let poller = Poller::new()?;
        poller.add(chunks.waker(number), WAKER, Interest::READABLE)?;
        let mut senders = Vec::new();
        for (token, (rank, socket)) in (0..).zip(workers) {
            let stream = TcpStream::new(socket, Direction::ToHub, chunks.chunk_bytes_max())?;
            poller.add(&stream, token, Interest::READABLE)?;
            senders.push(Some(WorkerStream {
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
        Ok(ByWorkerCore { chunks, number, poller, scratch: Scratch::default(), senders, pending: Vec::new() })
    }

    /// Serves until the core's workers have left.
    pub(super) fn run(mut self) -> anyhow::Result<()> {
        let mut events = Events::with_capacity(256);
        while self.senders.iter().any(Option::is_some) {
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
        let Some(sender) = &mut self.senders[index] else { return Ok(()) };
        let mut sink =
            Sink { chunks: &self.chunks, core: self.number, rank: sender.rank, pending: &mut self.pending };
        let received = sender.stream.receive(&mut sink, &mut self.scratch, RECEIVE_BUDGET_BYTES);
        let rank = sender.rank;
        let received = received.map_err(|error| match error {
            ReceiveError::Sink(error) => error,
            error => anyhow!("{error}"),
        });
        if received.with_context(|| format!("rank {rank}"))?.closed {
            let sender = self.senders[index].take().expect("it was there");
            self.poller.remove(&sender.stream)?;
        }
        self.answer()
    }

    /// Sends the answers to this core's workers that its own frames, or another core, have made due.
    fn answer(&mut self) -> anyhow::Result<()> {
        let mut pending = std::mem::take(&mut self.pending);
        self.chunks.collect(self.number, &mut pending);
        for PendingAnswer { rank, slot, answer, version } in pending.drain(..) {
            // A rank that has left needs no answer.
            let sender = self.senders.iter_mut().flatten().find(|sender| sender.rank == rank);
            let Some(sender) = sender else { continue };
            sender.versions[slot as usize] = version;
            match answer {
                Answer::Applied => sender.applied.insert(slot),
                Answer::Parameters | Answer::State(_) => sender.parameters.insert(slot),
            };
        }
        self.pending = pending;
        for index in 0..self.senders.len() {
            if self.senders[index].as_ref().is_some_and(|sender| sender.has_work() && !sender.waits_writable)
            {
                self.flush(index)?;
            }
        }
        Ok(())
    }

    fn flush(&mut self, index: usize) -> anyhow::Result<()> {
        let Some(sender) = &mut self.senders[index] else { return Ok(()) };
        let mut bytes = 0;
        let mut must_wait = false;
        while sender.has_work() && !must_wait {
            let sent = sender.send(&self.chunks).with_context(|| format!("rank {}", sender.rank))?;
            bytes += sent.bytes;
            must_wait = sent.is_blocked || bytes >= SEND_BUDGET_BYTES;
        }
        if must_wait != sender.waits_writable {
            sender.waits_writable = must_wait;
            let interest = if must_wait { Interest::BOTH } else { Interest::READABLE };
            self.poller.modify(&sender.stream, index as u64, interest)?;
        }
        Ok(())
    }
}

/// The outcome of one write.
struct Written {
    bytes: usize,
    is_blocked: bool,
}

impl WorkerStream {
    fn has_work(&self) -> bool {
        self.begun.is_some() || !self.applied.is_empty() || !self.parameters.is_empty()
    }

    /// Writes once: acknowledgements first, then the most urgent parameters.
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
                // A core that waited for one chunk while it holds another could deadlock with a core that
                // does the reverse.
                let model =
                    if count == 0 { Some(chunks.model(slot)) } else { chunks.try_lock_parameters(slot) };
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
