//! Ranks that are lost while the job goes on, and the processes that take them: what a core does.

use paramhub_core::composition::Neighbour;
use paramhub_core::job_control::{CoreEvent, FaultCause, RankChange};
use paramhub_core::placement::RouteId;
use paramhub_core::service::CauseKind;
use paramhub_core::wire::{Failure, Header, Operation};

use super::Hub;
use super::route::RouteState;
use crate::message::Content;
use crate::world::{Context, Plant};

impl Hub {
    /// A core changes the membership of its chunks.
    pub(super) fn change_rank(
        &mut self,
        core: u16,
        rank: u32,
        epoch: u64,
        change: RankChange,
        context: &mut Context<'_>,
    ) {
        if self.plan.rewind_every.is_some() {
            return self.change_rank_after_rewind(core, (rank, epoch), change, context);
        }
        let Some(job) = &self.job else { return };
        let of_core =
            job.routes.iter().filter(|(_, route)| route.core == core && route.state == RouteState::Open);
        let routes: Vec<RouteId> = of_core.map(|(&id, _)| id).collect();
        let mut first_step = 0;
        for id in routes {
            match change {
                RankChange::Lose => self.lose_rank(id, rank, epoch, context),
                RankChange::Expect => {
                    let Some(job) = &mut self.job else { return };
                    job.port(id, rank).has_left = false;
                    let route = job.route(id);
                    if route.exchange.begin_steps_again() {
                        route.drop_sums();
                    }
                    first_step = route.exchange.rejoin(rank).max(first_step);
                }
                RankChange::Join { step } => {
                    let Some(job) = &mut self.job else { return };
                    // With this fault each core lets the rank join at the step that it has named itself.
                    if context.plant != Some(Plant::JoinsAtOwnStep) {
                        job.route(id).exchange.join_at(rank, step.unwrap_or(0));
                    }
                }
            }
            let Some(job) = &mut self.job else { return };
            job.route(id).end_steps(context);
            self.answer(id, context);
        }
        let event = match change {
            RankChange::Lose => return,
            RankChange::Expect => CoreEvent::RankExpected { rank, epoch, step: Some(first_step) },
            RankChange::Join { .. } => CoreEvent::RankJoined { rank, epoch },
        };
        self.handle_core_later(event, context);
    }

    pub(super) fn lose_rank(&mut self, id: RouteId, rank: u32, epoch: u64, context: &mut Context<'_>) {
        context.ledger.rank_lost(rank);
        let message = format!("the job has taken rank {rank} for lost");
        let content = Content::Failure(Failure { rank: Some(rank), message });
        self.send(id, rank, Header::bare(Operation::Failure), content, context);
        let Some(job) = &mut self.job else { return };
        let lost = job.route(id).exchange.lose(rank);
        let port = job.port(id, rank);
        port.newest = Some((epoch, 0));
        (port.is_muted, port.is_cut) = (true, false);
        port.owed.clear();
        if let Some(stream) = port.stream.take() {
            context.close(stream, self.process);
        }
        if let Err(lost) = lost {
            let cause = FaultCause::Kind(CauseKind::Known);
            let culprit = Neighbour::Worker(rank);
            let message = format!("rank {rank} {lost}");
            self.handle_core_later(CoreEvent::Faulted { culprit, message, cause }, context);
        }
    }
}
