//! Steps that end without late workers.

use std::time::Instant;

use paramhub_core::exchange::Update;
use paramhub_core::job_control::LateNeighbour;

use super::Shard;
use super::timing::UpdateTiming;
use crate::core::layout::ChunkPlace;

/// A rank is reported again when it has missed this many times as many steps.
const REPORT_FACTOR: u64 = 10;

impl Shard {
    /// Answers a contribution that was dropped because its step is over: the sender gets the newest
    /// parameters.
    pub(super) fn answer_late(&mut self, index: u32, slot: ChunkPlace) {
        self.settle(index);
        if self.arenas.has_targets() {
            self.deliver(slot, false);
        }
    }

    /// Notes that a step of the slot begins.
    pub(super) fn begin_step(&mut self, index: u32) {
        if let UpdateTiming::WithQuorum(late) = &mut self.timing {
            late.deadlines.begin(index, self.now);
        }
    }

    /// Notes that a contribution has come or that a member has left: with the median contribution, the time
    /// for the others begins.
    pub(super) fn look_at_median(&mut self, index: u32) {
        if let UpdateTiming::WithQuorum(late) = &mut self.timing
            && self.exchange.has_median(index)
        {
            late.deadlines.median(index, self.now);
        }
    }

    /// Returns the time at which the next step ends by time.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.timing.late_members()?.deadlines.next()
    }

    /// Ends steps whose time is over, of chunks of about `elements` elements.
    pub(crate) fn end_late(&mut self, now: Instant, elements: usize) {
        self.now = now;
        let mut done = 0;
        while done < elements
            && let Some(index) = self.timing.late_members().and_then(|late| late.deadlines.due(now))
        {
            let update = self.exchange.end_step(index).expect("the median has come");
            done += self.end_step(index, update);
        }
    }

    /// Ends the steps that waited only for a worker that has left.
    pub(super) fn end_without_it(&mut self) {
        if self.timing.late_members().is_none() {
            return self.look_for_steps_to_end();
        }
        for index in 0..self.slots.len() as u32 {
            match self.exchange.end_if_complete(index) {
                Some(update) => drop(self.end_step(index, update)),
                None => self.look_at_median(index),
            }
        }
    }

    /// Updates a chunk with the contributions in its sum.
    pub(super) fn end_step(&mut self, index: u32, update: Update) -> usize {
        let slot = self.slots[index as usize];
        self.find_sources(index, slot, update.step);
        self.optimise(index, slot, update);
        slot.elements as usize
    }

    /// For each rank that was left out: of how many updates of chunks here.
    pub(crate) fn left_out(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let counted = (0..).zip(self.exchange.left_out()).filter(|&(_, &updates)| updates > 0);
        counted.flat_map(|(member, &updates)| {
            self.plan.ports.ranks_of(member).iter().map(move |&rank| (rank, updates))
        })
    }

    /// Does the same for all ranks, in order; empty if the job waits for all of them.
    pub(crate) fn left_out_by_rank(&self) -> Vec<u64> {
        let waits_for_all = self.exchange.left_out().is_empty();
        let mut by_rank = vec![0; if waits_for_all { 0 } else { self.plan.workers() as usize }];
        for (rank, updates) in self.left_out() {
            by_rank[rank as usize] += updates;
        }
        by_rank
    }

    /// A rank or a site to report as left out: first when it has missed a step's worth of updates, then each time that
    /// the number is [`REPORT_FACTOR`] times as large. So there are few reports, however long it goes on.
    pub(crate) fn late_neighbour(&mut self) -> Option<LateNeighbour> {
        let report_from = &mut self.timing.late_members_mut()?.report_from;
        let left_out = self.exchange.left_out();
        let member = left_out.iter().zip(report_from.iter()).position(|(missed, from)| missed >= from)?;
        let slots = self.slots.len() as u64;
        let steps = left_out[member] / slots;
        report_from[member] =
            REPORT_FACTOR.saturating_pow(steps.ilog(REPORT_FACTOR) + 1).saturating_mul(slots);
        Some(LateNeighbour {
            neighbour: self.plan.ports.member(member as u32),
            steps,
            of: (self.counters.updates / slots).max(steps),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use paramhub_core::composition::{
        BetweenSites, Composition, Crossing, Neighbour, OptimizeAt, Site, SiteId,
    };
    use paramhub_core::hyperparameters::Hyperparameters;
    use paramhub_core::key::{Key, KeyTable};
    use paramhub_core::settings::{OptimizerChoice, Settings};
    use paramhub_core::stragglers::Stragglers;
    use paramhub_core::wire::{Header, Notice, Operation};
    use paramhub_transport::Outgoing;

    use super::super::tests::{answer, header, push_pull, shard_with, take, wire};
    use super::*;
    use crate::core::outbox::{BATCH_FRAMES, Begun, NextFrame, Source};
    use crate::core::stepped_hub::{one_core, plan_at};

    /// Three workers, chunks of two elements that begin at zero, and an optimizer that subtracts the gradient
    /// as it is.
    fn late_shard(stragglers: Stragglers, chunks: u64) -> Shard {
        let keys = (0..chunks).map(|key| Key::new(format!("w{key}"), [2])).collect();
        let mut shard = shard_with(3, keys, stragglers, |settings| {
            let hyperparameters = Hyperparameters { learning_rate: 1.0, ..Default::default() };
            let hyperparameters = Some(hyperparameters);
            settings.optimizer = OptimizerChoice { hyperparameters, ..OptimizerChoice::named("sgd") };
        });
        let zeros = wire(&[0.0, 0.0]);
        for chunk in 0..chunks as u32 {
            take(&mut shard, 0, &header(Operation::Initialise, chunk, 0, &zeros), &zeros).unwrap();
            let slot = shard.outboxes[0].applied.pop_first().unwrap();
            shard.answer_begun(0, slot);
        }
        shard
    }

    #[test]
    fn a_frame_that_has_begun_keeps_its_values_when_a_step_ends_without_its_reader() {
        let mut shard = late_shard(Stragglers::Backup(1), 1);
        for rank in [0, 1] {
            push_pull(&mut shard, rank, 0, 0, &[1.0, 2.0]).unwrap();
        }
        let (begun, values) = answer(&mut shard, 0);
        assert_eq!((begun.step, &values[..]), (1, &[-1.0, -2.0][..]));
        // Rank 0 reads slowly; the others go on without it.
        shard.outboxes[0].begun = Some(Begun { header: begun, source: Source::Model(0) });
        push_pull(&mut shard, 2, 0, 0, &[100.0, 100.0]).unwrap();
        let (header, values) = answer(&mut shard, 2);
        assert_eq!((header.step, &values[..]), (1, &[-1.0, -2.0][..]), "dropped whole, and answered at once");
        push_pull(&mut shard, 2, 0, 1, &[3.0, 3.0]).unwrap();
        answer(&mut shard, 1);
        push_pull(&mut shard, 1, 0, 1, &[5.0, 5.0]).unwrap();
        let source = shard.outboxes[0].begun.unwrap().source;
        assert_eq!((source, shard.of_source(0, source)), (Source::Spill, &wire(&[-1.0, -2.0])[..]));
        assert_eq!(answer(&mut shard, 1).1, [-5.0, -6.0], "the mean of 3 and 5");
        push_pull(&mut shard, 0, 0, 1, &[7.0, 7.0]).unwrap();
        let (header, values) = answer(&mut shard, 0);
        assert_eq!((header.step, &values[..]), (2, &[-5.0, -6.0][..]), "its turn had come and gone");
        assert_eq!(shard.left_out_by_rank(), [1, 0, 1]);
        assert_eq!((shard.counters().contributions, shard.counters().updates), (4, 2));
    }

    #[test]
    fn a_step_ends_so_much_after_the_median_as_the_fraction_says() {
        let mut shard = late_shard(Stragglers::Drop(0.5), 3);
        let begun = shard.now;
        let at = |ms: u64| begun + Duration::from_millis(ms);
        // Chunk 2 is complete in time, chunk 1 has one contribution of three, and chunk 0 two.
        for (rank, chunk, ms) in [(0, 1, 60), (0, 0, 60), (0, 2, 60), (1, 2, 80), (2, 2, 90), (1, 0, 100)] {
            shard.now = at(ms);
            push_pull(&mut shard, rank, chunk, 0, &[1.0, 3.0 * rank as f32]).unwrap();
        }
        assert_eq!(shard.next_deadline(), Some(at(150)));
        shard.end_late(at(149), usize::MAX);
        assert_eq!(shard.counters().updates, 1);
        shard.end_late(at(150), usize::MAX);
        assert_eq!(
            (shard.counters().updates, shard.next_deadline()),
            (2, None),
            "no rank is the median of chunk 1"
        );
        assert_eq!(shard.left_out_by_rank(), [0, 0, 1]);
        let frames: Vec<_> = (0..2).map(|_| answer(&mut shard, 1)).collect();
        assert_eq!(frames[0].1, [-1.0, -1.5], "of two");
        assert_eq!(frames[1].1, [-1.0, -3.0], "of three");
    }

    #[test]
    fn reports_of_a_late_rank_stay_few_however_long_it_is_late() {
        let mut shard = late_shard(Stragglers::Backup(1), 2);
        let mut reported = Vec::new();
        for step in 0..250 {
            for chunk in 0..2 {
                for rank in [0, 1] {
                    push_pull(&mut shard, rank, chunk, step, &[0.0, 0.0]).unwrap();
                }
            }
            for rank in [0, 1, 0, 1] {
                answer(&mut shard, rank);
            }
            reported.extend(std::iter::from_fn(|| shard.late_neighbour()));
        }
        let expected =
            [1, 10, 100].map(|steps| LateNeighbour { neighbour: Neighbour::Worker(2), steps, of: steps });
        assert_eq!(reported, expected);
    }

    /// Rank 0 at a hub that owns all chunks, and a site below it with ranks 1 and 2: the shard of either.
    fn sites_shard(site: SiteId) -> Shard {
        let sites = [(&[0][..], None), (&[1, 2][..], Some(0))].map(|(workers, parent)| Site {
            name: String::new(),
            hubs: vec![one_core()],
            workers: workers.to_vec(),
            parent,
        });
        let composition = Composition {
            sites: sites.into(),
            crossing: Crossing::Sharded,
            optimize_at: OptimizeAt::EverySite,
            between_sites: BetweenSites::F32,
        };
        let hyperparameters = Some(Hyperparameters { learning_rate: 1.0, ..Default::default() });
        let optimizer = OptimizerChoice { hyperparameters, ..OptimizerChoice::named("sgd") };
        let keys = KeyTable::new(vec![Key::new("w", [2])]).unwrap();
        let settings = Settings { optimizer, ..Settings::new(keys) };
        Shard::new(plan_at(composition, site, Stragglers::Backup(2), settings)).unwrap()
    }

    #[test]
    fn a_site_that_starts_late_starts_with_the_newest_parameters() {
        let mut shard = sites_shard(0);
        let below = 1;
        let zeros = wire(&[0.0, 0.0]);
        take(&mut shard, 0, &header(Operation::Initialise, 0, 0, &zeros), &zeros).unwrap();
        let slot = shard.outboxes[0].applied.pop_first().unwrap();
        shard.answer_begun(0, slot);
        for step in 0..3 {
            push_pull(&mut shard, 0, 0, step, &[1.0, 2.0]).unwrap();
            answer(&mut shard, 0);
        }
        let mut picks = [NextFrame::Message; BATCH_FRAMES];
        let mut starts = Vec::new();
        while starts.len() < 2 && shard.pick(below, &mut picks) > 0 {
            let mut frames = [Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] }];
            shard.frames(below, &picks[..1], &mut frames);
            let (sent, payload) = (frames[0].header, frames[0].payload.to_vec());
            shard.note_sent(below, &picks[..1], &[sent], 1, 1);
            starts.push((sent.operation, sent.step, payload));
        }
        assert_eq!(starts, [(Operation::Initialise, 3, wire(&[-3.0, -6.0]))]);
        // Rank 0 alone is enough to end a step, and so is the site, which counts as two.
        push_pull(&mut shard, below, 0, 3, &[2.0, 4.0]).unwrap();
        let (header, values) = answer(&mut shard, below);
        assert_eq!((header.step, &values[..]), (4, &[-4.0, -8.0][..]), "the mean of two");
        assert_eq!(shard.left_out_by_rank(), [1, 3, 3]);
    }

    #[test]
    fn a_site_that_was_late_moves_on_and_passes_on_what_it_is_told() {
        let mut shard = sites_shard(1);
        let above = 2;
        let zeros = wire(&[0.0, 0.0]);
        take(&mut shard, above, &header(Operation::Initialise, 0, 0, &zeros), &zeros).unwrap();
        for rank in [0, 1] {
            push_pull(&mut shard, rank, 0, 0, &[1.0, 2.0]).unwrap();
        }
        let (sum, values) = answer(&mut shard, above);
        assert_eq!((sum.operation, &values[..]), (Operation::PushPull, &[2.0, 4.0][..]));
        let newest = wire(&[-7.0, -8.0]);
        take(&mut shard, above, &header(Operation::Parameters, 0, 7, &newest), &newest).unwrap();
        for rank in [0, 1] {
            let (header, values) = answer(&mut shard, rank);
            assert_eq!((header.step, &values[..]), (7, &[-7.0, -8.0][..]));
            push_pull(&mut shard, rank, 0, 7, &[1.0, 1.0]).unwrap();
        }
        let back = take(&mut shard, above, &header(Operation::Parameters, 0, 7, &newest), &newest);
        assert!(back.is_err(), "a version that the site had");

        let notice = Notice { rank: None, message: "you are late".into() }.encode();
        take(&mut shard, above, &header(Operation::Notice, 0, 0, &notice), &notice).unwrap();
        for rank in [0, 1] {
            let (header, payload) = shard.outboxes[rank].messages.front().unwrap();
            assert_eq!((header.operation, payload), (Operation::Notice, &notice));
        }
        assert!(shard.outboxes[above as usize].messages.is_empty());
    }
}
