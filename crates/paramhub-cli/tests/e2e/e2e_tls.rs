//! The manager and its callers on hosts of their own: what a listener at the switch learns, and what is refused.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use paramhub::service::{AuthorityStatus, ServiceCreated};

use crate::common::cluster::{Cluster, HostRole, MANAGER_PORT, TOKEN};

fn has(heard: &[u8], secret: &str) -> bool {
    heard.windows(secret.len()).any(|bytes| bytes == secret.as_bytes())
}

/// The answer to a request in clear.
fn in_clear(cluster: &Cluster, head: &str) -> String {
    let to = format!("{}:{MANAGER_PORT}", cluster.manager_host.address);
    cluster.host(0).namespace().within(|| {
        let mut connection = TcpStream::connect(&to).unwrap();
        connection.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        connection.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        answer
    })
}

#[test]
fn a_listener_at_the_switch_learns_no_secret_of_a_whole_run() {
    let roles = [HostRole::HUB, HostRole::workers("", 1), HostRole::workers("", 1)];
    let Some(cluster) = Cluster::of_hosts(&roles) else { return };
    let listener = cluster.network().listen();
    let manager = cluster.start_manager();
    let hub = cluster.start_hub(0);
    hub.wait_for("hub ready: ");
    let created = cluster.operate_from(1, &["jobs", "create", "heard", "-n", "2", "--json"]);
    let created: ServiceCreated = serde_json::from_str(&created).unwrap();
    assert!(created.authority.is_some());
    let worker = |rank: usize| {
        let program = cluster.host(1 + rank).example("exchange", ["--steps", "3", "--elements", "5000"]);
        let program = program.env("PARAMHUB_URL", &cluster.url()).env("RANK", &rank.to_string());
        let program = program.env("PARAMHUB_JOB", &created.namespace.to_string());
        program.env("PARAMHUB_SECRET", &String::from(created.secret())).start()
    };
    for worker in [0, 1].map(worker) {
        worker.finish().expect_code(0);
    }
    drop((hub, manager));
    let heard = listener.stop();
    assert!(heard.len() > 100_000, "only {} bytes were heard", heard.len());
    assert!(has(&heard, "manager.paramhub.internal"), "the handshakes were heard");
    assert!(!has(&heard, TOKEN), "the admin token was heard");
    assert!(!has(&heard, &String::from(created.nonce)), "the job's secret was heard");
    for word in ["authorization: Bearer", "\"nonce\"", "\"secrets\"", "\"token\"", "\"proof\""] {
        assert!(!has(&heard, word), "{word} was heard");
    }
}

/// The listener of the other test would hear a secret: this one sends it in clear.
#[test]
fn a_call_in_clear_is_heard_and_refused_with_what_to_do() {
    let Some(cluster) = Cluster::of_hosts(&[HostRole::HUB]) else { return };
    let listener = cluster.network().listen();
    let _manager = cluster.start_manager();
    let answer = in_clear(
        &cluster,
        &format!("GET /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\r\n"),
    );
    assert!(has(&listener.stop(), TOKEN), "the listener works");
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    for part in ["https://HOST:PORT", "paramhub ca", "--plain-http"] {
        assert!(answer.contains(part), "{answer}");
    }
    // Programs of paramhub with a token do not call in clear, whatever the URL says.
    let url = cluster.url().replace("https://", "http://");
    let listed = cluster.host(0).paramhub(["jobs", "list", "--hub", &url]);
    let listed = listed.env("PARAMHUB_ADMIN_TOKEN", TOKEN).finish().expect_code(0);
    assert_eq!(listed.stdout.trim(), "no jobs");
    // Without one they get the manager's sentence.
    let refused = cluster.host(0).paramhub(["jobs", "list", "--hub", &url]).finish().expect_code(2);
    refused.expect_error(&["is called over TLS from other machines"]);
}

#[test]
fn a_manager_with_plain_http_serves_callers_in_clear_and_others() {
    let Some(cluster) = Cluster::of_hosts(&[HostRole::HUB.with_workers(1)]) else { return };
    let listen = format!("{}:{MANAGER_PORT}", cluster.manager_host.address);
    let manager = cluster.manager_host.paramhub(["manager", "--listen", &listen, "--plain-http"]);
    let manager = manager.env("PARAMHUB_ADMIN_TOKEN", TOKEN).start();
    assert!(manager.wait_for("manager ready: ").ends_with(&format!("http://{listen}")));
    assert!(in_clear(&cluster, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").ends_with("ok\n"));
    let created = cluster.operate_from(0, &["jobs", "create", "clear", "-n", "1", "--json"]);
    let created: ServiceCreated = serde_json::from_str(&created).unwrap();
    assert!(created.authority.is_none(), "workers are not told to use TLS");
    // A hub and workers of this release: the hub has a token and calls over TLS, the workers call in clear.
    let hub = cluster.start_hub(0);
    hub.wait_for("hub ready: ");
    for worker in cluster.start_job(&["worked"], &["--steps", "2", "--elements", "100"]) {
        worker.finish().expect_code(0);
    }
}

#[test]
fn the_printed_authority_is_the_one_that_can_be_replaced() {
    let Some(cluster) = Cluster::of_hosts(&[HostRole::HUB]) else { return };
    let _manager = cluster.start_manager();
    let printed = cluster.operate_from(0, &["ca"]);
    assert!(
        printed.starts_with("-----BEGIN CERTIFICATE-----")
            && printed.ends_with("-----END CERTIFICATE-----\n")
    );
    let status: AuthorityStatus = serde_json::from_str(&cluster.operate_from(0, &["ca", "--json"])).unwrap();
    assert_eq!((status.certificate.trim(), status.former), (printed.trim(), 0));
    let rotated = cluster.operate_from(0, &["ca", "rotate"]);
    assert_ne!(rotated, printed);
    assert_eq!(cluster.operate_from(0, &["ca"]), rotated);
}

#[test]
fn a_certificate_without_its_key_and_a_wrong_name_are_refused_at_the_start() {
    use crate::common::paramhub;
    let manager = || paramhub(["manager", "--listen", "127.0.0.1:0"]);
    let of = |variables: &[(&str, &str)]| {
        let program = variables.iter().fold(manager(), |program, (name, value)| program.env(name, value));
        program.finish().expect_code(2)
    };
    of(&[("PARAMHUB_TLS_CERTIFICATE", "a.pem")]).expect_error(&["--tls-certificate and --tls-key"]);
    of(&[("PARAMHUB_TLS_CERTIFICATE", "/no/such.pem"), ("PARAMHUB_TLS_KEY", "b.pem")])
        .expect_error(&["cannot be read from /no/such.pem", "No such file"]);
    of(&[("PARAMHUB_TLS_NAMES", "not a name")])
        .expect_error(&["`not a name` cannot be a name in a certificate"]);
}
