//! Checks of a caller's arguments.

use super::Mesh;
use crate::element::{ElementType, ReduceOp};
use crate::error::MeshError;
use crate::operation::OperationKind;

impl Mesh {
    pub(super) fn check_peer(&self, kind: &OperationKind, peer: u32) -> Result<(), MeshError> {
        match peer {
            peer if peer >= self.size => Err(self.no_such_rank(kind, peer)),
            peer if peer == self.rank() => Err(self.misused(kind, "that is this rank itself".into())),
            _ => Ok(()),
        }
    }

    pub(super) fn check_root(&self, kind: &OperationKind, root: u32) -> Result<(), MeshError> {
        if root < self.size { Ok(()) } else { Err(self.no_such_rank(kind, root)) }
    }

    fn no_such_rank(&self, kind: &OperationKind, rank: u32) -> MeshError {
        self.misused(kind, format!("there is no rank {rank}, only 0 to {}", self.size - 1))
    }

    pub(super) fn check_count(
        &self,
        kind: &OperationKind,
        regions: &str,
        count: usize,
    ) -> Result<(), MeshError> {
        if count == self.size as usize {
            return Ok(());
        }
        Err(self.misused(kind, format!("it takes {} {regions}, one for each rank, not {count}", self.size)))
    }

    pub(super) fn check_none(
        &self,
        kind: &OperationKind,
        regions: &str,
        count: usize,
    ) -> Result<(), MeshError> {
        if count == 0 {
            return Ok(());
        }
        Err(self.misused(kind, format!("only the root takes {regions}, and {count} were given")))
    }

    pub(super) fn check_same(
        &self,
        kind: &OperationKind,
        given: Option<usize>,
        expected: usize,
    ) -> Result<(), MeshError> {
        match given {
            Some(given) if given != expected => {
                let reason =
                    format!("the own block has {given} bytes on one side and {expected} on the other");
                Err(self.misused(kind, reason))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_reduction(
        &self,
        kind: &OperationKind,
        element: ElementType,
        op: ReduceOp,
        lengths: impl IntoIterator<Item = usize>,
    ) -> Result<(), MeshError> {
        if !op.supports(element) {
            return Err(self.misused(kind, format!("there is no {op} of {element}")));
        }
        match lengths.into_iter().find(|bytes| bytes % element.bytes() != 0) {
            Some(bytes) => {
                Err(self.misused(kind, format!("{bytes} bytes are no whole number of {element} elements")))
            }
            None => Ok(()),
        }
    }

    pub(super) fn misused(&self, kind: &OperationKind, reason: String) -> MeshError {
        MeshError::Misused {
            this_rank: self.this_rank.clone(),
            what: kind.to_string().into(),
            reason: reason.into(),
        }
    }
}
