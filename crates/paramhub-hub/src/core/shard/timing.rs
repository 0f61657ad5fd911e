//! This decides when the sum of a step becomes an update.

use std::sync::Arc;
use std::time::Instant;

use paramhub_core::norms::TensorSquares;

use crate::core::deadlines::Deadlines;
use crate::core::layout::Layout;
use crate::core::plan::ShardPlan;

/// The time at which a step of a chunk ends. It is fixed at InitService. Consistency is the exchange's
/// matter, and so is the detour of sums through sites above.
pub(super) enum UpdateTiming {
    /// With the last contribution that the exchange waits for.
    WhenComplete,
    /// The step ends when rank 0 releases it, which it does when it knows the norm of all chunks' gradients.
    OnRelease(HeldStep),
    /// With enough contributions, without those that are late.
    WithQuorum(LateMembers),
}

/// The state of a step whose complete chunks wait for their release.
pub(super) struct HeldStep {
    /// For each slot: the sum of the squares of its mean gradient of step `s`, at `s % 2`. Among sites a chunk may be held at
    /// the next step before another is at this one.
    pub(super) squares: Vec<[f64; 2]>,
    /// For each slot: its part of the sums of its tensor in step `s`, at `s % 2`. Empty if the optimizer needs no norms of
    /// tensors.
    pub(super) parts: Vec<[TensorSquares; 2]>,
    /// The sums of each whole tensor, by key, with which the step that is being released was released.
    pub(super) tensors: Vec<TensorSquares>,
    /// The factor for the mean gradient of the step that is being released.
    pub(super) factor: f32,
    /// The last step whose norm was sent, and the payload of the Norm.
    pub(super) last: Option<(u32, Arc<[u8]>)>,
}

/// The state of steps that end without late members.
pub(super) struct LateMembers {
    pub(super) deadlines: Deadlines,
    /// For each member: how many updates must have left it out before the next report.
    pub(super) report_from: Vec<u64>,
}

impl UpdateTiming {
    pub(super) fn new(plan: &ShardPlan, layout: &Layout, now: Instant) -> UpdateTiming {
        let slots = layout.slots.len();
        if layout.rules.two_phase {
            let (parts, tensors) = match plan.optimizer.needs_tensor_norms() {
                true => (slots, plan.settings.keys.len()),
                false => (0, 0),
            };
            return UpdateTiming::OnRelease(HeldStep {
                squares: vec![[0.0; 2]; slots],
                parts: vec![[TensorSquares::default(); 2]; parts],
                tensors: vec![TensorSquares::default(); tensors],
                factor: 1.0,
                last: None,
            });
        }
        if plan.stragglers.leaves_out() {
            return UpdateTiming::WithQuorum(LateMembers {
                deadlines: Deadlines::new(plan.stragglers, slots, now),
                report_from: vec![slots as u64; plan.ports.members() as usize],
            });
        }
        UpdateTiming::WhenComplete
    }

    /// The factor for the mean gradient of the step that ends.
    pub(super) fn factor(&self) -> f32 {
        match self {
            UpdateTiming::OnRelease(held) => held.factor,
            UpdateTiming::WhenComplete | UpdateTiming::WithQuorum(_) => 1.0,
        }
    }

    /// The sums of squares of the tensor with this key in the step that ends, if the optimizer needs them.
    pub(super) fn tensor(&self, key: u32) -> Option<TensorSquares> {
        match self {
            UpdateTiming::OnRelease(held) => held.tensors.get(key as usize).copied(),
            UpdateTiming::WhenComplete | UpdateTiming::WithQuorum(_) => None,
        }
    }

    /// The state of late members, in a job that leaves them out.
    pub(super) fn late_members(&self) -> Option<&LateMembers> {
        match self {
            UpdateTiming::WithQuorum(late) => Some(late),
            UpdateTiming::WhenComplete | UpdateTiming::OnRelease(_) => None,
        }
    }

    /// Does the same as [`late_members`](Self::late_members).
    pub(super) fn late_members_mut(&mut self) -> Option<&mut LateMembers> {
        match self {
            UpdateTiming::WithQuorum(late) => Some(late),
            UpdateTiming::WhenComplete | UpdateTiming::OnRelease(_) => None,
        }
    }
}
