//! This checks whether the hubs suffice for a job whose ranks are all there, and arranges them for it.

use std::sync::Arc;

use crate::composition::{
    ArrangeError, Arranged, BetweenSites, OptimizeAt, Place, Reduction, arrange, choose,
};
use crate::placement::HubShape;
use crate::service::JobState;

use super::job_hubs::{JobHub, describe_hub};
use super::{Job, JobPhase, Transition, join_words};
use crate::membership::hubs::OfferedHub;
use crate::membership::probes::CoreBandwidth;

/// The number of hubs that a message lists before it only counts the rest.
const HUBS_LISTED: usize = 8;

impl Job {
    /// Returns whether the job needs nothing but hubs to advance.
    pub(crate) fn is_complete(&self) -> bool {
        self.state == JobState::Connecting && self.assignments.are_all_assigned()
    }

    /// Returns whether as many hubs have joined as the job waits for.
    pub(crate) fn suffice(&self, hubs: &[OfferedHub]) -> bool {
        count(hubs) >= self.hubs_needed() && !self.awaits_former_part(hubs.iter().map(|(hub, _)| *hub))
    }

    /// Every rank is there and `hubs` have joined. If these are enough and serve all ranks, the job advances.
    pub(crate) fn begin_initialising(&mut self, hubs: Vec<OfferedHub>, core: &CoreBandwidth) -> Transition {
        if !self.is_complete() || !self.suffice(&hubs) {
            return Transition::None;
        }
        if self.is_rendezvous_only() {
            return self.begin_without_hubs();
        }
        let (numbers, hubs): (Vec<u32>, Vec<(HubShape, Place)>) = hubs.into_iter().unzip();
        // A hub for the ranks that no hub serves, or for a rack, may still join.
        let Ok((reduction, (composition, of_sites))) = self.arrange(&hubs, core) else {
            return Transition::None;
        };
        self.reduction = reduction;
        let job_hubs =
            (0..).zip(of_sites).flat_map(|(site, of_site)| of_site.into_iter().map(move |hub| (hub, site)));
        self.job_hubs =
            job_hubs.map(|(hub, site)| JobHub::new(numbers[hub], hubs[hub].0.clone(), site)).collect();
        self.composition = Some(Arc::new(composition));
        if self.has_several_sites() && self.options.program_state_bytes > 0 {
            // No hub has streams of all ranks. A rank that would save its state hears that there is no room for it.
            self.options.program_state_bytes = 0;
            self.message = "it keeps no program states, since its hubs serve racks or hosts".to_owned();
        }
        self.state = JobState::Initialising;
        self.phase = JobPhase::Initialising;
        Transition::Advanced
    }

    /// The hubs that the job still waits for; `None` if those that have joined suffice.
    pub(in crate::membership) fn hubs_missing(&self, hubs: &[OfferedHub]) -> Option<String> {
        let (timeout_s, needed) = (self.connect_timeout_s(), self.hubs_needed());
        let joined = count(hubs);
        let (labelled, flag) = match self.options.hub_label {
            Some(label) => (format!(" with the label `{label}`"), format!(" --label {label}")),
            None => (String::new(), String::new()),
        };
        if joined == 0 && needed == 1 {
            return Some(format!(
                "no hub{labelled} has joined the connection manager within {timeout_s} s: start one with `paramhub hub{flag}`"
            ));
        }
        if joined >= needed {
            let hubs: Vec<(HubShape, Place)> = hubs.iter().map(|(_, hub)| hub.clone()).collect();
            let why = self.arrange(&hubs, &CoreBandwidth::Unneeded).err()?;
            return Some(format!("its hubs do not suffice after {timeout_s} s: {why}"));
        }
        let listed: Vec<String> =
            serving(hubs).take(HUBS_LISTED).map(|(hub, (shape, _))| describe_hub(*hub, shape)).collect();
        let more = joined - listed.len();
        let came = match (joined, more) {
            (0, _) => "none".to_string(),
            (count, 0) => format!("only {count}, {}", join_words(&listed)),
            (count, more) => format!("only {count}, {} and {more} more", listed.join(", ")),
        };
        Some(format!(
            "of the {needed} hubs{labelled} that it waits for {came} had joined the connection manager within {timeout_s} s: \
             start the others with `paramhub hub{flag} --manager URL`, or create the job for fewer"
        ))
    }

    /// Returns the number of hubs that the job needs to begin.
    fn hubs_needed(&self) -> usize {
        // One that begins again goes on with what is left, and gets its standbys when hubs are there.
        let has_standbys = self.options.has_standbys();
        if has_standbys && self.has_begun_again() {
            return 1;
        }
        self.options.hubs.map_or(if has_standbys { 2 } else { 1 }, |hubs| hubs as usize)
    }

    /// Returns the arrangement of the hubs, and the reason of that choice for messages.
    fn arrange(
        &self,
        hubs: &[(HubShape, Place)],
        core: &CoreBandwidth,
    ) -> Result<(String, Arranged), ArrangeError> {
        let options = &self.options;
        let (reduction, mut summary) = match core {
            _ if options.reduction != Reduction::Auto => {
                (options.reduction, format!("{}, as the job asks", options.reduction))
            }
            CoreBandwidth::Unneeded => (Reduction::Auto, String::new()),
            // The condition counts sums in f32.
            _ if options.between_sites != BetweenSites::F32 => {
                let why = format!("sums cross in {}, as the job asks", options.between_sites);
                (Reduction::Auto, format!("auto, by the hubs' places: {why}"))
            }
            CoreBandwidth::Unknown(why) => (Reduction::Auto, format!("auto, by the hubs' places: {why}")),
            CoreBandwidth::Known { rate, source, hubs_source } => match choose(hubs, &self.places, *rate) {
                Some(choice) => {
                    let hub = choice.hub;
                    let summary =
                        format!("auto: {choice} (core {source}; the hubs of a rack {hub}, {hubs_source})");
                    (choice.reduction, summary)
                }
                None => (Reduction::Auto, String::new()),
            },
        };
        let arranged = arrange(hubs, &self.places, reduction, options.optimize_at, options.between_sites)?;
        // The table of combinations refuses an option without effect, but cannot know what `auto` chooses.
        if arranged.0.is_flat() && options.optimize_at == OptimizeAt::Owner && !summary.is_empty() {
            summary.push_str("; `optimize_at = owner` has no effect, since there is one site");
        }
        Ok((summary, arranged))
    }
}

/// The hubs that jobs count. A hub that serves a single host helps no other, and may be another run's.
fn serving(hubs: &[OfferedHub]) -> impl Iterator<Item = &OfferedHub> {
    hubs.iter().filter(|(_, (_, place))| place.host.is_empty())
}

fn count(hubs: &[OfferedHub]) -> usize {
    serving(hubs).count()
}
