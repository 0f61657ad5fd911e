//! The placement of a job whose ranks agree, and the plan each of its hubs is sent.

use std::sync::Arc;

use axum::body::Bytes;
use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkMap;
use paramhub_core::composition::Composed;
use paramhub_core::consistency::Consistency;
use paramhub_core::scheme::{Book, Plan, Roster, Scheme};
use paramhub_core::service::{ErrorCode, HubCommand, JobOptions, JobPlan, ServiceError};
use paramhub_core::settings::Settings;

use crate::clock::Now;
use crate::error::refusal;
use crate::job::{Job, Outline, Placed};
use crate::registry::{Registry, blocking};

/// Chunks of a job. Placing one takes about 40 bytes, here and on every worker, so that this many take about 3 GB; at
/// the default chunk size they are 2 TiB of parameters.
const CHUNKS_MAX: u32 = 1 << 26;

struct Allocation {
    outline: Outline,
    /// Of every site.
    placed: Vec<Placed>,
    book: Arc<Book>,
    /// One for each hub, site by site in placement order.
    commands: Vec<Bytes>,
}

/// Places a job and asks its hubs to allocate.
pub(crate) async fn allocate(registry: Arc<Registry>, namespace: Namespace, settings: Arc<Settings>) {
    let Ok(turn) = registry.placing.acquire().await else { return };
    let Ok(plan) = registry
        .with(|world| Ok::<_, ServiceError>(plan_of(world.job(namespace)?, world.roster(namespace)?)))
    else {
        return;
    };
    // Every rank has been compared by now, so this takes the table and copies nothing.
    let made = blocking(move || place(plan(Arc::unwrap_or_clone(settings)))).await.and_then(|made| made);
    drop(turn);
    registry.with(|world| match made {
        Ok(Allocation { outline, placed, book, commands }) => {
            world.place(namespace, outline, placed, book, commands);
        }
        Err(refused) => {
            let failed =
                world.change(namespace, |job| ((), job.fail(refused.code, refused.message, Now::read())));
            // A job forgotten meanwhile needs no placement.
            drop(failed);
        }
    });
}

/// What a job's hubs must know but its settings.
fn plan_of(job: &Job, roster: Roster) -> impl FnOnce(Settings) -> (JobPlan, Roster) + Send + use<> {
    let (name, namespace, nonce) = (job.name.clone(), job.namespace, job.nonce);
    let (options, composition) = (job.options, job.composition());
    move |settings| {
        let composition = composition.expect("a job has sites before its ranks hand in settings");
        let composition = Arc::unwrap_or_clone(composition);
        let cluster = roster.cluster();
        (JobPlan { name, namespace, nonce, options, composition, site: 0, hub: 0, cluster, settings }, roster)
    }
}

/// Refuses layers that go another way than through the hubs where that does not fit the job's other wishes.
fn check_schemes(schemes: &Plan, options: &JobOptions) -> Result<(), String> {
    let first = |is_such: fn(Scheme) -> bool| schemes.layers.iter().find(|planned| is_such(planned.scheme));
    if let Some(planned) = first(|scheme| scheme == Scheme::Factors)
        && (options.checkpoint_every.is_some() || options.resume.is_some())
    {
        let (layer, scheme) = (&planned.layer.name, planned.scheme);
        return Err(format!(
            "its layer `{layer}` goes by {scheme}, so that its parameters are at the workers alone, but it is to have checkpoints, \
             which hubs write: use the scheme hub, or do without"
        ));
    }
    if let Some(planned) = first(|scheme| scheme == Scheme::Factors)
        && options.continues()
    {
        let (layer, scheme) = (&planned.layer.name, planned.scheme);
        return Err(format!(
            "its layer `{layer}` goes by {scheme} over connections between its workers, which cannot be resumed, but it is to go on \
             when an interface goes down: use the scheme hub, or on_interface_down = fail"
        ));
    }
    if let Some(planned) = first(|scheme| scheme != Scheme::Hub)
        && options.stragglers.leaves_out()
    {
        let (layer, scheme) = (&planned.layer.name, planned.scheme);
        return Err(format!(
            "its layer `{layer}` goes by {scheme}, for which every step waits for all workers' factors, but late workers are to be \
             left out: use the scheme hub, or stragglers = wait"
        ));
    }
    Ok(())
}

fn place((mut plan, roster): (JobPlan, Roster)) -> Result<Allocation, ServiceError> {
    let does_not_fit = |what: String| {
        refusal(ErrorCode::DoesNotFit, format!("job `{}` cannot be placed: {what}", plan.name))
    };
    let settings = &plan.settings;
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes)
        .map_err(|wrong| does_not_fit(wrong.to_string()))?;
    if map.len() > CHUNKS_MAX {
        let (chunks, bytes) = (map.len(), settings.chunk_bytes);
        return Err(does_not_fit(format!(
            "its keys make {chunks} chunks of {bytes} bytes, more than {CHUNKS_MAX}: choose a larger chunk size"
        )));
    }
    let is_flat = plan.composition.is_flat();
    if !is_flat && settings.consistency != Consistency::Synchronous {
        return Err(does_not_fit(format!(
            "its hubs serve racks or hosts, among which every step waits for everybody, but its consistency is {}: use \
             --reduction flat, or synchronous steps",
            settings.consistency
        )));
    }
    if !is_flat && settings.is_two_phase() {
        return Err(does_not_fit(
            "its steps are in two phases, for which all hubs must serve everybody: use --reduction flat, or do without \
             clipping by the global norm"
                .to_string(),
        ));
    }
    if !is_flat {
        settings.may_span_sites().map_err(|wrong| does_not_fit(wrong.to_string()))?;
    }
    if !is_flat && let Some(asking) = settings.forced_scheme() {
        return Err(does_not_fit(format!(
            "{asking} by name, for which all hubs must serve everybody: use --reduction flat, or the scheme auto"
        )));
    }
    let schemes = Plan::new(settings, &plan.cluster);
    check_schemes(&schemes, &plan.options).map_err(does_not_fit)?;
    let spreads = schemes.spreads(settings.keys.len());
    let composed = Composed::planned(&settings.keys, &map, plan.composition.clone(), &spreads)
        .map_err(|wrong| does_not_fit(wrong.to_string()))?;
    let placed = composed.placements.iter().map(|placement| Placed {
        hash: placement.hash().to_hex().to_string(),
        imbalance: placement.imbalance(),
    });
    let placed = placed.collect();
    drop((composed, map, spreads));
    let book = Arc::new(Book { job: plan.name.clone(), roster, plan: schemes });
    let outline = Outline {
        keys: settings.keys.len() as u64,
        bytes: settings.keys.bytes(),
        optimizer: settings.optimizer.name.clone(),
        consistency: settings.consistency.to_string(),
    };
    let sizes: Vec<usize> = plan.composition.sites.iter().map(|site| site.hubs.len()).collect();
    let mut commands = Vec::with_capacity(sizes.iter().sum());
    for (site, hubs) in (0..).zip(sizes) {
        for hub in 0..hubs as u32 {
            (plan.site, plan.hub) = (site, hub);
            let command = HubCommand::Allocate(Box::new(plan));
            commands.push(Bytes::from(serde_json::to_vec(&command).expect("a plan is plain data")));
            let HubCommand::Allocate(returned) = command else { unreachable!("it was made one above") };
            plan = *returned;
        }
    }
    Ok(Allocation { outline, placed, book, commands })
}
