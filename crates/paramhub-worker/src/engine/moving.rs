//! Streams that are cut and go on another way, in jobs that are to go on.

use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use paramhub_core::wire::{Failure, Refusal};
use paramhub_transport::{Interest, StreamError};

use super::{Engine, Phase};
use crate::error::{WorkerError, panic_message};
use crate::lane::{Control, Lane};
use crate::notices::HubNotice;
use crate::resume::{Cut, News, Resumed, Teller, Ways};
use crate::retunes::Retunes;

/// A stream on which nothing was heard for so long is cut somewhere on its way: a hub sends a heartbeat a second. Should it have
/// been busy instead, moving its stream costs time and nothing else.
const SILENT: Duration = Duration::from_secs(4);

/// What the I/O thread of a job that goes on has beside the others'.
pub(crate) struct Moving {
    pub(crate) ways: Arc<Ways>,
    pub(crate) news: Receiver<News>,
    pub(crate) teller: Teller,
    pub(crate) retunes: Retunes,
    /// When this worker's program was last told of a move.
    pub(crate) told: Option<Instant>,
}

impl Engine {
    /// Whether a lane's stream may be opened again.
    pub(super) fn may_move(&self, index: usize) -> bool {
        let may_now = match &self.phase {
            Phase::Running | Phase::Leaving { .. } => true,
            // The goodbye is to arrive.
            Phase::Parting { outcome, .. } => outcome.is_ok(),
            Phase::Doomed { .. } => false,
        };
        let lane = &self.lanes[index];
        self.moving.is_some() && may_now && !lane.stream.is_shm() && !lane.closed
    }

    /// Whether an error on a lane's stream is the way's fault rather than the hub's: one that dies closes its streams or resets
    /// them.
    pub(super) fn is_cut(&self, index: usize, error: &StreamError) -> bool {
        matches!(error, StreamError::Io(_)) && self.may_move(index)
    }

    /// Does what others found out since.
    pub(super) fn hear_news(&mut self, now: Instant) -> Result<(), WorkerError> {
        while let Some(news) = self.moving.as_ref().and_then(|moving| moving.news.try_recv().ok()) {
            match news {
                News::Down { address, what } => self.interface_down(address, &what)?,
                News::Resumed { lane, outcome } => self.resumed(lane, outcome, now)?,
            }
        }
        Ok(())
    }

    fn interface_down(&mut self, address: IpAddr, what: &str) -> Result<(), WorkerError> {
        for index in 0..self.lanes.len() {
            if self.lanes[index].source == Some(address) && self.may_move(index) {
                self.cut(index, Some(what.to_owned()), String::new())?;
            }
        }
        Ok(())
    }

    /// Looks for streams that are silent.
    pub(super) fn move_silent(&mut self, now: Instant) -> Result<(), WorkerError> {
        for index in 0..self.lanes.len() {
            let silent = now.saturating_duration_since(self.lanes[index].last_heard);
            if silent > SILENT && self.may_move(index) {
                self.cut(index, None, format!("nothing was heard of it for {:.0} s", silent.as_secs_f64()))?;
            }
        }
        Ok(())
    }

    /// Opens a lane's stream again, on a thread of its own. The old one stays open until the new one is heard, so that the hub
    /// does not take its end for this process's.
    pub(super) fn cut(
        &mut self,
        index: usize,
        own: Option<String>,
        reason: String,
    ) -> Result<(), WorkerError> {
        let lane = &mut self.lanes[index];
        if std::mem::replace(&mut lane.is_moving, true) {
            return Ok(());
        }
        lane.polls_writable = false;
        lane.has_more = false;
        // Fails only if the descriptor is not in the set, and then there is nothing to take out.
        let _ = self.poller.remove(&lane.stream);
        let moving = self.moving.as_ref().expect("only such jobs move streams");
        let (ways, teller) = (Arc::clone(&moving.ways), moving.teller.clone());
        let cut = Cut { hub: Arc::clone(&lane.hub), source: lane.source, own, reason };
        let resume = move || {
            let outcome = ways.resume(index, &cut);
            teller.tell(News::Resumed { lane: index, outcome });
        };
        let started = std::thread::Builder::new().name("paramhub-resume".into()).spawn(resume);
        started.map(drop).map_err(|error| {
            let who = self.desk.shared.who.clone();
            WorkerError::System { who, what: "start a thread", reason: error.to_string().into() }
        })
    }

