//! The program states that ranks keep at this route's core. They move at the rate of control messages, and only when
//! nothing more urgent is left to send.

use paramhub_core::program_states::{KEPT_MAX, Piece, ProgramStates, payload_bytes_max, piece_bytes_max};
use paramhub_core::wire::{Header, Operation, PROGRAM_STATE_HEAD_BYTES};

use super::Shard;
use crate::core::fault::Fault;
use crate::core::plan::ShardPlan;

impl ShardPlan {
    /// The largest number of bytes of a program state here; 0 on a route that keeps none.
    pub(crate) fn program_state_bytes_here(&self) -> u32 {
        let keeps_them = self.placement().program_state_route() == Some(self.route);
        if keeps_them { self.program_state_bytes } else { 0 }
    }

    /// Bytes of the largest payload with a piece of a program state; 0 on a route that keeps none.
    pub(in crate::core) fn program_state_payload_bytes_max(&self) -> usize {
        payload_bytes_max(self.settings.chunk_bytes, self.program_state_bytes_here())
    }

    /// Bytes that program states take on this route.
    pub(super) fn program_states_memory_bytes(&self) -> u64 {
        ProgramStates::memory_bytes(self.ports.workers(), self.program_state_bytes_here(), self.checkpoints)
    }

    pub(super) fn program_states(&self) -> ProgramStates {
        let bytes_max = self.program_state_bytes_here();
        let piece_bytes_max = piece_bytes_max(self.settings.chunk_bytes, bytes_max);
        ProgramStates::new(self.ports.workers(), bytes_max, piece_bytes_max)
    }
}

impl Shard {
    /// Notes that ranks have saved states at the hub that this one replaces, which did not pass them on. They belong to versions up
    /// to as many ahead of the newest chunk as a hub keeps.
    pub(super) fn take_over_program_states(&mut self) {
        if self.plan.program_state_bytes_here() > 0 {
            let made = (0..self.slots.len() as u32).map(|index| self.exchange.step(index)).max().unwrap_or(0);
            self.program_states_from = made.saturating_add(KEPT_MAX as u32 + 1);
        }
    }

    /// Whether ranks may have yet to save their states of this version. Those that have saved none may save none at all, but for
    /// a hub that has taken over.
    pub(super) fn may_get_program_states(&self, version: u32) -> bool {
        if self.program_states_from == 0 {
            return self.program_states.newest_common().is_some_and(|newest| newest < version);
        }
        let has_not = |worker| self.program_states.newest(worker).is_none_or(|newest| newest < version);
        (0..self.plan.ports.workers()).any(|worker| !self.departures.has_left(worker) && has_not(worker))
    }

    /// Whether a snapshot of this version would lack program states that ranks have saved elsewhere. Those that have all left need
    /// them no more.
    pub(super) fn lacks_program_states(&self, version: u32) -> bool {
        let mut workers = 0..self.plan.ports.workers();
        version < self.program_states_from && !workers.all(|worker| self.departures.has_left(worker))
    }

    /// Refuses a frame about program states that cannot be right here.
    pub(super) fn check_program_state(&self, header: &Header) -> Result<(), Fault> {
        if self.plan.program_state_bytes == 0 {
            return Err(Fault::NoProgramStates(header.operation));
        }
        let most = self.plan.program_state_payload_bytes_max() as u32;
        if most == 0 {
            return Err(Fault::ProgramStateElsewhere(header.operation));
        }
        let is_piece = header.operation == Operation::SaveProgramState;
        if is_piece && !(PROGRAM_STATE_HEAD_BYTES as u32..=most).contains(&header.length) {
            return Err(Fault::ProgramStatePiece { got: header.length, most });
        }
        Ok(())
    }

    /// Takes a piece of a rank's program state.
    pub(super) fn save_program_state(
        &mut self,
        port: u32,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let piece = Piece::read(header, payload).map_err(|error| Fault::ProgramState(error.into()))?;
        if self.program_states.save(port, &piece).map_err(Fault::ProgramState)? {
            self.dirty.insert(port);
        }
        Ok(())
    }

    /// Begins to send a rank's program state.
    pub(super) fn pull_program_state(&mut self, port: u32, step: u32) -> Result<(), Fault> {
        self.program_states.pull(port, step).map_err(Fault::ProgramState)?;
        self.dirty.insert(port);
        Ok(())
    }

    /// The header of the answer to a rank that has saved a state.
    pub(super) fn saved_frame(&self, port: u32) -> Header {
        let step = self.program_states.saved(port).expect("it was picked");
        Header { step, ..Header::bare(Operation::ProgramStateSaved) }
    }

