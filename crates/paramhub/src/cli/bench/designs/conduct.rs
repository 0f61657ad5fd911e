//! The launcher's side: contestants take turns.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressStyle};

use super::cast::Cast;
use super::contestant::{Design, KeyOrder};
use super::mpi;
use super::part::{Alone, Part, Performed, Trained};
use super::timeline::Timeline;
use crate::cli::bench::conductor::{accept, create, open};
use crate::cli::bench::hosts::{Hosts, Site};
use crate::cli::bench::numbers::Verdict;
use crate::cli::bench::processes::{Named, take_part};
use crate::cli::bench::rounds::{median, order};
use crate::cli::bench::spec::{Line, Report, Spec};

/// Turns of collectives alone that say how long computation is to take.
const TRIALS: usize = 5;

/// What to do with so many ranks.
pub(super) struct Program {
    /// Of each contestant.
    pub(super) parts: Vec<Part>,
    pub(super) orders: Vec<KeyOrder>,
    /// What hubs must know.
    pub(super) spec: Spec,
    pub(super) hosts: Hosts,
    /// Where `mpirun` starts ranks.
    pub(super) sites: Vec<Site>,
    pub(super) rounds: u32,
    pub(super) pace: Pace,
}

/// How long layers compute.
#[derive(Clone, Copy)]
pub(super) enum Pace {
    /// So many times as long as their score says.
    Times(f64),
    /// So long that the first contestant's collectives, alone, take this share of it; the score says so many seconds.
    Share { share: f64, seconds: f64 },
}

/// What came of it.
pub(super) struct Measured {
    /// Times as long as the score says.
    pub(super) stretch: f64,
    pub(super) rows: Vec<Row>,
    pub(super) verdict: Verdict,
}

/// Of a contestant in one order of keys.
pub(super) struct Row {
    /// Its number.
    pub(super) contestant: usize,
    pub(super) order: KeyOrder,
    /// In every round, the mean of all ranks.
    pub(super) alone: Vec<Alone>,
    /// Of every round, every rank's.
    pub(super) turns: Vec<Vec<Performed>>,
    /// Every rank's, where they were asked for.
    pub(super) timelines: Vec<Timeline>,
}

impl Program {
    /// What starts all processes: those that need no `mpirun` rank by rank, then the hubs, then one `mpirun` for each of the others.
    pub(super) fn commands(&self, socket: &Path) -> anyhow::Result<Vec<Named>> {
        let workers = self.own().len() * self.spec.workers as usize;
        let mut commands = Vec::new();
        for seat in 0..workers + self.hosts.hubs().len() {
            let mut command = self.hosts.command(seat, workers)?;
            take_part(&mut command, socket, seat);
            let name = match seat < workers {
                true => {
                    let (rank, number) = (seat / self.own().len(), seat % self.own().len());
                    let host = self.hosts.name(seat, workers);
                    format!("{} of {}, {host}", rank, self.parts[self.own()[number]].contestant.label())
                }
                false => self.hosts.name(seat, workers),
            };
            commands.push(Named { name, command });
        }
        let mut seat = commands.len();
        for part in self.parts.iter().filter(|part| part.contestant.is_by_mpi()) {
            commands.push(mpi::command(part, &self.sites, socket, seat)?);
            seat += part.ranks as usize;
        }
        Ok(commands)
    }