    fn resumed(
        &mut self,
        index: usize,
        outcome: Result<Box<Resumed>, WorkerError>,
        now: Instant,
    ) -> Result<(), WorkerError> {
        let is_parting = matches!(self.phase, Phase::Parting { .. });
        if !self.may_move(index) {
            self.lanes[index].closed |= is_parting;
            return Ok(());
        }
        match outcome {
            Ok(resumed) => self.take_over(index, *resumed, now),
            // All was answered; what befalls the job now is the others' business.
            Err(_) if is_parting => {
                self.lanes[index].closed = true;
                Ok(())
            }
            Err(WorkerError::Refused { who, hub, refusal: Refusal::JobEnded, message }) => {
                Err(WorkerError::Failed { who, hub, culprit: None, message })
            }
            Err(error) => {
                let shared = &self.desk.shared;
                let told = match &error {
                    WorkerError::InterfaceDown { what, .. } => format!("its {what}"),
                    error => format!("it is cut off: {error}"),
                };
                let told = Failure { rank: Some(shared.who.rank), message: told };
                self.give_up(error, &told, now);
                Ok(())
            }
        }
    }

    /// Puts a stream in the place of a lane's, and asks again for all that was not answered whole.
    fn take_over(&mut self, index: usize, resumed: Resumed, now: Instant) -> Result<(), WorkerError> {
        self.tell_of(&resumed, now)?;
        let retunes = &self.moving.as_ref().expect("only such jobs move streams").retunes;
        let lane = &mut self.lanes[index];
        lane.take_over(resumed, retunes, now);
        let chunks = self.desk.placement.chunks(lane.route);
        for (slot, &chunk) in (0..).zip(chunks) {
            if self.desk.requests.resend(chunk) {
                lane.ask(slot);
            }
        }
        for block in 0..self.desk.shared.blocks.len() {
            let place = self.desk.placement.locate(self.desk.requests.chunk_of_block(block));
            if let Some((route, slot)) = place
                && route == lane.route
                && self.desk.requests.resend_block(block)
            {
                lane.ask(slot);
            }
        }
        if matches!(self.phase, Phase::Parting { .. }) {
            lane.say_again(Control::Leave);
        }
        self.desk.shared.counters.moved_one();
        let added = self.poller.add(&lane.stream, index as u64, Interest::READABLE);
        added.map_err(|error| self.internal(&error))?;
        self.send(index, now)
    }
}

impl Engine {
    /// Tells this worker's program why its streams move, once for all that move together.
    fn tell_of(&mut self, resumed: &Resumed, now: Instant) -> Result<(), WorkerError> {
        let moving = self.moving.as_mut().expect("only such jobs move streams");
        if moving.told.replace(now).is_some_and(|before| now - before < SILENT) {
            return Ok(());
        }
        let shared = &self.desk.shared;
        let (rank, hub) = (shared.who.rank, Arc::clone(&resumed.hub));
        let from = resumed.source.map_or(String::new(), |source| format!(" from {source}"));
        let message = format!("rank {rank} goes on over {hub}{from}: {}", resumed.why);
        let notice = HubNotice { hub, rank: Some(rank), message };
        catch_unwind(AssertUnwindSafe(|| shared.notices.add(notice))).map_err(|panic| WorkerError::Callback {
            who: shared.who.clone(),
            message: panic_message(&*panic),
        })
    }
}

impl Lane {
    fn take_over(&mut self, resumed: Resumed, retunes: &Retunes, now: Instant) {
        self.retired = Some((std::mem::replace(&mut self.stream, resumed.stream), resumed.kept));
        (self.hub, self.source) = (resumed.hub, resumed.source);
        self.start_again();
        // They go ahead of every push that they hold for, as they did before.
        for (group, first_step, wire) in retunes.iter() {
            self.say_again(Control::Retune { group, first_step, wire: Arc::clone(wire) });
        }
        (self.last_heard, self.last_sent) = (now, now);
        (self.is_moving, self.deaf, self.blocked) = (false, false, false);
    }
}
