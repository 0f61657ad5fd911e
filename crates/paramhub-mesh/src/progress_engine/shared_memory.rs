//! Collectives in shared memory, as the mesh's thread drives them.

use super::{COMPUTE_BYTES, ProgressEngine};
use crate::error::MeshError;

impl ProgressEngine {
    /// Returns whether this rank may sleep, after it has polled for the other ranks for a while.
    pub(super) fn prepare_to_sleep(&mut self) -> Result<bool, MeshError> {
        match self.may_go_on_in_memory() {
            true => Ok(false),
            false => self.announce_sleep(),
        }
    }

    /// Returns whether this rank may sleep. If so, other ranks ring its doorbell when it can go on, and the next rank knows
    /// which collectives it has begun.
    pub(super) fn announce_sleep(&mut self) -> Result<bool, MeshError> {
        self.send_announcements()?;
        match &mut self.pipeline {
            Some(pipeline) if pipeline.is_waiting() => Ok(pipeline.prepare_sleep()),
            _ => Ok(true),
        }
    }

    /// Lets other ranks ring no doorbell: this rank is awake.
    pub(super) fn clear_sleep(&mut self) {
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.clear_sleep();
        }
    }

    /// Polls for other ranks, if a collective in memory waits for them. Returns whether this rank can go on.
    pub(super) fn may_go_on_in_memory(&mut self) -> bool {
        match &mut self.pipeline {
            Some(pipeline) if pipeline.is_waiting() => pipeline.spin_for_others(),
            _ => false,
        }
    }

    pub(super) fn advance_memory(&mut self) -> Result<(), MeshError> {
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let Err(mismatch) = pipeline.advance(&mut self.in_flight, COMPUTE_BYTES) else { return Ok(()) };
        let (this_rank, rank) = (self.in_flight.this_rank.clone(), mismatch.rank);
        Err(match mismatch.theirs {
            Some((number, theirs)) if number == mismatch.number => MeshError::OperationMismatch {
                this_rank,
                number,
                here: mismatch.ours.to_string().into(),
                rank,
                there: theirs.to_string().into(),
            },
            _ => MeshError::Protocol { this_rank, rank, reason: "its memory is out of order".into() },
        })
    }
}
