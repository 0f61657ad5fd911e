//! Where the hubs of a run are, as one option: PHub's four deployments (section 3.4), for `run` and `train`.

use paramhub::ManagerClient;
use paramhub_core::combinations::{self, Feature, Features};
use paramhub_core::composition::Reduction;
use paramhub_core::service::{HubStatus, JobOptions};

use super::Usage;
use crate::config::Deployment;

/// Returns whether the hubs run beside the workers and are started with them.
pub(super) fn is_colocated(deployment: Option<Deployment>) -> bool {
    matches!(deployment, Some(Deployment::Cc | Deployment::Cs))
}

/// The features of a deployment and of a number of hubs; `is_managed` says whether a connection manager is
/// named.
pub(super) fn asked(deployment: Option<Deployment>, hubs: Option<u32>, is_managed: bool) -> Features {
    let is = |wanted| deployment == Some(wanted);
    Features::of([
        (Feature::DeploymentCc, is(Deployment::Cc)),
        (Feature::DeploymentCs, is(Deployment::Cs)),
        (Feature::DeploymentNcc, is(Deployment::Ncc)),
        (Feature::DeploymentNcs, is(Deployment::Ncs)),
        (Feature::HubCount, hubs.is_some()),
        (Feature::SeveralHubs, hubs.is_some_and(|hubs| hubs > 1)),
        (Feature::NoHubs, hubs == Some(0)),
        (Feature::OwnHub, !is_managed),
    ])
}

/// How many dedicated hubs a job with these options waits for, of which `hubs` are asked for. `ncc` is refused where several hubs
/// would serve the job. Hubs of other racks and of other runs serve it only with the reduction `flat`.
pub(super) fn hubs_needed(
    deployment: Option<Deployment>,
    hubs: Option<u32>,
    options: &JobOptions,
    client: &ManagerClient,
) -> anyhow::Result<Option<u32>> {
    if deployment != Some(Deployment::Ncc) {
        return Ok(hubs);
    }
    // The workers inherit this variable and report the same rack.
    let own_rack = std::env::var("PARAMHUB_RACK").unwrap_or_default();
    let serves = |rack: &str| options.reduction == Reduction::Flat || rack.is_empty() || rack == own_rack;
    let hubs = client.hubs()?;
    let is_chosen = |hub: &HubStatus| options.hub_label.is_none_or(|label| hub.labels.contains(&label));
    let would_serve = |hub: &&HubStatus| {
        !hub.drained && hub.place.host.is_empty() && serves(&hub.place.rack) && is_chosen(hub)
    };
    let (of_racks, of_all): (Vec<_>, Vec<_>) =
        hubs.iter().filter(would_serve).partition(|hub| !hub.place.rack.is_empty());
    let most = options.max_hubs.map_or(usize::MAX, |most| most as usize);
    let joined = of_racks.len() + of_all.len().min(most);
    let several = Features::of([(Feature::DeploymentNcc, true), (Feature::SeveralHubs, joined > 1)]);
    combinations::check(several).map_err(|conflict| {
        Usage(format!(
            "{joined} hubs have joined the connection manager at {} and would serve the job (`paramhub hubs` lists them), but \
             {conflict}",
            client.url()
        ))
    })?;
    Ok(Some(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deployment_that_contradicts_the_rest_is_refused_with_what_to_do() {
        for (deployment, hubs, is_managed, part) in [
            (Deployment::Ncc, None, false, "--hub URL"),
            (Deployment::Ncs, Some(2), false, "start `paramhub hub` there"),
            (Deployment::Ncc, Some(2), true, "use ncs for several"),
            (Deployment::Ncs, Some(0), true, "or ask for hubs"),
            (Deployment::Cs, Some(2), true, "leave out --hubs"),
            (Deployment::Cc, Some(1), false, "leave out --hubs"),
        ] {
            let asked = asked(Some(deployment), hubs, is_managed);
            let refused = combinations::check(asked).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
        for (deployment, hubs, is_managed) in [
            (Some(Deployment::Ncc), Some(1), true),
            (Some(Deployment::Ncs), Some(3), true),
            (Some(Deployment::Cc), None, false),
            (None, Some(2), true),
        ] {
            combinations::check(asked(deployment, hubs, is_managed)).unwrap();
        }
    }
}
