//! What callers may ask for.

use super::Mesh;
use crate::element::{ElementType, ReduceOp};
use crate::error::MeshError;
use crate::operation::What;

impl Mesh {
    pub(super) fn check_peer(&self, what: &What, peer: u32) -> Result<(), MeshError> {
        match peer {
            peer if peer >= self.size => Err(self.no_such_rank(what, peer)),
            peer if peer == self.rank() => Err(self.misplaced(what, "that is this rank itself".into())),
            _ => Ok(()),
        }
    }

    pub(super) fn check_root(&self, what: &What, root: u32) -> Result<(), MeshError> {
        if root < self.size { Ok(()) } else { Err(self.no_such_rank(what, root)) }
    }

    fn no_such_rank(&self, what: &What, rank: u32) -> MeshError {
        self.misplaced(what, format!("there is no rank {rank}, only 0 to {}", self.size - 1))
    }

    pub(super) fn check_count(&self, what: &What, regions: &str, count: usize) -> Result<(), MeshError> {
        if count == self.size as usize {
            return Ok(());
        }
        Err(self.misplaced(what, format!("it takes {} {regions}, one for each rank, not {count}", self.size)))
    }

    pub(super) fn check_none(&self, what: &What, regions: &str, count: usize) -> Result<(), MeshError> {
        if count == 0 {
            return Ok(());
        }
        Err(self.misplaced(what, format!("only the root takes {regions}, and {count} were given")))
    }

    pub(super) fn check_same(
        &self,
        what: &What,
        given: Option<usize>,
        expected: usize,
    ) -> Result<(), MeshError> {
        match given {
            Some(given) if given != expected => {
                let reason =
                    format!("the own block has {given} bytes on one side and {expected} on the other");
                Err(self.misplaced(what, reason))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_reduction(
        &self,
        what: &What,
        element: ElementType,
        op: ReduceOp,
        lengths: impl IntoIterator<Item = usize>,
    ) -> Result<(), MeshError> {
        if !op.supports(element) {
            return Err(self.misplaced(what, format!("there is no {op} of {element}")));
        }
        match lengths.into_iter().find(|bytes| bytes % element.bytes() != 0) {
            Some(bytes) => {
                Err(self.misplaced(what, format!("{bytes} bytes are no whole number of {element} elements")))
            }
            None => Ok(()),
        }
    }

    pub(super) fn misplaced(&self, what: &What, reason: String) -> MeshError {
        MeshError::Misplaced { who: self.who.clone(), what: what.to_string().into(), reason: reason.into() }
    }
}
