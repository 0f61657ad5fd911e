//! What fails, and how it is mended.

use std::time::Duration;

use paramhub_core::standbys::Share;

use super::{Either, Event, World};
use crate::hub::Hub;
use crate::manager::Manager;
use crate::network::Process;
use crate::scenario::{Fault, Learns};

impl World<'_> {
    /// A fault happens.
    pub(super) fn fail(&mut self, number: usize) {
        let fault = self.scenario.faults[number].1;
        if self.scenario.is_traced {
            println!("{:?} {fault:?}", self.agenda.now());
        }
        match fault {
            Fault::Break(a, b) => self.broken += self.network.break_streams([a, b], false, &mut self.agenda),
            Fault::Silence(a, b) => self.broken += self.network.break_streams([a, b], true, &mut self.agenda),
            Fault::Cut { neighbour, hub, nth, learns } => {
                let neighbour = self.newest_process(neighbour);
                let between = [neighbour, hub];
                let learning: &[Process] = match learns {
                    Learns::Both => &between,
                    Learns::Neighbour => &[neighbour],
                    Learns::Hub => &[hub],
                };
                self.broken += self.network.reset_streams(between, nth, learning, &mut self.agenda);
            }
            Fault::Block(from, to, _) => self.network.block(from, to, true, &mut self.agenda),
            Fault::Pause(process, _) => {
                self.paused.entry(process).or_default().0 += 1;
            }
            Fault::Part(a, b, _) => {
                self.network.block(a, b, true, &mut self.agenda);
                self.network.block(b, a, true, &mut self.agenda);
            }
            Fault::Drain(hub, _) => {
                // The manager may not know yet that the hub is lost which has the other copy of some chunks.
                self.has_risked_chunks |= self.hub_losses > 0 && !self.has_all_standbys();
                (self.drains, self.draining) = (self.drains + 1, self.draining + 1);
                self.drain(hub, true);
            }
            Fault::Kill(process) => self.kill(process),
            Fault::Reboot(hub, _) => self.kill(Process::Hub(hub)),
            Fault::Replace(rank, _) => {
                if let Some(process) = self.newest_of(rank) {
                    self.kill(process);
                }
            }
            Fault::Rival(rank) => self.start_worker_of_newest_start(rank),
            Fault::Restart(..) => {
                self.restarting += 1;
                let all: Vec<Process> = self.workers.keys().copied().collect();
                all.into_iter().for_each(|process| self.kill(process));
            }
            Fault::Crash { keeps_last, .. } => {
                self.crashes += 1;
                if let Some(manager) = &mut self.manager {
                    manager.crash(keeps_last);
                }
                self.network.kill(Process::Manager, &mut self.agenda);
                self.paused.remove(&Process::Manager);
            }
            Fault::Twin(rank) => self.with(Process::Worker(rank, 0), |process, context| {
                if let Either::Worker(worker) = process {
                    worker.dial_as_twin(context);
                }
            }),
        }
        let length = fault.length();
        if !length.is_zero() {
            self.agenda.add(self.agenda.now() + length, Event::Heal(number));
        }
    }

    /// A fault is over.
    pub(super) fn heal(&mut self, number: usize) {
        match self.scenario.faults[number].1 {
            Fault::Block(from, to, _) => self.unblock(number, from, to),
            Fault::Part(a, b, _) => {
                self.unblock(number, a, b);
                self.unblock(number, b, a);
            }
            Fault::Replace(rank, _) => self.start_worker_of_newest_start(rank),
            Fault::Restart(workers, _) => {
                self.restarting -= 1;
                if self.restarting == 0 {
                    self.current_workers = workers;
                    (0..workers).for_each(|rank| self.start_worker(rank));
                }
            }
            Fault::Reboot(hub, _) => self.start_hub_again(hub),
            Fault::Drain(hub, _) => {
                self.draining -= 1;
                self.drain(hub, false);
            }
            Fault::Crash { .. } => {
                self.crashes -= 1;
                if self.crashes == 0 {
                    self.restarts += 1;
                    self.with(Process::Manager, |process, context| {
                        if let Either::Manager(manager) = process {
                            manager.start(context);
                        }
                    });
                }
            }
            Fault::Pause(process, _) => {
                let Some((pauses, _)) = self.paused.get_mut(&process) else { return };
                *pauses -= 1;
                if *pauses == 0 {
                    let (_, waiting) = self.paused.remove(&process).expect("it was just here");
                    waiting.into_iter().for_each(|event| self.happen(event));
                }
            }
            Fault::Break(..)
            | Fault::Cut { .. }
            | Fault::Silence(..)
            | Fault::Kill(_)
            | Fault::Twin(_)
            | Fault::Rival(_) => {}
        }
    }

    /// The newest process of a worker's rank; a hub has one process.
    fn newest_process(&self, process: Process) -> Process {
        match process {
            Process::Worker(rank, _) => self.newest_of(rank).unwrap_or(process),
            other => other,
        }
    }

    /// Starts another process for a rank, unless all are about to be started again, or the newest start has no such rank.
    fn start_worker_of_newest_start(&mut self, rank: u32) {
        if self.restarting == 0 && (rank < self.current_workers || !self.scenario.may_change_workers()) {
            self.start_worker(rank);
        }
    }

    /// An operator tells the manager that it is to drain a hub, or no longer; in vain if the manager does not run.
    fn drain(&mut self, hub: u16, drained: bool) {
        self.with(Process::Manager, |process, context| {
            if let Either::Manager(manager) = process {
                manager.drain(hub, drained, context);
            }
        });
    }

    fn kill(&mut self, process: Process) {
        if self.killed.contains(&process) {
            return;
        }
        if matches!(process, Process::Hub(_)) {
            let is_first = self.hub_losses == 0 && self.drains == 0;
            // A hub that is being drained may be left before the manager knows of this loss.
            self.has_risked_chunks |= !is_first && (self.draining > 0 || !self.has_all_standbys());
            self.hub_losses += 1;
        }
        if self.killed.insert(process) {
            self.network.kill(process, &mut self.agenda);
        }
    }

    /// Whether the manager knows two hubs for each share that have all its chunks, and they live.
    fn has_all_standbys(&self) -> bool {
        let lives = |position: u16| {
            let has_it =
                |(&number, hub): (&u16, &Hub)| hub.position() == Some(position) && !self.is_killed(number);
            self.hubs.iter().any(has_it)
        };
        // A manager that dies before it has saved that a standby has all chunks does not know it any more.
        let shares = self.manager.as_ref().map(Manager::saved_shares).unwrap_or_default();
        let is_held = |share: &Share| lives(share.served_by) && share.ready_standby().is_some_and(lives);
        !shares.is_empty() && shares.iter().all(is_held)
    }

    fn is_killed(&self, hub: u16) -> bool {
        self.killed.contains(&Process::Hub(hub))
    }

    /// Starts a hub that was killed as a new process, which knows nothing of what the former one has waited for.
    fn start_hub_again(&mut self, number: u16) {
        let process = Process::Hub(number);
        if self.killed.remove(&process) {
            self.agenda.retain(|event| !matches!(event, Event::Wake(of, _) if *of == process));
            self.paused.remove(&process);
            self.start_hub(number);
        }
    }

    /// Lets things go from one process to another again, unless another fault than this stops them.
    fn unblock(&mut self, number: usize, from: Process, to: Process) {
        let now = self.agenda.now();
        let is_other = |(other, &(at, fault)): (usize, &(Duration, Fault))| {
            other != number && fault.stops(from, to) && at <= now && at + fault.length() > now
        };
        if !self.scenario.faults.iter().enumerate().any(is_other) {
            self.network.block(from, to, false, &mut self.agenda);
        }
    }
}
