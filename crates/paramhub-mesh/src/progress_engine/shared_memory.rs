//! Collectives in shared memory, as the mesh's thread drives them.

use super::{COMPUTE_BYTES, ProgressEngine};
use crate::error::MeshError;

impl ProgressEngine {
    /// Returns whether shared memory lets this rank sleep. If so, other ranks will ring its doorbell.
    pub(super) fn prepare_to_sleep(&mut self) -> bool {
        match &mut self.pipeline {
            Some(pipeline) if pipeline.is_waiting() => {
                !pipeline.spin_for_others() && pipeline.prepare_sleep()
            }
            _ => true,
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
