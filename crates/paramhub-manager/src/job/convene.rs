//! When the hubs at hand suffice for a job whose ranks are all there, and how they are arranged for it.

use std::sync::Arc;

use paramhub_core::composition::{ArrangeError, Arranged, Place, Reduction, arrange, choose};
use paramhub_core::placement::HubShape;
use paramhub_core::service::JobState;

use super::members::{Member, describe_hub};
use super::{Job, Stage, Transition, join_words};
use crate::hubs::OfferedHub;
use crate::probes::Core;

/// Hubs that a message lists before it only counts the rest.
const HUBS_LISTED: usize = 8;

impl Job {
    /// Whether only hubs are missing for the job to get on.
    pub(crate) fn is_complete(&self) -> bool {
        self.state == JobState::Connecting && self.seats.are_full()
    }

    /// Whether as many hubs have joined as the job waits for.
    pub(crate) fn suffice(&self, hubs: &[OfferedHub]) -> bool {
        count(hubs) >= self.hubs_needed()
    }

    /// Every rank is there and `hubs` have joined: if those are enough and serve everybody, the ranks may go on.
    pub(crate) fn convene(&mut self, hubs: Vec<OfferedHub>, core: &Core) -> Transition {
        if !self.is_complete() || !self.suffice(&hubs) {
            return Transition::None;
        }
        if self.only_meets() {
            return self.meet();
        }
        let (numbers, hubs): (Vec<u32>, Vec<(HubShape, Place)>) = hubs.into_iter().unzip();
        // A hub for those who are left out may yet come.
        let Ok((reduction, (composition, of_sites))) = self.arrange(&hubs, core) else {
            return Transition::None;
        };
        if !reduction.is_empty() {
            tracing::info!(job = self.name, "reduction: {reduction}");
        }
        self.reduction = reduction;
        let members =
            (0..).zip(of_sites).flat_map(|(site, of_site)| of_site.into_iter().map(move |hub| (hub, site)));
        self.members =
            members.map(|(hub, site)| Member::new(numbers[hub], hubs[hub].0.clone(), site)).collect();
        self.composition = Some(Arc::new(composition));
        self.state = JobState::Initialising;
        self.stage.send_replace(Stage::Initialising);
        Transition::Advanced
    }

    /// Which hubs the job still waits for; `None` where those at hand suffice.
    pub(super) fn hubs_missing(&self, hubs: &[OfferedHub]) -> Option<String> {
        let (timeout_s, needed) = (self.options.rendezvous_timeout_s, self.hubs_needed());
        let joined = count(hubs);
        if joined == 0 && needed == 1 {
            return Some(format!(
                "no hub has joined the connection manager within {timeout_s} s: start one with `paramhub hub`"
            ));
        }
        if joined >= needed {
            let hubs: Vec<(HubShape, Place)> = hubs.iter().map(|(_, hub)| hub.clone()).collect();
            let why = self.arrange(&hubs, &Core::Unneeded).err()?;
            return Some(format!("its hubs do not serve everybody after {timeout_s} s: {why}"));
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
            "of the {needed} hubs that it waits for {came} had joined the connection manager within {timeout_s} s: start \
             the others with `paramhub hub --manager URL`, or create the job for fewer"
        ))
    }

    /// Hubs without which the job does not begin.
    fn hubs_needed(&self) -> usize {
        self.options.hubs.map_or(1, |hubs| hubs as usize)
    }

    /// How the hubs are arranged, with what is said about the choice.
    fn arrange(&self, hubs: &[(HubShape, Place)], core: &Core) -> Result<(String, Arranged), ArrangeError> {
        let options = &self.options;
        let (reduction, said) = match core {
            _ if options.reduction != Reduction::Auto => {
                (options.reduction, format!("{}, as the job asks", options.reduction))
            }
            Core::Unneeded => (Reduction::Auto, String::new()),
            Core::Unknown(why) => (Reduction::Auto, format!("auto, by the hubs' places: {why}")),
            Core::Known { rate, source, hubs_source } => match choose(hubs, &self.places, *rate) {
                Some(choice) => {
                    let hub = choice.hub;
                    let said =
                        format!("auto: {choice} (core {source}; the hubs of a rack {hub}, {hubs_source})");
                    (choice.reduction, said)
                }
                None => (Reduction::Auto, String::new()),
            },
        };
        let arranged = arrange(hubs, &self.places, reduction, options.optimize_at)?;
        Ok((said, arranged))
    }
}

/// Hubs that jobs wait for: one that serves a single host helps no other, and may be another run's.
fn serving(hubs: &[OfferedHub]) -> impl Iterator<Item = &OfferedHub> {
    hubs.iter().filter(|(_, (_, place))| place.host.is_empty())
}

fn count(hubs: &[OfferedHub]) -> usize {
    serving(hubs).count()
}