    /// Copies the next piece of a rank's program state to the buffer from which it leaves. The buffer must hold nothing that
    /// has begun to leave.
    pub(super) fn stage_program_state(&mut self, port: u32) {
        let spill = &mut self.outboxes[port as usize].spill;
        spill.clear();
        self.program_states.next_piece(port).expect("it was picked").write(spill);
    }

    /// The frame of the piece that was staged.
    pub(super) fn program_state_frame(&self, port: u32) -> (Header, &[u8]) {
        let piece = self.program_states.next_piece(port).expect("it was staged");
        (piece.header(Operation::ProgramState), &self.outboxes[port as usize].spill)
    }
}

#[cfg(test)]
mod tests {
    use paramhub_core::key::Key;
    use paramhub_core::stragglers::Stragglers;
    use paramhub_core::wire::ProgramState;
    use paramhub_transport::Outgoing;

    use super::super::tests::{answer, push_pull, take};
    use super::*;
    use crate::core::outbox::{BATCH_FRAMES, NextFrame, Source};
    use crate::core::shard::memory_bytes;
    use crate::core::stepped_hub::plan_with;

    const STATE_BYTES: u32 = 5000;

    fn plan(keys: Vec<Key>) -> ShardPlan {
        let plan = plan_with(2, keys, Stragglers::Wait, |_| {});
        ShardPlan { program_state_bytes: STATE_BYTES, ..plan }
    }

    fn shard() -> Shard {
        Shard::new(plan(vec![Key::new("w", [4])])).unwrap()
    }

    fn piece(step: u32, offset: u32, total: u32, bytes: &[u8]) -> (Header, Vec<u8>) {
        let piece = Piece { step, offset, total, bytes };
        let mut payload = Vec::new();
        piece.write(&mut payload);
        (piece.header(Operation::SaveProgramState), payload)
    }

    fn save(shard: &mut Shard, rank: u32, step: u32, state: &[u8]) {
        for (number, bytes) in state.chunks(1024).enumerate() {
            let (header, payload) = piece(step, number as u32 * 1024, state.len() as u32, bytes);
            take(shard, rank, &header, &payload).unwrap();
        }
    }

    fn pull(shard: &mut Shard, rank: u32, step: u32) -> Result<(), Fault> {
        take(shard, rank, &Header { step, ..Header::bare(Operation::PullProgramState) }, &[])
    }

    /// Sends the next write of a port: all of its frames, or the first byte of the first.
    fn write(shard: &mut Shard, port: u32, is_whole: bool) -> Vec<(Header, Vec<u8>)> {
        let mut picks = [NextFrame::Message; BATCH_FRAMES];
        let count = shard.pick(port, &mut picks);
        let bare = Header::bare(Operation::Heartbeat);
        let mut frames = [Outgoing { header: bare, payload: &[] }; BATCH_FRAMES];
        if count == 0 {
            return Vec::new();
        }
        shard.frames(port, &picks[..count], &mut frames[..count]);
        let sent: Vec<_> =
            frames[..count].iter().map(|frame| (frame.header, frame.payload.to_vec())).collect();
        let headers: [Header; BATCH_FRAMES] = std::array::from_fn(|index| frames[index].header);
        let (whole, begun) = if is_whole { (count, count) } else { (0, 1) };
        shard.note_sent(port, &picks[..count], &headers, whole, begun);
        sent
    }

    fn writes(shard: &mut Shard, port: u32) -> Vec<(Header, Vec<u8>)> {
        std::iter::from_fn(|| Some(write(shard, port, true)).filter(|sent| !sent.is_empty()))
            .flatten()
            .collect()
    }

    /// The state in these frames.
    fn joined(frames: &[(Header, Vec<u8>)]) -> (u32, Vec<u8>) {
        let mut total = 0;
        let bytes = frames.iter().flat_map(|(header, payload)| {
            assert_eq!(header.operation, Operation::ProgramState);
            let state = ProgramState::decode(payload).unwrap();
            total = state.total;
            state.piece.to_vec()
        });
        let bytes = bytes.collect();
        (total, bytes)
    }

    #[test]
    fn a_state_is_kept_and_leaves_in_pieces_behind_everything_else() {
        let mut shard = shard();
        let state: Vec<u8> = (0..STATE_BYTES).map(|byte| byte as u8).collect();
        save(&mut shard, 1, 7, &state);
        assert_eq!(shard.next_dirty_port(), Some(1));
        let saved = Header { step: 7, ..Header::bare(Operation::ProgramStateSaved) };
        assert_eq!(writes(&mut shard, 1), [(saved, vec![])]);
        pull(&mut shard, 1, 7).unwrap();
        assert_eq!(shard.next_dirty_port(), Some(1));
        // The first piece has begun to leave when an answer comes, which does not wait for the others.
        let begun = write(&mut shard, 1, false);
        assert_eq!(shard.outboxes[1].begun.unwrap().source, Source::Spill);
        for rank in 0..2 {
            push_pull(&mut shard, rank, 0, 0, &[1.0; 4]).unwrap();
        }
        let rest = write(&mut shard, 1, true);
        assert_eq!(rest[0], begun[0]);
        assert_eq!(rest[1].0.operation, Operation::Parameters);
        let mut pieces = vec![rest[0].clone()];
        pieces.extend(rest[2..].iter().cloned());
        pieces.extend(writes(&mut shard, 1));
        assert_eq!(pieces.len(), 5);
        assert_eq!(joined(&pieces), (STATE_BYTES, state));
        answer(&mut shard, 0);
        assert!(shard.has_sent_all(0) && shard.has_sent_all(1));
    }

