//! The frames of one write by a port: which are chosen, where their bytes are, and what has left.

use paramhub_core::between_sites::may_lack_start;
use paramhub_core::exchange::Answer;
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Operation};
use paramhub_transport::{Outgoing, WRITE_BYTES_MAX};

use super::Shard;
use crate::core::outbox::{BATCH_FRAMES, Begun, NextFrame, Source};

impl Shard {
    /// A port that has something new to send, once.
    pub(crate) fn next_dirty_port(&mut self) -> Option<u32> {
        self.dirty.pop_first()
    }

    /// Adds a message for the neighbour at a port, unless there are too many already: it then returns `false`.
    pub(crate) fn message(&mut self, port: u32, operation: Operation, payload: Vec<u8>) -> bool {
        let header = Header { length: payload.len() as u32, ..Header::bare(operation) };
        self.outboxes[port as usize].message(header, payload)
    }

    /// Returns whether a port has nothing left to send.
    pub(crate) fn has_sent_all(&self, port: u32) -> bool {
        self.outboxes[port as usize].is_empty()
            && self.program_states.saved(port).is_none()
            && self.program_states.next_piece(port).is_none()
    }

    /// The frame whose first bytes have left by a port and whose last bytes have not.
    pub(crate) fn begun(&self, port: u32) -> Option<Header> {
        self.outboxes[port as usize].begun.map(|begun| begun.header)
    }

    /// Chooses the next frames of a port, most urgent first and as many as one write takes, and returns their
    /// number. Answers are taken out of the outbox; everything else stays in it until it has been sent.
    pub(crate) fn pick(&mut self, port: u32, picks: &mut [NextFrame; BATCH_FRAMES]) -> usize {
        let has_arena = self.has_arena(port);
        let side = self.plan.ports.side(port);
        // Sums of chunks that the new standby has need not wait until it has all.
        let is_copying = side == Side::Standby && self.copies_to_standby();
        let outbox = &mut self.outboxes[port as usize];
        let mut count = 0;
        let mut add = |pick| {
            picks[count] = pick;
            count += 1;
            count < BATCH_FRAMES
        };
        let mut room = true;
        let mut messages = outbox.messages.len();
        if let Some(begun) = outbox.begun {
            messages -= usize::from(begun.source == Source::Message);
            room = add(NextFrame::Begun(begun));
        }
        for _ in 0..messages {
            room = room && add(NextFrame::Message);
        }
        if outbox.norm.is_some() && !outbox.has_begun(Source::Norm) {
            room = room && add(NextFrame::Norm);
        }
        // A chunk that has moved on is sent once more where a stream was replaced, and the other site has begun it.
        while match outbox.start_at {
            Some((slot, _)) => !may_lack_start(&self.exchange, side, slot),
            None => !outbox.start.is_empty(),
        } {
            outbox.start_at = outbox.start.pop_first().map(|slot| (slot, 0));
        }
        let mut bytes = 0;
        if let Some((slot, part)) = outbox.start_at {
            // One for each write, because there is one buffer from which it can leave. Answers wait until all
            // initial values have left.
            let starts = room && outbox.may_spill();
            if starts {
                room = add(NextFrame::Start(slot, part));
                self.stage_start(port, slot, part);
            }
            if !is_copying {
                return count;
            }
            bytes += if starts { self.outboxes[port as usize].spill.len() } else { 0 };
        }
        let outbox = &mut self.outboxes[port as usize];
        if self.program_states.saved(port).is_some() {
            room = room && add(NextFrame::ProgramStateSaved);
        }
        while room && let Some(slot) = outbox.applied.pop_first() {
            room = add(NextFrame::Answer(slot, Answer::Applied));
        }
        while room
            && bytes < WRITE_BYTES_MAX
            && let Some(slot) = outbox.parameters.pop_first()
        {
            let chunk = &self.slots[slot as usize];
            // A quantised chunk mostly leaves as a change, in the codec of its gradient.
            let codec = if chunk.gradient.is_quantised() { chunk.gradient } else { chunk.parameter };
            bytes += if has_arena { 0 } else { chunk.extent().bytes(codec) as usize };
            room = add(NextFrame::Answer(slot, Answer::Parameters));
        }
        // One for each write, because there is one buffer from which it can leave.
        if room
            && outbox.may_spill()
            && let Some(slot) = outbox.state.pop_first()
        {
            picks[count] = NextFrame::Answer(slot, self.stage_state(port, slot));
            return count + 1;
        }
        // It leaves from the same buffer.
        if room
            && bytes < WRITE_BYTES_MAX
            && self.outboxes[port as usize].may_spill()
            && self.program_states.next_piece(port).is_some()
        {
            self.stage_program_state(port);
            picks[count] = NextFrame::ProgramState;
            count += 1;
        }
        count
    }

