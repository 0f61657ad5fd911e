//! Teams that share a hub, and the manifests with which they do so in Kubernetes.

use std::path::Path;

use crate::common::paramhub;

#[test]
fn teams_share_a_hub_within_their_quotas() {
    let token = "the-first-token";
    let arguments = [
        "hub",
        "--cores",
        "2",
        "--listen",
        "127.0.0.1:0",
        "--manager",
        "127.0.0.1:0",
        "--admin-token-file",
        "token",
    ];
    let hub = paramhub(arguments).file("token", token).start();
    let ready = hub.wait_for("hub ready: ");
    let url = ready.split_whitespace().find(|word| word.starts_with("http://")).expect("a URL").to_owned();
    let with = |token: &str, arguments: &[&str]| {
        paramhub(arguments.to_vec()).env("PARAMHUB_ADMIN_TOKEN", token).env("PARAMHUB_URL", &url)
    };
    let admin = |arguments: &[&str]| with(token, arguments).finish().expect_code(0).stdout;
    let quotas = ["--jobs", "2", "--weight", "3", "--memory", "1G", "--streams", "4"];
    assert_eq!(
        admin(&[&["teams", "set", "vision"], &quotas[..]].concat()),
        "team vision: 2 jobs at once, weight 3, 1024 MiB of memory, 4 streams\n"
    );
    admin(&["teams", "set", "speech"]);
    let [vision, speech] = ["vision", "speech"]
        .map(|team| admin(&["tokens", "create", team, "--role", "team", "--team", team]).trim().to_owned());

    let exchange = Path::new(env!("CARGO_BIN_EXE_paramhub")).with_file_name("examples").join("exchange");
    let exchange = exchange.to_str().unwrap();
    let run = |token: &str, name: &str, workers: &str| {
        with(token, &["run", "-n", workers, "--name", name, "--", exchange, "--steps", "5"]).finish()
    };
    run(&vision, "digits", "2").expect_code(0);
    run(&speech, "digits", "2").expect_code(0);
    // Three workers open a stream to each of two cores.
    let refused = run(&vision, "digits", "3");
    let why = "would open 6 streams to this hub, and the jobs of team `vision` may have 4 streams together: ";
    assert!(refused.code != 0 && refused.stderr.contains(why), "{}", refused.stderr);

    with(&vision, &["jobs", "create", "waits", "-n", "1", "--weight", "3"]).finish().expect_code(0);
    with(&vision, &["jobs", "create", "more", "-n", "1"]).finish().expect_code(1).expect_error(&[
        "job `vision/more` would have weight 1, and the jobs of team `vision` may have weight 3 together",
        "`vision/waits` has weight 3",
    ]);
    with(&speech, &["jobs", "stop", "vision/waits"])
        .finish()
        .expect_code(1)
        .expect_error(&["there is no job"]);
    let listed = with(&speech, &["jobs"]).finish().expect_code(0).stdout;
    assert!(listed.contains("speech/digits") && !listed.contains("vision"), "{listed}");
    let listed = admin(&["teams", "list"]);
    let row = listed.lines().find(|line| line.contains("vision")).expect("it is listed");
    assert!(row.contains("1 of 2") && row.contains("3 of 3") && row.contains("0 of 4"), "{row}");
    with(token, &["teams", "remove", "vision"])
        .finish()
        .expect_code(1)
        .expect_error(&["revoke `vision` first"]);
    with(&vision, &["jobs", "stop", "waits"]).finish().expect_code(0);
    let log = hub.stderr();
    for line in [
        "audit: token `configured` set the quotas of team `speech`: no limit",
        "audit: token `configured` made the token `vision` (team `vision`)",
        "audit: token `vision` of team `vision` created job `vision/digits`",
        "audit: token `vision` of team `vision` asked to stop job `vision/waits`",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }
}