    #[test]
    fn a_rank_is_told_of_a_state_that_is_missing_and_gets_that_of_another_if_it_has_saved_none() {
        let mut shard = shard();
        save(&mut shard, 0, 7, b"mine");
        for (rank, step) in [(1, 6), (0, 6)] {
            writes(&mut shard, rank);
            pull(&mut shard, rank, step).unwrap();
            assert_eq!(joined(&writes(&mut shard, rank)), (ProgramState::MISSING, vec![]));
        }
        for rank in [0, 1] {
            pull(&mut shard, rank, 7).unwrap();
            assert_eq!(joined(&writes(&mut shard, rank)), (4, b"mine".to_vec()));
        }
    }

    #[test]
    fn a_replaced_stream_drops_what_was_under_way() {
        let mut shard = shard();
        save(&mut shard, 0, 7, &[7; 3000]);
        shard.resume(0);
        assert!(writes(&mut shard, 0).is_empty(), "it asks again");
        let (header, payload) = piece(8, 0, 3000, &[8; 1000]);
        take(&mut shard, 0, &header, &payload).unwrap();
        pull(&mut shard, 0, 7).unwrap();
        write(&mut shard, 0, false);
        shard.resume(0);
        assert!(writes(&mut shard, 0).is_empty());
        save(&mut shard, 0, 8, &[9; 3000]);
        writes(&mut shard, 0);
        for step in [7, 8] {
            pull(&mut shard, 0, step).unwrap();
            assert_eq!(joined(&writes(&mut shard, 0)), (3000, vec![step as u8 + u8::from(step == 8); 3000]));
        }
    }

    #[test]
    fn what_cannot_be_right_is_a_fault_with_the_reason() {
        let refused = |shard: &mut Shard, (header, payload): (Header, Vec<u8>)| {
            take(shard, 0, &header, &payload).unwrap_err().message("rank 0")
        };
        let mut shard = shard();
        for (frame, reason) in [
            (
                piece(1, 0, 5001, &[0; 1024]),
                "has 5001 bytes, more than the 5000 of the job's `program_state_bytes`",
            ),
            (
                piece(1, 0, 5000, &[0; 1025]),
                "sent 1029 bytes as a piece of a program state, which has 4 to 1028",
            ),
            (
                piece(1, 8, 5000, &[0; 8]),
                "broke the rules of program states: a piece of step 1 begins at byte 8",
            ),
        ] {
            let refused = refused(&mut shard, frame);
            assert!(refused.starts_with("rank 0 ") && refused.contains(reason), "{refused}");
        }
        let short = Header { length: 3, ..Header::bare(Operation::SaveProgramState) };
        assert!(refused(&mut shard, (short, vec![0; 3])).contains("which has 4 to 1028"));
        pull(&mut shard, 0, 1).unwrap();
        let twice = pull(&mut shard, 0, 2).unwrap_err().message("rank 0");
        assert!(twice.ends_with("before it had that of step 1: pull one at a time"), "{twice}");
        let without = ShardPlan { program_state_bytes: 0, ..shard.plan().clone() };
        let refused = refused(&mut Shard::new(without).unwrap(), piece(1, 0, 0, &[]));
        assert!(refused.contains("no program state can be saved in this job"), "{refused}");
    }

    #[test]
    fn the_states_of_each_rank_count_as_memory_and_are_freed_with_the_job() {
        let mut shard = shard();
        let without = ShardPlan { program_state_bytes: 0, ..shard.plan().clone() };
        let more = memory_bytes(shard.plan()) - memory_bytes(&without);
        assert!((8 * u64::from(STATE_BYTES)..9 * u64::from(STATE_BYTES)).contains(&more), "{more}");
        save(&mut shard, 0, 7, &[7; 3000]);
        pull(&mut shard, 0, 7).unwrap();
        shard.close();
        assert!(writes(&mut shard, 0).is_empty(), "nothing but the last message leaves");
        while shard.free_some(1024) {}
        assert_eq!((shard.program_states.newest(0), shard.counters().memory_bytes), (None, 0));
    }
}
