//! Routes that two hubs have: what each makes of the other's frames, and what becomes of a route when one of the two is lost,
//! as the product's `core/roles.rs` and `core/shard/standby.rs` do it.

use paramhub_core::exchange::{Answer, ProtocolViolation, SumAction};
use paramhub_core::job_control::RoleChange;
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Side;
use paramhub_core::standbys::Role;

use super::Hub;
use super::route::Route;
use crate::message::Contribution;
use crate::world::Context;

impl Route {
    /// Takes a sum from the hub that serves the chunk, makes the update of that step, and acknowledges it.
    pub(super) fn follow(
        &mut self,
        slot: u32,
        port: u32,
        step: u32,
        sum: Vec<Contribution>,
        context: &mut Context<'_>,
    ) -> Result<(), ProtocolViolation> {
        let then = self.exchange.follow(slot, step)?;
        if let SumAction::Update(_) = then {
            self.chunks[slot as usize].sum = sum;
            self.go_on(slot, then, context);
        }
        self.ports[port as usize].owed.insert(slot, Answer::Applied);
        Ok(())
    }

    /// Takes the standby's acknowledgement.
    pub(super) fn acknowledged(
        &mut self,
        slot: u32,
        port: u32,
        version: u32,
        context: &mut Context<'_>,
    ) -> Result<(), ProtocolViolation> {
        let then = self.exchange.acknowledged(slot, version)?;
        if !self.exchange.awaits_standby(slot) {
            self.copy_acknowledged(slot);
        }
        if let Some(then) = then {
            // It may be about to go once more over another stream.
            self.ports[port as usize].owed.remove(&slot);
            self.go_on(slot, then, context);
        }
        Ok(())
    }

    /// Tells the standby that a worker has left, so that it does not wait for that worker if it takes over.
    pub(super) fn pass_on_leave(&mut self, member: u32) {
        if let Some(port) = self.neighbours.counterpart().filter(|_| self.exchange.has_standby()) {
            self.ports[port as usize].leavers.insert(member);
        }
    }

    /// Tells the standby again by a new stream which workers have left.
    pub(super) fn pass_on_leaves_again(&mut self, port: u32) {
        if self.neighbours.side(port) == Side::Standby {
            let left = (0..self.neighbours.workers()).filter(|&member| self.departures.has_left(member));
            self.ports[port as usize].leavers = left.collect();
        }
    }

    /// The other hub has nothing to do with the chunks any more.
    fn forget_counterpart(&mut self) {
        (self.standby, self.copying) = (None, None);
        if let Some(port) = self.neighbours.counterpart() {
            let state = &mut self.ports[port as usize];
            state.owed.clear();
            state.starts.clear();
            state.leavers.clear();
            self.departures.set_lost(port, true);
        }
    }

    fn go_on_alone(&mut self, context: &mut Context<'_>) {
        self.exchange.go_on_alone();
        self.forget_counterpart();
        for slot in 0..self.chunks.len() as u32 {
            if let Some(then) = self.exchange.complete_alone(slot) {
                self.go_on(slot, then, context);
            }
            self.mark_due_answers(slot);
        }
    }

    fn take_over(&mut self, context: &mut Context<'_>) {
        self.exchange.take_over();
        self.forget_counterpart();
        for chunk in &self.chunks {
            context.ledger.taken_over((self.copy, chunk.id));
        }
    }
}

impl Hub {
    /// Changes what this hub is for a route.
    pub(super) fn change_role(&mut self, id: RouteId, change: RoleChange, context: &mut Context<'_>) {
        if !self.job.as_ref().is_some_and(|job| job.routes.contains_key(&id)) {
            return;
        }
        context.trace(|| format!("{:?} is to {change:?} at route {id}", self.process));
        if change == RoleChange::Stop {
            return self.give_up(id, context);
        }
        self.close_streams(id, change, context);
        let Some(job) = &mut self.job else { return };
        let route = job.route(id);
        let role = match change {
            RoleChange::TakeOver | RoleChange::GoOnAlone => Role::Serves { has_standby: false },
            RoleChange::TakeStandby { .. } => Role::Serves { has_standby: true },
            RoleChange::Doubt | RoleChange::Stop => Role::None,
        };
        route.serves = matches!(role, Role::Serves { .. });
        match change {
            RoleChange::TakeOver => route.take_over(context),
            RoleChange::GoOnAlone => route.go_on_alone(context),
            RoleChange::TakeStandby { standby } => route.take_standby(standby),
            RoleChange::Doubt | RoleChange::Stop => {}
        }
        job.streams.change_role(id, role);
        if change != RoleChange::Doubt {
            self.stop_dialling_standby(id, context);
        }
        self.answer(id, context);
        self.report_copied(id, context);
    }

    /// What a hub with a planted fault does: it takes over all routes for which it is the standby.
    pub(super) fn take_over_alone(&mut self, context: &mut Context<'_>) {
        let routes = self.job.iter().flat_map(|job| &job.routes);
        let followed = routes.filter(|(_, route)| route.exchange.stands_by()).map(|(&id, _)| id);
        let followed: Vec<RouteId> = followed.collect();
        followed.into_iter().for_each(|id| self.change_role(id, RoleChange::TakeOver, context));
    }

    /// Closes the streams of a route of which this hub is something else from now on, without a word.
    pub(super) fn close_streams(&mut self, id: RouteId, change: RoleChange, context: &mut Context<'_>) {
        let process = self.process;
        let Some(job) = &mut self.job else { return };
        let route = job.route(id);
        for number in 0..route.neighbours.len() {
            let side = route.neighbours.side(number);
            let closes = match change {
                RoleChange::TakeOver => side == Side::Serving,
                RoleChange::GoOnAlone => side == Side::Standby,
                RoleChange::TakeStandby { .. } => false,
                RoleChange::Doubt => matches!(side, Side::Worker(_)),
                RoleChange::Stop => true,
            };
            if !closes {
                continue;
            }
            let port = &mut route.ports[number as usize];
            port.is_cut = false;
            if let Some(stream) = port.stream.take() {
                context.close(stream, process);
            }
            if let Side::Worker(member) = side {
                port.owed.clear();
                route.exchange.resume(member);
            }
        }
    }

    /// The job goes on at other hubs: its callers are to try there.
    pub(super) fn send_elsewhere(&mut self) {
        self.is_elsewhere = true;
        if let Some(job) = &mut self.job {
            job.is_open = false;
        }
    }
}
