//! The information book of a job on a real hub, and the initial values of keys that its plan keeps out of the
//! hub's steps.

use paramhub_core::key::{Key, KeyTable};
use paramhub_core::scheme::{HubPlace, LayerSettings, Scheme, SchemeChoice};
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;

use crate::cluster::{Cluster, Transports, sgd};

#[test]
fn ranks_hub_and_manager_plan_alike_and_start_from_rank_0() {
    let cluster = Cluster::new(Transports::tcp(), 2);
    let keys = vec![
        Key::new("conv", [30_000]),
        Key::new("fc.weight", [256, 128]),
        Key::new("fc.bias", [256]),
        Key::new("whole", [200, 100]),
    ];
    let layers = vec![
        LayerSettings::fully_connected("fc", [1, 2], [256, 128, 4]),
        LayerSettings::fully_connected("whole", [3], [200, 100, 4]).by(SchemeChoice::Only(Scheme::Hub)),
    ];
    let optimizer = sgd(0.1, 0.9);
    let settings = Settings {
        layers,
        optimizer,
        scheme: SchemeChoice::Auto,
        ..Settings::new(KeyTable::new(keys).unwrap())
    };
    let sizes = [30_000, 256 * 128, 256, 200 * 100];
    let client = cluster.client.clone();
    let found = cluster.job("planned", 3).run(&settings, |job| {
        // Rank 0's values count, whatever the scheme. Streams are accepted only if hub and worker placed the
        // chunks alike.
        let of_rank = |size: usize| (0..size).map(|at| at as f32 + 0.25 * job.rank() as f32).collect();
        let mut model: Vec<Vec<f32>> = sizes.iter().map(|&size| of_rank(size)).collect();
        job.broadcast(&mut model, 0).unwrap();
        assert!(model.iter().flatten().all(|value| value.fract() == 0.0), "rank {}", job.rank());
        (job.information_book().clone(), client.information_book("planned").unwrap())
    });
    let (information_book, _) = &found[0];
    for (mine, managers) in &found {
        assert_eq!(mine, information_book);
        assert_eq!(managers, information_book);
    }
    let schemes: Vec<Scheme> = information_book.plan.rows().map(|planned| planned.scheme).collect();
    assert_eq!(schemes, [Scheme::Factors, Scheme::Hub, Scheme::Hub]);
    assert_eq!(information_book.roster.place, HubPlace::BesideWorkers, "all are on this machine");
    assert!(information_book.roster.workers.iter().all(|worker| !worker.host.is_empty()));
    assert!(
        information_book.roster.workers.iter().all(|worker| worker.address.is_none()),
        "none listens for the others"
    );
    let address = cluster.hub().addresses()[0].to_string();
    assert_eq!(information_book.roster.hubs[0].addresses, [address]);
}

#[test]
fn a_layer_that_cannot_be_exchanged_is_refused_with_what_can_be() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let keys = || KeyTable::new(vec![Key::new("fc.weight", [256, 128])]).unwrap();
    let layer =
        |scheme| LayerSettings::fully_connected("fc", [0], [256, 128, 4]).by(SchemeChoice::Only(scheme));
    let late = JobOptions { stragglers: "backup:1".parse().unwrap(), ..Default::default() };
    for (name, scheme, options, reason) in [
        ("late", Scheme::Factors, late, "every step waits for the factors of all workers"),
        ("late-whole", Scheme::FactorsToHub, late, "every step waits for the factors of all workers"),
    ] {
        let settings =
            Settings { layers: vec![layer(scheme)], optimizer: sgd(0.1, 0.0), ..Settings::new(keys()) };
        let ticket = cluster.job_with(name, 2, options);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (ticket, settings) = (&ticket, settings.clone());
                scope.spawn(move || {
                    let refused = ticket.join(rank, settings).map(drop).unwrap_err().to_string();
                    assert!(refused.contains("layer `fc`") && refused.contains(reason), "{refused}");
                });
            }
        });
    }
}
