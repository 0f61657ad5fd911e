//! The information book: filled in when every rank has called InitService, the same for all, and queried over
//! HTTP.

use crate::common::*;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::scheme::{HubPlace, InformationBook, LayerSettings, Plan, Scheme, SchemeChoice, Why};
use paramhub_core::service::ErrorCode;
use paramhub_core::settings::Settings;

fn model(scheme: SchemeChoice) -> Settings {
    let keys =
        vec![Key::new("conv", [64, 27]), Key::new("fc6.weight", [512, 512]), Key::new("fc6.bias", [512])];
    let layers = vec![LayerSettings::fully_connected("fc6", [1, 2], [512, 512, 8])];
    Settings { layers, scheme, ..Settings::new(KeyTable::new(keys).unwrap()) }
}

fn get(address: std::net::SocketAddr, path: &str) -> (String, serde_json::Value) {
    let answer = raw(address, &request("GET", path, ""));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), serde_json::from_str(body).unwrap())
}

#[test]
fn every_rank_and_the_manager_have_the_same_information_book() {
    let (manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "digits", 4);
    job.all_ranks(0..4, |job, rank| job.connect(rank).unwrap());
    assert_eq!(code(&client.information_book("digits")), ErrorCode::Missing);
    let answers = job.all_ranks(0..4, |job, rank| job.init(rank, model(SchemeChoice::Auto)).unwrap());
    let information_book = client.information_book("digits").unwrap();
    for answer in answers {
        // The plan as a worker makes it, from the answer and its own settings.
        let plan = Plan::new(&model(SchemeChoice::Auto), &answer.roster.cluster());
        assert_eq!(InformationBook { job: "digits".into(), roster: answer.roster, plan }, information_book);
    }
    assert_eq!(
        information_book.roster.place,
        HubPlace::Dedicated { width: 1.0 },
        "the hub reports no machine"
    );
    assert_eq!(information_book.roster.hubs[0].addresses, [hub.shape.interfaces[0].address.clone()]);
    assert_eq!(information_book.roster.workers[3].host, "testhost");
    let best = client.best_scheme("digits", "fc6").unwrap();
    assert_eq!((best.scheme, best.why), (Scheme::Factors, Why::Cheapest));
    assert_eq!(best.traffic[&Scheme::Factors].worker.unwrap().sent, 3.0 * 8.0 * 1024.0 * 4.0);

    let address = manager.address();
    let (status, found) =
        get(address, "/v1/jobs/digits/book?properties=place,layers.fc6.scheme,layers.fc6.samples");
    assert!(status.ends_with("200 OK"), "{status}");
    let expected = serde_json::json!({
        "place": {"dedicated": {"width": 1.0}}, "layers.fc6.scheme": "factors", "layers.fc6.samples": 8
    });
    assert_eq!(found, expected);
    for (path, wrong) in [
        ("book?properties=layers.fc9.scheme", "no layer `fc9`"),
        ("book?properties=batch", "no property `batch`"),
        ("best-scheme?layer=conv", "no layer `conv`"),
    ] {
        let (status, refused) = get(address, &format!("/v1/jobs/digits/{path}"));
        assert!(status.contains("404"), "{status}");
        assert!(refused["message"].as_str().unwrap().contains(wrong), "{refused}");
    }
    let (status, _) = get(address, &format!("/v1/jobs/digits/book?properties={}", ["hubs"; 65].join(",")));
    assert!(status.contains("400"), "{status}");
    hub.finish(&job);
    assert_eq!(code(&client.information_book("digits")), ErrorCode::JobEnded);
    manager.stop();
}

#[test]
fn layers_that_disagree_or_cannot_be_are_refused() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "digits", 2);
    job.all_ranks(0..2, |job, rank| job.connect(rank).unwrap());
    let mut torn = model(SchemeChoice::Auto);
    torn.layers[0].keys = vec![2, 1];
    let refused = job.init(0, torn);
    assert_eq!(code(&refused), ErrorCode::BadRequest);
    assert!(message(&refused).contains("layer `fc6` is fully connected"), "{}", message(&refused));
    let answers = job.all_ranks(0..2, |job, rank| {
        let mut mine = model(SchemeChoice::Auto);
        if rank == 1 {
            mine.layers[0].scheme = Some(SchemeChoice::Only(Scheme::Hub));
        }
        job.init(rank, mine)
    });
    for refused in answers {
        assert_eq!(code(&refused), ErrorCode::Disagreement);
        assert!(message(&refused).contains("disagree on layer 0"), "{}", message(&refused));
    }
}
