//! The HTTP interface: refusals, hostile bytes, the OpenAPI document and the metrics.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::*;
use paramhub_core::auth::Purpose;
use paramhub_core::service::{
    ErrorCode, HubEvent, InitService, JobCounters, JobOptions, OnWorkerLoss, ServiceError,
};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_manager::ManagerConfig;
use serde_json::Value;

/// Status and body of an answer.
fn ask(address: SocketAddr, request: &[u8]) -> (u16, String) {
    let answer = raw(address, request);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP answer: {answer:?}"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_string())
}

fn refused(address: SocketAddr, request: &[u8]) -> (u16, ServiceError) {
    let (status, body) = ask(address, request);
    (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("no ServiceError: {body}")))
}

#[test]
fn every_refusal_is_a_service_error_with_its_status() {
    let (manager, client) = start(config());
    let address = manager.address();
    let job = Job::create(&client, "j", 1);
    let connect = format!("/v1/jobs/{}/connect", job.namespace);
    let cases = [
        ("GET", "/nowhere".to_string(), "", 404, ErrorCode::NotFound),
        ("GET", "/v1/jobs/unknown".into(), "", 404, ErrorCode::NotFound),
        ("GET", "/v1/jobs/%ff".into(), "", 400, ErrorCode::BadRequest),
        ("PUT", "/v1/jobs".into(), "{}", 405, ErrorCode::NotFound),
        ("POST", "/v1/jobs".into(), "{", 400, ErrorCode::BadRequest),
        ("POST", "/v1/jobs".into(), "", 400, ErrorCode::BadRequest),
        ("POST", "/v1/jobs".into(), r#"{"name":"a","workers":1,"typo":1}"#, 400, ErrorCode::BadRequest),
        ("POST", "/v1/jobs".into(), r#"{"name":"a","workers":-1}"#, 400, ErrorCode::BadRequest),
        (
            "POST",
            "/v1/jobs".into(),
            r#"{"name":"a","workers":1,"options":{"lease_s":1e999}}"#,
            400,
            ErrorCode::BadRequest,
        ),
        (
            "POST",
            connect.clone(),
            r#"{"rank":0,"incarnation":"zz","proof":"zz"}"#,
            400,
            ErrorCode::BadRequest,
        ),
        ("POST", "/v1/jobs/short/connect".into(), "{}", 400, ErrorCode::BadRequest),
        ("POST", "/v1/hubs/7/poll".into(), r#"{"acknowledged":0,"wait_s":0}"#, 404, ErrorCode::NotFound),
        ("POST", "/v1/hubs/x/poll".into(), r#"{"acknowledged":0,"wait_s":0}"#, 400, ErrorCode::BadRequest),
        ("POST", "/v1/hubs".into(), r#"{"shape":{"interfaces":[]}}"#, 400, ErrorCode::BadRequest),
    ];
    for (method, path, body, status, code) in cases {
        let (answered, error) = refused(address, &request(method, &path, body));
        assert_eq!((answered, error.code), (status, code), "{method} {path} {body}: {}", error.message);
        assert!(!error.message.is_empty());
    }
    let untyped = b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}";
    assert_eq!(refused(address, untyped).0, 415);
}

#[test]
fn a_body_that_is_too_long_is_refused_before_it_is_read() {
    let (manager, client) = start(config());
    let job = Job::create(&client, "j", 1);
    let head = |path: &str, length: u64| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    let init = format!("/v1/jobs/{}/init", job.namespace);
    for (path, length) in
        [("/v1/jobs", (64 << 10) + 1), ("/v1/hubs", 1 << 40), (init.as_str(), (512 << 20) + 1)]
    {
        let (status, error) = refused(manager.address(), head(path, length).as_bytes());
        assert_eq!((status, error.code), (413, ErrorCode::BadRequest), "{path}");
        assert!(error.message.contains("longer than"), "{}", error.message);
    }
    let mut chunked =
        b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            .to_vec();
    for _ in 0..9 {
        chunked.extend_from_slice(b"2000\r\n");
        chunked.extend_from_slice(&[b' '; 0x2000]);
        chunked.extend_from_slice(b"\r\n");
    }
    assert_eq!(refused(manager.address(), &chunked).0, 413);
}

#[test]
fn random_bytes_on_the_port_harm_no_job() {
    let (manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let address = manager.address();
    let quit = Arc::new(AtomicBool::new(false));
    let noise = std::thread::spawn({
        let quit = quit.clone();
        move || {
            let mut state = seed | 1;
            let mut random = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            };
            let heads: [&[u8]; 4] = [
                b"",
                b"POST /v1/jobs HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
                b"POST /v1/hubs/0/poll HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 64\r\n\r\n",
                b"GET /v1/jobs/%00%ff%2e%2e HTTP/1.1\r\n",
            ];
            let mut connections = 0;
            while !quit.load(Ordering::Relaxed) || connections < 200 {
                let mut stream = TcpStream::connect(address).unwrap();
                let length = random() as usize % 512;
                let bytes: Vec<u8> = (0..length).map(|_| random() as u8).collect();
                let head = heads[random() as usize % heads.len()];
                // The manager may hang up at any time.
                let _ = stream.write_all(head).and_then(|()| stream.write_all(&bytes));
                connections += 1;
            }
            connections
        }
    });
    for round in 0..10 {
        let job = Job::create(&client, &format!("calm-{round}"), 2);
        assert!(job.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
        assert!(job.all_ranks(0..2, |job, rank| job.init(rank, settings(100))).iter().all(Result::is_ok));
        hub.finish(&job);
    }
    quit.store(true, Ordering::Relaxed);
    assert!(noise.join().unwrap() >= 200);
    assert_eq!(client.jobs().unwrap().len(), 10);
}

#[test]
fn clients_that_send_nothing_cannot_keep_others_out() {
    let (manager, client) = start(ManagerConfig { unauthenticated_max: 8, ..config() });
    let stalled: Vec<TcpStream> = (0..16)
        .map(|index| {
            let mut stream = TcpStream::connect(manager.address()).unwrap();
            if index % 2 == 0 {
                stream.write_all(b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n").unwrap();
            }
            stream
        })
        .collect();
    // Sixteen connections came before this one, and there are slots for eight: the oldest are evicted.
    assert!(client.jobs().unwrap().is_empty());
    drop(stalled);
}

#[test]
fn hundreds_of_ranks_wait_at_once() {
    const RANKS: u32 = 300;
    let (manager, client) = start(config());
    let job = Job::create(&client, "crowd", RANKS);
    let path = format!("/v1/jobs/{}/connect", job.namespace);
    let mut waiting: Vec<TcpStream> = (0..RANKS)
        .map(|rank| {
            let incarnation = paramhub_core::auth::Incarnation([rank as u8; 16]);
            let body = serde_json::to_string(&job.connect_request(rank, incarnation)).unwrap();
            let mut stream = TcpStream::connect(manager.address()).unwrap();
            stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
            stream.write_all(&request("POST", &path, &body)).unwrap();
            stream
        })
        .collect();
    eventually("all wait", || job.connected().len() == RANKS as usize);
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    for stream in &mut waiting {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[test]
fn the_openapi_document_lists_every_route_with_bodies_and_errors() {
    let (manager, _client) = start(config());
    let address = manager.address();
    let (status, body) = ask(address, &request("GET", "/openapi.json", ""));
    assert_eq!(status, 200);
    let document: Value = serde_json::from_str(&body).unwrap();
    let mut listed: Vec<String> = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            listed.push(format!("{} {path}", method.to_uppercase()));
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.keys().any(|status| status.starts_with('2')), "{method} {path}");
            for (status, response) in responses.iter().filter(|(status, _)| !status.starts_with('2')) {
                let schema = &response["content"]["application/json"]["schema"]["$ref"];
                assert_eq!(schema, "#/components/schemas/ServiceError", "{method} {path} {status}");
            }
            if method == "post" {
                assert!(
                    operation["requestBody"]["content"]["application/json"]["schema"].is_object(),
                    "{path}"
                );
            }
            // The document is about this server: no operation answers that there is no such route.
            let real = path
                .replace("{namespace}", &"0".repeat(32))
                .replace("{job}", "j")
                .replace("{hub}", "0")
                .replace("{token}", "t");
            let (status, answer) = ask(address, &request(&method.to_uppercase(), &real, "{}"));
            assert!(
                status != 405 && !answer.contains("lists every route"),
                "{method} {path}: {status} {answer}"
            );
        }
    }
    listed.sort();
    let routes = [
        "DELETE /v1/jobs/{job}",
        "DELETE /v1/teams/{team}",
        "DELETE /v1/tokens/{token}",
        "GET /",
        "GET /health",
        "GET /metrics",
        "GET /openapi.json",
        "GET /v1/authority",
        "GET /v1/hubs",
        "GET /v1/hubs/{hub}/drain",
        "GET /v1/jobs",
        "GET /v1/jobs/{job}",
        "GET /v1/jobs/{job}/best-scheme",
        "GET /v1/jobs/{job}/book",
        "GET /v1/jobs/{job}/membership",
        "GET /v1/jobs/{job}/move",
        "GET /v1/links",
        "GET /v1/state",
        "GET /v1/teams",
        "GET /v1/tokens",
        "POST /v1/authority",
        "POST /v1/hubs",
        "POST /v1/hubs/{hub}/drain",
        "POST /v1/hubs/{hub}/events",
        "POST /v1/hubs/{hub}/poll",
        "POST /v1/jobs",
        "POST /v1/jobs/{job}/move",
        "POST /v1/jobs/{job}/secret",
        "POST /v1/jobs/{namespace}/connect",
        "POST /v1/jobs/{namespace}/init",
        "POST /v1/jobs/{namespace}/leave",
        "POST /v1/links",
        "POST /v1/tokens",
        "PUT /v1/teams/{team}",
    ];
    assert_eq!(listed, routes);
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for reference in references(&document) {
        let name = reference.strip_prefix("#/components/schemas/").unwrap();
        assert!(schemas.contains_key(name), "{reference} leads nowhere");
    }
    let reason = &document["paths"]["/v1/jobs/{job}"]["delete"]["parameters"][1];
    assert_eq!((&reason["name"], &reason["in"]), (&"reason".into(), &"query".into()));
    assert_eq!(reason["schema"]["maxLength"], paramhub_core::service::STOP_REASON_CHARS_MAX);
    // The schemas describe secrets and tables as they travel, not as they are in memory.
    assert_eq!(schemas["Nonce"]["type"], "string");
    assert_eq!(schemas["KeyTable"]["type"], "array");
    assert_eq!(schemas["KeyTable"]["items"]["$ref"], "#/components/schemas/Key");
}

fn references(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, field)| match field {
                Value::String(target) if name == "$ref" => vec![target.clone()],
                field => references(field),
            })
            .collect(),
        Value::Array(items) => items.iter().flat_map(references).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_pages_of_people_and_probes_answer() {
    let (manager, _client) = start(config());
    let (status, index) = ask(manager.address(), &request("GET", "/", ""));
    assert!(status == 200 && index.contains("paramhub connection manager"), "{index}");
    assert_eq!(ask(manager.address(), &request("GET", "/health", "")), (200, "ok\n".to_string()));
    assert_eq!(ask(manager.address(), &request("HEAD", "/health", "")).0, 200);
}

#[test]
fn the_metrics_show_jobs_hubs_and_requests() {
    let (manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "team/counted", 1);
    job.connect(0).unwrap();
    job.init(0, settings(8)).unwrap();
    let counters = JobCounters {
        memory_bytes: 11,
        bytes_received: 22,
        bytes_sent: 33,
        contributions: 44,
        updates: 55,
        busy_ns: 66_000_000_000,
        streams_moved: 77,
        steps: 88,
    };
    hub.count(&job, counters);
    Job::create(&client, "idle", 1);
    let metrics = || ask(manager.address(), &request("GET", "/metrics", "")).1;
    let text = metrics();
    let labels = format!("{{job=\"team/counted\",namespace=\"{}\"}}", job.namespace);
    for line in [
        "paramhub_jobs{state=\"running\"} 1".to_string(),
        "paramhub_jobs{state=\"connecting\"} 1".into(),
        "paramhub_jobs{state=\"finished\"} 0".into(),
        "paramhub_rendezvous_waiting 0".into(),
        "paramhub_hubs 1".into(),
        format!("paramhub_job_memory_bytes{labels} 11"),
        format!("paramhub_job_received_bytes_total{labels} 22"),
        format!("paramhub_job_sent_bytes_total{labels} 33"),
        format!("paramhub_job_contributions_total{labels} 44"),
        format!("paramhub_job_updates_total{labels} 55"),
        format!("paramhub_job_core_seconds_total{labels} 66.0"),
        format!("paramhub_job_streams_moved_total{labels} 77"),
        format!("paramhub_job_left_out_total{},rank=\"0\"}} 5", labels.trim_end_matches('}')),
        "paramhub_hub_core_busy_seconds_total{hub=\"0\",core=\"1\"} 1.5".into(),
        "paramhub_hub_core_idle_seconds_total{hub=\"0\",core=\"0\"} 0.5".into(),
        "paramhub_manager_requests_total{method=\"POST\",route=\"/v1/jobs\",status=\"200\"} 2".into(),
        "# EOF".into(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    hub.finish(&job);
    let text = metrics();
    assert!(text.contains("paramhub_jobs{state=\"finished\"} 1"), "{text}");
    assert!(!text.contains("team/counted"), "an ended job leaves no series behind\n{text}");
}

#[test]
fn the_metrics_show_what_a_job_has_lost_that_goes_on() {
    let (manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let options = JobOptions { on_worker_loss: OnWorkerLoss::Continue, ..JobOptions::default() };
    let job = Job::create_with(&client, "goes-on", 2, options);
    let trained = || Settings { optimizer: OptimizerChoice::named("sgd"), ..settings(8) };
    for connected in job.all_ranks(0..2, |job, rank| job.connect(rank)) {
        connected.unwrap();
    }
    for begun in job.all_ranks(0..2, move |job, rank| job.init(rank, trained())) {
        begun.unwrap();
    }
    let name = |metric: &str| {
        format!("paramhub_job_{metric}_total{{job=\"goes-on\",namespace=\"{}\"}} ", job.namespace)
    };
    let value = |metric: &str| -> f64 {
        let text = ask(manager.address(), &request("GET", "/metrics", "")).1;
        let found = text.lines().find_map(|line| line.strip_prefix(&name(metric)));
        found.unwrap_or_else(|| panic!("no {metric} in\n{text}")).parse().unwrap()
    };
    assert_eq!(["workers_lost", "workers_joined", "incomplete_seconds"].map(value), [0.0; 3]);
    let reason = "rank 1 was lost: its process was killed".into();
    hub.report(HubEvent::WorkerLost { namespace: job.namespace, rank: 1, epoch: 1, reason });
    assert_eq!(["workers_lost", "workers_joined"].map(value), [1.0, 0.0]);
    eventually("time with a lost rank passes", || value("incomplete_seconds") > 0.0);
    // Another process takes the rank.
    let other = process(9);
    job.connect_as(1, other).unwrap();
    let proof = job.secrets.lock().unwrap()[&1].prove_rank(Purpose::Init, job.namespace, 1, other);
    let call = InitService { rank: 1, incarnation: other, proof, settings: trained() };
    let begun = client.init_service(job.namespace, &call, Duration::from_secs(60)).unwrap();
    assert_eq!(begun.resumed_step, Some(7));
    assert_eq!(["workers_lost", "workers_joined"].map(value), [1.0, 1.0]);
    let then = value("incomplete_seconds");
    assert_eq!(value("incomplete_seconds"), then, "no rank is lost any more");
    let losses = client.job("goes-on").unwrap().losses.unwrap();
    assert_eq!((losses.workers_lost, losses.workers_joined, losses.incomplete_seconds), (1, 1, then));
    hub.finish(&job);
}
