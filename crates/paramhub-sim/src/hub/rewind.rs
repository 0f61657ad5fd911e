//! Ranks that all go back to an earlier step because one of them is lost: what a core does. Such a job has one site: the
//! ports of its workers are their ranks.

use paramhub_core::job_control::{CoreEvent, RankChange, chosen_step};
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Header, Notice, Operation};

use super::route::{Rewind, RouteState};
use super::{Hub, PASSING};
use crate::message::Content;
use crate::world::{Context, Plant, Wake};

impl Hub {
    /// A core closes all streams of the job, with the reason, and refuses those of earlier epochs.
    pub(super) fn rewind(&mut self, core: u16, epoch: u64, notice: &Notice, context: &mut Context<'_>) {
        context.ledger.rewound(epoch);
        if let Some(job) = &mut self.job {
            job.joins.retain(|&(of, ..)| of != core);
        }
        for id in self.open_routes(core) {
            for rank in 0..self.plan.workers {
                context.ledger.rank_lost(rank);
                let content = Content::Rewound(notice.clone());
                self.send(id, rank, Header::bare(Operation::Rewound), content, context);
                let Some(job) = &mut self.job else { return };
                let port = job.port(id, rank);
                port.newest = Some((epoch, 0));
                (port.is_muted, port.is_cut) = (true, false);
                port.owed.clear();
                if let Some(stream) = port.stream.take() {
                    context.close(stream, self.process);
                }
            }
            let Some(job) = &mut self.job else { return };
            let route = job.route(id);
            let neighbours = route.neighbours.clone();
            route.departures.lose_workers(&neighbours);
            (route.rewind, route.rewound_in) = (Rewind::Awaited { workers: 0 }, epoch);
            route.notice = Some(notice.clone());
        }
    }

    /// A core names the newest step to which it can go back, or goes back with the first rank that joins.
    pub(super) fn change_rank_after_rewind(
        &mut self,
        core: u16,
        (rank, epoch): (u32, u64),
        change: RankChange,
        context: &mut Context<'_>,
    ) {
        let mut named = Vec::new();
        for id in self.open_routes(core) {
            let Some(job) = &mut self.job else { return };
            let route = job.route(id);
            let taken = match change {
                RankChange::Lose => {
                    self.lose_rank(id, rank, epoch, context);
                    continue;
                }
                RankChange::Expect => {
                    if let Rewind::Awaited { workers } = &mut route.rewind {
                        *workers = (*workers).max(rank + 1);
                    }
                    route.exchange.newest_rewind().map_err(|cannot| cannot.to_string())
                }
                RankChange::Join { step } => {
                    route.departures.set_lost(rank, false);
                    let own = route.exchange.newest_rewind().unwrap_or(step);
                    // With this fault each core goes back to the step that it has named itself.
                    let step = if context.plant == Some(Plant::RewindsToOwnStep) { own } else { step };
                    let keeps_sums = context.plant == Some(Plant::SumsKept);
                    match route.rewind {
                        Rewind::Awaited { workers } => {
                            let awaits_all = context.plant == Some(Plant::AllWorkersAwaited);
                            let workers = if awaits_all { self.plan.workers } else { workers };
                            route.begin_to_go_back(step, workers, keeps_sums).map(|()| step)
                        }
                        Rewind::NotNeeded | Rewind::UnderWay { .. } => Ok(step),
                    }
                }
            };
            match taken {
                Ok(step) => named.push(step),
                Err(reason) => {
                    return self.handle_core_later(CoreEvent::CannotGoOn { reason }, context);
                }
            }
            if matches!(change, RankChange::Join { .. }) {
                self.go_back_later(id, context);
            }
        }
        match change {
            RankChange::Lose => {}
            RankChange::Expect => {
                let step = chosen_step(rank, named.into_iter(), true);
                let event = CoreEvent::RankExpected { rank, epoch, step };
                self.handle_core_later(event, context);
            }
            RankChange::Join { .. } => {
                let Some(job) = &mut self.job else { return };
                job.joins.push((core, rank, epoch));
                self.report_joins(core, context);
            }
        }
    }

    /// A core takes the next chunk of a route back, between other work.
    pub(super) fn go_back(&mut self, id: RouteId, context: &mut Context<'_>) {
        let Some(job) = self.job.as_mut().filter(|job| job.routes[&id].state == RouteState::Open) else {
            return;
        };
        let route = job.route(id);
        let core = route.core;
        match route.go_back(context) {
            true => self.go_back_later(id, context),
            false => self.report_joins(core, context),
        }
        self.carry_out(context);
    }

    fn go_back_later(&self, route: RouteId, context: &mut Context<'_>) {
        let wait = context.random.time(&PASSING) / 4;
        context.wake_in(self.process, wait, Wake::GoBack { allocation: self.allocations, route });
    }

    /// Reports the ranks that have joined at a core, once no chunk there is about to go back.
    fn report_joins(&mut self, core: u16, context: &mut Context<'_>) {
        let Some(job) = &mut self.job else { return };
        let goes_back = job.routes.values().any(|route| {
            route.core == core
                && route.state == RouteState::Open
                && matches!(route.rewind, Rewind::UnderWay { .. })
        });
        if goes_back {
            return;
        }
        let joined: Vec<_> = job.joins.extract_if(.., |&mut (of, ..)| of == core).collect();
        for (_, rank, epoch) in joined {
            self.handle_core_later(CoreEvent::RankJoined { rank, epoch }, context);
        }
    }

    fn open_routes(&self, core: u16) -> Vec<RouteId> {
        let routes = self.job.iter().flat_map(|job| &job.routes);
        let open = routes.filter(|(_, route)| route.core == core && route.state == RouteState::Open);
        open.map(|(&id, _)| id).collect()
    }
}
