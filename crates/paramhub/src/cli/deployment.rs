//! Where the hubs of a run are, by one key: PHub's four deployments (section 3.4), for `run` and `train`.

use paramhub_core::composition::Reduction;

use super::Usage;
use crate::ManagerClient;
use crate::config::Deployment;

/// Whether the hubs stand beside the workers, and are started with them.
pub(super) fn is_colocated(deployment: Option<Deployment>) -> bool {
    matches!(deployment, Some(Deployment::Cc | Deployment::Cs))
}

/// Refuses what contradicts itself; `is_managed` says whether a connection manager is named.
pub(super) fn check(
    deployment: Option<Deployment>,
    hubs: Option<u32>,
    is_managed: bool,
) -> Result<(), Usage> {
    let refused = |problem: String| Err(Usage(problem));
    let Some(deployment) = deployment else { return Ok(()) };
    match (deployment, hubs) {
        (Deployment::Ncc | Deployment::Ncs, _) if !is_managed => refused(format!(
            "--deployment {deployment} has its hubs on hosts of their own: start `paramhub hub` there, and name their \
             connection manager with --hub URL"
        )),
        (Deployment::Ncc, Some(2..)) => {
            refused("--deployment ncc is one dedicated hub: use ncs for several, or leave out --hubs".into())
        }
        (Deployment::Cc | Deployment::Cs, Some(_)) => refused(format!(
            "--deployment {deployment} says itself how many hubs there are: leave out --hubs"
        )),
        _ => Ok(()),
    }
}

/// How many hubs a job on dedicated ones waits for. `ncc` is refused where more than one would serve it, which the hubs of other
/// racks, and those of other runs, do with the reduction `flat` only.
pub(super) fn hubs_needed(
    deployment: Option<Deployment>,
    hubs: Option<u32>,
    reduction: Reduction,
    client: &ManagerClient,
) -> anyhow::Result<Option<u32>> {
    if deployment != Some(Deployment::Ncc) {
        return Ok(hubs);
    }
    // As the workers name it, who inherit it.
    let own_rack = std::env::var("PARAMHUB_RACK").unwrap_or_default();
    let serves = |rack: &str| reduction == Reduction::Flat || rack.is_empty() || rack == own_rack;
    let hubs = client.hubs()?;
    let joined = hubs.iter().filter(|hub| hub.place.host.is_empty() && serves(&hub.place.rack)).count();
    if joined > 1 {
        let problem = format!(
            "--deployment ncc is one dedicated hub, and {joined} have joined the connection manager at {}, all of which \
             would serve the job: stop the others (`paramhub hubs` lists them), or use --deployment ncs",
            client.url()
        );
        return Err(Usage(problem).into());
    }
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
            (Deployment::Cs, Some(2), true, "leave out --hubs"),
            (Deployment::Cc, Some(1), false, "leave out --hubs"),
        ] {
            let refused = check(Some(deployment), hubs, is_managed).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
        for (deployment, hubs, is_managed) in [
            (Some(Deployment::Ncc), Some(1), true),
            (Some(Deployment::Ncs), Some(3), true),
            (Some(Deployment::Cc), None, false),
            (None, Some(2), true),
        ] {
            check(deployment, hubs, is_managed).unwrap();
        }
    }
}