const HUB: &str = include_str!("../../../../deploy/kubernetes/hub.yaml");
const HUBS: &str = include_str!("../../../../deploy/kubernetes/hubs.yaml");
const TEAM: &str = include_str!("../../../../deploy/kubernetes/team.yaml");
const JOBS: [&str; 2] = [
    include_str!("../../../../deploy/kubernetes/job.yaml"),
    include_str!("../../../../deploy/kubernetes/pytorchjob.yaml"),
];
const README: &str = include_str!("../../../../deploy/kubernetes/README.md");

/// The parts of a manifest that are of this kind, without comments.
fn of_kind(manifest: &str, kind: &str) -> Vec<String> {
    let is_comment = |line: &&str| line.trim_start().starts_with('#');
    let lines: Vec<&str> = manifest.lines().filter(|line| !is_comment(line)).collect();
    let parts = lines.split(|line| *line == "---").map(|part| part.join("\n"));
    parts.filter(|part| part.lines().any(|line| line == format!("kind: {kind}"))).collect()
}

#[test]
fn the_manifests_let_teams_reach_the_hubs_and_nobody_else() {
    let [policy] = &of_kind(HUB, "NetworkPolicy")[..] else { panic!("one policy") };
    let (_, ingress) = policy.split_once("  ingress:\n").unwrap();
    let rules: Vec<&str> = ingress.split("\n    - ").collect();
    assert!(policy.contains("policyTypes: [Ingress]") && policy.contains("app.kubernetes.io/name: paramhub"));
    // The only rule names whom it lets in, and both ports.
    assert!(rules.len() == 1 && rules[0].starts_with("    - from:\n"), "{ingress}");
    for port in ["7770", "7771"] {
        assert_eq!(ingress.matches(&format!("- port: {port}")).count(), 1, "{ingress}");
    }
    let label = "paramhub-workers: allowed";
    assert!(ingress.contains(label), "{ingress}");
    let [namespace] = &of_kind(TEAM, "Namespace")[..] else { panic!("one namespace") };
    assert!(namespace.contains(label), "{namespace}");
    // The hubs of both files are under the policy.
    for manifest in [HUB, HUBS] {
        let [hubs] = &of_kind(manifest, "StatefulSet")[..] else { panic!("one set of hubs") };
        assert!(hubs.contains("app.kubernetes.io/name: paramhub") && hubs.contains("name: paramhub-admin"));
    }
    let [own] = &of_kind(TEAM, "NetworkPolicy")[..] else { panic!("one policy of the team") };
    assert!(own.ends_with("ingress:\n    - from:\n        - podSelector: {}"), "{own}");
    assert!(!JOBS.concat().contains("paramhub-admin"), "training pods must not have the admin token");
    assert!(JOBS.iter().all(|job| job.contains("name: paramhub-token")));
    for made in ["secret generic paramhub-admin", "secret generic paramhub-token", "namespace paramhub"] {
        assert!(README.contains(made), "{made}");
    }
}

#[test]
fn the_hubs_of_the_manifests_have_options_that_there_are() {
    for manifest in [HUB, HUBS] {
        let [hubs] = &of_kind(manifest, "StatefulSet")[..] else { panic!("one set of hubs") };
        let (_, arguments) = hubs.split_once("          args:\n").unwrap();
        let arguments = arguments.lines().map_while(|line| line.strip_prefix("            - "));
        let arguments: Vec<String> =
            arguments.map(|argument| argument.replace("$(POD_IP)", "127.0.0.1")).collect();
        let arguments = arguments.iter().map(String::as_str).chain(["--print-config"]);
        let printed = paramhub(arguments).env("PARAMHUB_ADMIN_TOKEN", "token").finish().expect_code(0).stdout;
        assert!(printed.contains("cores = 4") && printed.contains("127.0.0.1:7771"), "{printed}");
    }
    // What README.md has an operator type.
    for line in README.lines().filter_map(|line| line.strip_prefix("paramhub ")) {
        let words = line.split(" | ").next().unwrap().split_whitespace();
        paramhub(words.chain(["--print-config"])).finish().expect_code(0);
    }
}
