//! Ranks that are lost while the job goes on, and the processes that take them: what a core does. Such a job has one site: the
//! ports of its workers are their ranks.

use paramhub_core::job_control::{CoreEvent, RankChange, chosen_step};
use paramhub_core::placement::RouteId;
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
        let mut named = Vec::new();
        for id in routes {
            match change {
                RankChange::Lose => self.lose_rank(id, rank, epoch, context),
                RankChange::Expect => {
                    let Some(job) = &mut self.job else { return };
                    let route = job.route(id);
                    route.departures.set_lost(rank, false);
                    if route.exchange.begin_steps_again() {
                        route.drop_sums();
                    }
                    let step = route.exchange.rejoin(rank);
                    named.push(route.exchange.have_all_begun().then_some(step));
                }
                RankChange::Join { step } => {
                    let Some(job) = &mut self.job else { return };
                    // With this fault each core lets the rank join at the step that it has named itself.
                    match step {
                        Some(_) if context.plant == Some(Plant::JoinsAtOwnStep) => {}
                        Some(step) => job.route(id).exchange.join_at(rank, step),
                        None => job.route(id).exchange.join_at_start(rank),
                    }
                }
            }
            let Some(job) = &mut self.job else { return };
            job.route(id).end_steps(context);
            self.answer(id, context);
        }
        let event = match change {
            RankChange::Lose => return,
            RankChange::Expect => {
                let step = chosen_step(rank, named.into_iter(), false);
                CoreEvent::RankExpected { rank, epoch, step }
            }
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
        let route = job.route(id);
        route.exchange.lose(rank);
        route.departures.set_lost(rank, true);
        let port = job.port(id, rank);
        port.newest = Some((epoch, 0));
        (port.is_muted, port.is_cut) = (true, false);
        port.owed.clear();
        if let Some(stream) = port.stream.take() {
            context.close(stream, self.process);
        }
    }
}