    /// The chosen frames with their payloads. `picks` is not empty.
    pub(crate) fn frames<'a>(&'a self, port: u32, picks: &[NextFrame], frames: &mut [Outgoing<'a>]) {
        let begun_message = matches!(picks[0], NextFrame::Begun(begun) if begun.source == Source::Message);
        let mut messages = self.outboxes[port as usize].messages.iter().skip(usize::from(begun_message));
        for (frame, pick) in frames.iter_mut().zip(picks) {
            let (header, payload) = match *pick {
                NextFrame::Begun(begun) => (begun.header, self.of_source(port, begun.source)),
                NextFrame::Message => {
                    let (header, payload) = messages.next().expect("as many messages as were picked");
                    (*header, &payload[..])
                }
                NextFrame::Norm => {
                    let norm = &self.outboxes[port as usize].norm;
                    let (header, payload) = norm.as_ref().expect("it was picked");
                    (*header, &payload[..])
                }
                NextFrame::Start(slot, part) => self.start_frame(port, slot, part),
                NextFrame::ProgramStateSaved => (self.saved_frame(port), &[][..]),
                NextFrame::ProgramState => self.program_state_frame(port),
                NextFrame::Answer(slot, answer) => self.answer(port, slot, answer),
            };
            *frame = Outgoing { header, payload };
        }
    }

    /// Records that the first `whole` frames have left whole and that the first `begun` have at least begun to
    /// leave, and returns answers that have not begun to the outbox.
    pub(crate) fn note_sent(
        &mut self,
        port: u32,
        picks: &[NextFrame],
        headers: &[Header],
        whole: usize,
        begun: usize,
    ) {
        let has_arena = self.has_arena(port);
        for (index, pick) in picks.iter().enumerate() {
            let (is_whole, has_begun) = (index < whole, index < begun);
            let header = headers[index];
            let unfinished = |source| (has_begun && !is_whole).then_some(Begun { header, source });
            match *pick {
                NextFrame::Begun(_) if !is_whole => {}
                NextFrame::Begun(first) => {
                    let outbox = &mut self.outboxes[port as usize];
                    outbox.begun = None;
                    match first.source {
                        Source::Message => drop(outbox.messages.pop_front()),
                        Source::Norm => outbox.norm = None,
                        Source::Model(_)
                        | Source::Change(_)
                        | Source::Sum(_)
                        | Source::Total(_)
                        | Source::Spill
                        | Source::Empty => {}
                    }
                }
                NextFrame::Message => {
                    let outbox = &mut self.outboxes[port as usize];
                    match is_whole {
                        true => drop(outbox.messages.pop_front()),
                        false => outbox.begun = unfinished(Source::Message).or(outbox.begun),
                    }
                }
                NextFrame::Norm => {
                    let outbox = &mut self.outboxes[port as usize];
                    match is_whole {
                        true => outbox.norm = None,
                        false => outbox.begun = unfinished(Source::Norm).or(outbox.begun),
                    }
                }
                NextFrame::Start(slot, part) if has_begun => {
                    let parts = self.start_parts(slot);
                    if let Side::Below(member) = self.plan.ports.side(port)
                        && part + 1 == parts
                    {
                        self.exchange.catch_up(slot, member);
                    }
                    // The sum of its step may have been complete before.
                    let goes_there = self.plan.ports.above(slot) == Some(port);
                    let is_sum_due = goes_there && part + 1 == parts && self.exchange.is_sent_up(slot);
                    let outbox = &mut self.outboxes[port as usize];
                    outbox.start_at = (part + 1 < parts).then_some((slot, part + 1));
                    outbox.begun = unfinished(Source::Spill).or(outbox.begun);
                    if is_sum_due {
                        outbox.owe(slot, Answer::Parameters);
                    }
                }
                NextFrame::Start(..) => {}
                NextFrame::ProgramStateSaved if has_begun => {
                    self.program_states.saved_begun(port);
                    let outbox = &mut self.outboxes[port as usize];
                    outbox.begun = unfinished(Source::Empty).or(outbox.begun);
                }
                NextFrame::ProgramState if has_begun => {
                    self.program_states.piece_begun(port);
                    let outbox = &mut self.outboxes[port as usize];
                    outbox.begun = unfinished(Source::Spill).or(outbox.begun);
                }
                NextFrame::ProgramStateSaved | NextFrame::ProgramState => {}
                NextFrame::Answer(slot, answer) if !has_begun => {
                    self.outboxes[port as usize].owe(slot, answer);
                }
                NextFrame::Answer(slot, answer) => {
                    if !is_whole {
                        // The source depends on the version that the member received last, which
                        // `answer_begun` changes.
                        let source = match answer {
                            Answer::Parameters if !has_arena => self.source(port, slot),
                            Answer::State(_) => Source::Spill,
                            Answer::Parameters | Answer::Applied => Source::Empty,
                        };
                        self.outboxes[port as usize].begun = unfinished(source);
                    }
                    self.answer_begun(port, slot);
                }
            }
        }
    }
}