    /// Contestants whose processes are started one by one.
    fn own(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&number| !self.parts[number].contestant.is_by_mpi()).collect()
    }

    /// Has everybody who comes to the listener enter.
    fn gather(&self, listener: &UnixListener, is_over: &AtomicBool) -> anyhow::Result<Company> {
        let (own, ranks) = (self.own(), self.spec.workers as usize);
        let workers = own.len() * ranks;
        let mut lines = accept(listener, self.parts.len() * ranks + self.hosts.hubs().len(), is_over)?;
        let mut by_mpi = lines.split_off(workers + self.hosts.hubs().len()).into_iter();
        let mut hubs = lines.split_off(workers);
        let url = open(&self.spec, &self.hosts, workers, &mut hubs)?;
        let mut casts: Vec<Cast> = self.parts.iter().map(|part| Cast::new(part.contestant)).collect();
        for (seat, line) in lines.into_iter().enumerate() {
            casts[own[seat % own.len()]].lines.push(line);
        }
        for (cast, part) in casts.iter_mut().zip(&self.parts) {
            if part.contestant.is_by_mpi() {
                cast.lines = by_mpi.by_ref().take(ranks).collect();
            }
            let job = match part.contestant.design {
                Design::Hub => Some(create(&mut hubs[0], "designs", self.hosts.options)?.job),
                _ => None,
            };
            cast.enter(part, &url, job.as_ref())?;
        }
        Ok(Company { casts, hubs })
    }

    /// Plays with the processes that come to the listener; `is_over` says that no more will.
    pub(super) fn play(&self, listener: &UnixListener, is_over: &AtomicBool) -> anyhow::Result<Measured> {
        let mut company = self.gather(listener, is_over)?;
        let stretch = match self.pace {
            Pace::Times(stretch) => stretch,
            Pace::Share { share, seconds } => {
                let trials = (0..TRIALS).map(|_| Ok(company.casts[0].alone()?.seconds()));
                let trials = trials.collect::<anyhow::Result<Vec<f64>>>()?;
                median(trials).unwrap_or(0.0) / (share * seconds)
            }
        };
        let numbers = 0..self.parts.len();
        let mut rows: Vec<Row> = numbers
            .flat_map(|contestant| self.orders.iter().map(move |&order| Row::new(contestant, order)))
            .collect();
        let progress = progress(u64::from(self.rounds) * rows.len() as u64);
        for round in 0..self.rounds {
            for number in order(round, rows.len()) {
                let row = &mut rows[number];
                let cast = &mut company.casts[row.contestant];
                row.alone.push(cast.alone()?);
                row.turns.push(cast.turn(row.order, stretch, false)?);
                progress.inc(1);
            }
        }
        progress.finish_and_clear();
        let mut verdict = Verdict::default();
        for row in &mut rows {
            let cast = &mut company.casts[row.contestant];
            if self.parts[row.contestant].is_traced {
                cast.turn(row.order, stretch, true)?;
                row.timelines = cast.show()?;
            }
            verdict = verdict.and(cast.verify()?);
        }
        company.part();
        Ok(Measured { stretch, rows, verdict })
    }

    /// Has all train once, in turns; of each contestant, every rank's.
    pub(super) fn train(
        &self,
        round: u32,
        listener: &UnixListener,
        is_over: &AtomicBool,
    ) -> anyhow::Result<Vec<Vec<Trained>>> {
        let mut company = self.gather(listener, is_over)?;
        let mut trained: Vec<Vec<Trained>> = self.parts.iter().map(|_| Vec::new()).collect();
        for number in order(round, self.parts.len()) {
            trained[number] = company.casts[number].train()?;
        }
        company.part();
        Ok(trained)
    }
}

/// Lines to all processes.
struct Company {
    casts: Vec<Cast>,
    hubs: Vec<Line>,
}

impl Company {
    /// Lets the ranks leave before the hubs end.
    fn part(mut self) {
        self.casts.iter_mut().flat_map(|cast| &mut cast.lines).for_each(Line::hang_up);
        for line in self.casts.iter_mut().flat_map(|cast| &mut cast.lines) {
            // Nothing comes but the end.
            let _ = line.hear::<Report>();
        }
        // The first has the others' manager.
        for hub in self.hubs.iter_mut().rev() {
            hub.hang_up();
            let _ = hub.hear::<Report>();
        }
    }
}

impl Row {
    fn new(contestant: usize, order: KeyOrder) -> Row {
        Row { contestant, order, alone: Vec::new(), turns: Vec::new(), timelines: Vec::new() }
    }
}

fn progress(turns: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a valid template");
    let progress = ProgressBar::new(turns).with_style(style);
    progress.set_message("turns");
    progress
}
