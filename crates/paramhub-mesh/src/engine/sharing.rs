//! Collectives in memory that ranks share, as far as the mesh's thread sees them.

use super::{COMPUTE_BYTES, Engine};
use crate::error::MeshError;

impl Engine {
    /// Whether nothing goes on in shared memory before other ranks do, who have been told to ring then.
    pub(super) fn sleeps_over_memory(&mut self) -> bool {
        match &mut self.pipeline {
            Some(pipeline) if pipeline.is_waiting() => !pipeline.look_out() && pipeline.fall_asleep(),
            _ => true,
        }
    }

    pub(super) fn advance_memory(&mut self) -> Result<(), MeshError> {
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let Err(stranger) = pipeline.advance(&mut self.board, COMPUTE_BYTES) else { return Ok(()) };
        let (who, rank) = (self.board.who.clone(), stranger.rank);
        Err(match stranger.theirs {
            Some((number, theirs)) if number == stranger.number => MeshError::OperationMismatch {
                who,
                number,
                here: stranger.ours.to_string().into(),
                rank,
                there: theirs.to_string().into(),
            },
            _ => MeshError::Protocol { who, rank, reason: "its memory is out of order".into() },
        })
    }
}
