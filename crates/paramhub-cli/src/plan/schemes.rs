//! `paramhub plan --schemes`: the scheme of each layer of a model.

use paramhub::Codec;
use paramhub::limits::WORKERS_MAX;
use paramhub::scheme::{Cluster, ElementBytes, HubPlace, Plan, SchemeChoice};
use paramhub::settings::Settings;
use paramhub_harness::models::{Model, element_type};

use super::PlanFlags;
use crate::config::Deployment;
use crate::{ExitCode, Usage, schemes};

pub(super) fn plan(flags: &PlanFlags) -> anyhow::Result<ExitCode> {
    let workers = flags.workers;
    if !(1..=WORKERS_MAX).contains(&workers) {
        return Err(Usage(format!("--workers {workers}: a job has 1 to {WORKERS_MAX}")).into());
    }
    if flags.racks > 1 {
        let problem =
            "--schemes: factors go between workers of one site, so plan for one rack: leave out --racks";
        return Err(Usage(problem.into()).into());
    }
    let rates = flags.rates;
    let hub_by_worker = rates.map_or(1.0, |rates| {
        rates.hub.unwrap_or(rates.worker).bits_per_second() / rates.worker.bits_per_second()
    });
    let width = f64::from(flags.interfaces) * hub_by_worker;
    let deployment = flags.deployment.unwrap_or(Deployment::Cs);
    let cluster = cluster(deployment, workers, flags.hubs, width);
    let samples = flags.batch.expect("--schemes requires it");
    let plan = of_model(flags.tensors()?, flags.dtype.unwrap_or(Codec::F32), samples, &cluster)?;
    if flags.json {
        println!("{}", serde_json::to_string_pretty(&plan)?);
    } else {
        print!("{}", schemes::text(&plan));
    }
    Ok(ExitCode::SUCCESS)
}

fn cluster(deployment: Deployment, workers: u32, hubs: Option<u32>, width: f64) -> Cluster {
    let (hubs, place) = match deployment {
        Deployment::Cc => (1, HubPlace::BesideWorkers),
        Deployment::Cs => (workers, HubPlace::BesideWorkers),
        Deployment::Ncc => (1, HubPlace::Dedicated { width }),
        Deployment::Ncs => (hubs.unwrap_or(workers), HubPlace::Dedicated { width }),
    };
    Cluster { workers, machines: workers, hubs, place, encoding: ElementBytes::F32 }
}

fn of_model(model: Model, dtype: Codec, samples: u64, cluster: &Cluster) -> anyhow::Result<Plan> {
    let layers = model.fully_connected(samples);
    let keys = model.keys(element_type(dtype)?, None, 1)?;
    let settings = Settings { layers, scheme: SchemeChoice::Auto, ..Settings::new(keys) };
    settings.check().map_err(|wrong| Usage(wrong.to_string()))?;
    Ok(Plan::new(&settings, cluster))
}

#[cfg(test)]
mod tests {
    use paramhub::scheme::Scheme;
    use paramhub_harness::models::names;

    use super::*;

    fn plan(model: &str, samples: u64, cluster: &Cluster) -> Plan {
        of_model(Model::named(model).unwrap(), Codec::F32, samples, cluster).unwrap()
    }

    #[test]
    fn auto_is_never_slower_than_the_hub() {
        use Deployment::{Cc, Cs, Ncc, Ncs};
        let mut gains = 0;
        for model in names() {
            for workers in 2..=16 {
                for deployment in [Cc, Cs, Ncc, Ncs] {
                    for width in [1.0, 4.0, 16.0] {
                        let cluster = cluster(deployment, workers, None, width);
                        for samples in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
                            let (planned, by_hub) = plan(model, samples, &cluster).costs();
                            let what =
                                || format!("{model}, {workers} workers, {deployment}, {samples} samples");
                            assert!(planned <= by_hub, "{}: {planned} > {by_hub}", what());
                            gains += u32::from(planned < by_hub);
                        }
                    }
                }
            }
        }
        assert!(gains > 1000, "factors pay in {gains} of these");
    }

    /// Section 5.1: "Poseidon reduces to PS" for GoogLeNet's only fully connected layer at a batch of 128 on 16 nodes.
    #[test]
    fn googlenet_goes_to_the_hub_alone() {
        assert!(plan("googlenet", 128, &Cluster::beside_workers(16)).is_hub_only());
        assert!(!plan("googlenet", 8, &Cluster::beside_workers(16)).is_hub_only());
    }

    #[test]
    fn vgg19_22k_sends_factors_of_all_three_layers() {
        let plan = plan("vgg19-22k", 32, &Cluster::beside_workers(8));
        assert!(plan.layers.iter().all(|planned| planned.scheme == Scheme::Factors));
        let text = schemes::text(&plan);
        assert!(text.contains("8 workers, 8 hubs beside workers"), "{text}");
        // 2 x 7 x 32 x (21841 + 4096) by factors, 14/8 x 2 x (21841 x 4096 + 21841) through the hubs.
        assert!(text.contains("- / - / 11.62M") && text.contains("- / - / 313.19M"), "{text}");
        assert!(text.contains("classifier.6: factors, it moves least"), "{text}");
    }

    /// A model of sequences has so many samples that factors are larger than matrices.
    #[test]
    fn sequences_go_through_the_hub() {
        let cluster = Cluster::beside_workers(8);
        assert!(plan("transformer-1.1b", 4 * 2048, &cluster).is_hub_only());
        assert!(!plan("transformer-1.1b", 32, &cluster).is_hub_only());
    }
}
