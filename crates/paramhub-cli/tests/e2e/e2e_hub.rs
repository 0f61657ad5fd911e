//! `paramhub hub`, `manager`, `jobs` and `doctor` as an operator uses them.

use std::path::Path;

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobStatus, ServiceCreated};
use rustix::process::Signal;

use crate::common::{Process, example, hub, paramhub, program, wait_until};

#[test]
fn a_hub_ends_with_exit_0_on_sigterm_and_on_ctrl_c() {
    for signal in [Signal::TERM, Signal::INT] {
        let (hub, url) = hub([]);
        assert_eq!(ManagerClient::new(&url, None).unwrap().hubs().unwrap().len(), 1);
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", hub.pid().as_raw_nonzero())).unwrap();
        let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        let [soft, hard] = [0, 1].map(|column| files.split_whitespace().nth(column).unwrap());
        assert_eq!(soft, hard, "a hub may hold as many streams as the system lets it");
        hub.signal(signal);
        let ended = hub.finish().expect_code(0);
        assert_eq!(ended.stdout.lines().count(), 1, "{}", ended.stdout);
    }
}

#[test]
fn a_hub_serves_several_addresses_and_cores() {
    let arguments =
        ["hub", "--listen", "127.0.0.1:0,127.0.0.2:0", "--cores", "2", "--manager", "127.0.0.1:0"];
    let hub = paramhub(arguments).start();
    let ready = hub.wait_for("hub ready: ");
    assert!(ready.contains("data 127.0.0.1:") && ready.contains(",127.0.0.2:"), "{ready}");
    assert!(ready.ends_with("cores 2"), "{ready}");
}

#[test]
fn streams_that_a_hub_cannot_offer_are_wrong_usage() {
    let hub = ["hub", "--listen", "127.0.0.1:0,127.0.0.2:0", "--manager", "127.0.0.1:0", "--log", "error"];
    for (streams, listening) in
        [("33", "127.0.0.1:0,127.0.0.2:0"), ("65", "127.0.0.1:0"), ("0", "127.0.0.1:0")]
    {
        let more = ["--streams", streams, "--listen", listening];
        let refused = paramhub(hub.into_iter().chain(more)).finish().expect_code(2);
        refused.expect_error(&[&format!("not {streams}"), "streams a core and address"]);
    }
}

/// A program that may open only this many files and sockets.
fn with_files(most: u32, arguments: &[&str]) -> Process {
    let limited = format!("ulimit -n {most} && exec \"$0\" \"$@\"");
    let arguments =
        ["-c", &limited, env!("CARGO_BIN_EXE_paramhub")].into_iter().chain(arguments.iter().copied());
    program(Path::new("/bin/sh"), arguments).start()
}

#[test]
fn a_limit_of_open_files_refuses_the_job_that_exceeds_it_and_is_named() {
    let manager = paramhub(["manager", "--listen", "127.0.0.1:0"]).start();
    let ready = manager.wait_for("manager ready: ");
    let url = ready.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
    let hub = with_files(48, &["hub", "--listen", "127.0.0.1:0", "--join", url, "--cores", "1"]);
    hub.wait_for("hub ready: ");
    let train = |url: &str, workers: &str| {
        paramhub(["train", "--hub", url, "--workers", workers, "--net", "mlp", "--epochs", "1"]).finish()
    };
    let refused = train(url, "20").expect_code(1).stderr;
    assert!(
        refused.contains("would open 20 streams to this hub, whose process may have 48 files"),
        "{refused}"
    );
    train(url, "2").expect_code(0);

    let both = ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--cores", "1"];
    let both = with_files(48, &both);
    let ready = both.wait_for("hub ready: ");
    let url = ready.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
    let refused = train(url, "30").expect_code(1).stderr;
    assert!(refused.contains("the 30 ranks of this job wait for one another"), "{refused}");
    assert!(refused.contains("ulimit -n"), "{refused}");
}

#[test]
fn a_hub_bounds_its_jobs_by_its_flags_and_reports_their_use() {
    let limits = ["--job-memory", "1M", "--job-streams", "2", "--job-share", "40"];
    let (_hub, url) = hub(limits);
    let exchange = Path::new(env!("CARGO_BIN_EXE_paramhub")).with_file_name("examples").join("exchange");
    let run = |name: &str, workers: &str, elements: &str| {
        let arguments = ["run", "--hub", &url, "--name", name, "-n", workers, "--"];
        let exchange = exchange.to_str().unwrap();
        paramhub(arguments.into_iter().chain([exchange, "--steps", "500", "--elements", elements])).finish()
    };
    let refused = run("large", "1", "500000").expect_code(1);
    assert!(refused.stderr.contains("gives 1 MiB to a job"), "{}", refused.stderr);
    let refused = run("wide", "3", "1000").expect_code(1);
    assert!(refused.stderr.contains("takes 2 of a job: 2 workers would fit"), "{}", refused.stderr);
    run("small", "2", "10000").expect_code(0);
    let shown = paramhub(["jobs", "show", "small", "--hub", &url]).finish().expect_code(0).stdout;
    let time = shown.lines().find(|line| line.contains("time of hub cores")).expect("it is shown");
    assert!(!time.contains(" 0.000 s"), "{shown}");
    let heavy = ["jobs", "create", "heavy", "-n", "1", "--weight", "101", "--hub", &url];
    assert!(paramhub(heavy).finish().expect_code(2).stderr.contains("1..=100"));
    for (flag, value) in [("--job-share", "0"), ("--job-share", "101"), ("--job-streams", "0")] {
        let wrong = ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", flag, value];
        paramhub(wrong).finish().expect_code(2);
    }
}

#[test]
fn a_hub_joins_a_manager_that_stands_alone() {
    let token = ["--admin-token", "let-me-in"];
    let manager = paramhub(["manager", "--listen", "127.0.0.1:0"].into_iter().chain(token)).start();
    let url = manager.wait_for("manager ready: ").split_whitespace().last().unwrap().to_owned();

    let refused = paramhub(["hub", "--listen", "127.0.0.1:0", "--join", &url]).finish().expect_code(2);
    assert!(refused.stderr.contains("token"), "{}", refused.stderr);
    let joined =
        paramhub(["hub", "--listen", "127.0.0.1:0", "--join", &url].into_iter().chain(token)).start();
    joined.wait_for(&url);
    let client = ManagerClient::new(&url, Some("let-me-in".into())).unwrap();
    assert_eq!(client.hubs().unwrap().len(), 1);
    joined.signal(Signal::TERM);
    joined.finish().expect_code(0);
    manager.signal(Signal::TERM);
    manager.finish().expect_code(0);
}

#[test]
fn a_port_in_use_is_one_clear_line() {
    let (_first, url) = hub([]);
    let manager = url.strip_prefix("http://").unwrap();
    let second = paramhub(["hub", "--listen", "127.0.0.1:0", "--manager", manager]).finish().expect_code(1);
    second.expect_error(&[manager, "in use"]);

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let third = paramhub(["hub", "--log", "error", "--listen", &address, "--manager", "127.0.0.1:0"]);
    third.finish().expect_code(1).expect_error(&[&address, "in use"]);
}

#[test]
fn a_state_directory_that_cannot_be_written_is_one_clear_line() {
    // Permissions do not stop root, so these paths fail for every user: a file in the way, and a file system
    // without files.
    for state in ["in-the-way/state", "/proc/paramhub-state"] {
        let arguments = ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--state", state];
        let refused = paramhub(arguments).file("in-the-way", "").finish().expect_code(1);
        refused.expect_error(&[state]);
    }
}

#[test]
fn jobs_are_listed_shown_and_stopped() {
    let (_hub, url) = hub([]);
    let empty = paramhub(["jobs", "--hub", &url]).finish().expect_code(0);
    assert_eq!(empty.stdout, "no jobs\n");

    let client = ManagerClient::new(&url, None).unwrap();
    let request = CreateService { name: "team/digits".into(), workers: 3, options: Default::default() };
    let created = client.create_service(&request).unwrap();
    let listed = paramhub(["jobs", "list"]).env("PARAMHUB_URL", &url).finish().expect_code(0);
    let row = listed.stdout.lines().find(|line| line.contains("team/digits")).expect("the job is listed");
    assert!(row.contains("connecting") && row.contains("0/3"), "{row}");

    let shown = paramhub(["jobs", "show", "team/digits", "--hub", &url]).finish().expect_code(0);
    assert!(shown.stdout.contains(&created.namespace.to_string()), "{}", shown.stdout);
    assert!(!shown.stdout.contains(&String::from(created.nonce)));
    let json = paramhub(["jobs", "list", "--json", "--hub", &url]).finish().expect_code(0);
    let jobs: Vec<JobStatus> = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((jobs.len(), jobs[0].workers), (1, 3));

    let stopped = paramhub(["jobs", "stop", "team/digits", "--hub", &url]).finish().expect_code(0);
    assert_eq!(stopped.stdout, "job team/digits is stopped, and its memory is free\n");
    let again = paramhub(["jobs", "stop", "team/digits", "--hub", &url]).finish().expect_code(0);
    assert!(again.stdout.starts_with("job team/digits is stopped"), "{}", again.stdout);
    wait_until("the job has ended", || client.job("team/digits").unwrap().state.has_ended());
    let unknown = paramhub(["jobs", "show", "unknown", "--hub", &url]).finish().expect_code(1);
    unknown.expect_error(&["unknown"]);
}

#[test]
fn tokens_are_made_listed_and_revoked_and_the_log_says_by_whom() {
    let token = "the-first-token\n";
    let arguments =
        ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--admin-token-file", "token"];
    let hub = paramhub(arguments).file("token", token).start();
    let ready = hub.wait_for("hub ready: ");
    let url = ready.split_whitespace().find(|word| word.starts_with("http://")).expect("a URL").to_owned();
    let tokens = |by: &str, more: &[&str]| {
        paramhub([&["tokens", "--hub", &url], more].concat()).env("PARAMHUB_ADMIN_TOKEN", by).finish()
    };
    let first = token.trim();
    let made = tokens(first, &["create", "grafana", "--role", "reader"]).expect_code(0).stdout;
    let reader = made.trim();
    assert!(reader.starts_with("pht-") && made.lines().count() == 1, "{made}");
    let jobs = |by: &str, more: &[&str]| {
        paramhub([&["jobs", "--hub", &url], more].concat()).env("PARAMHUB_ADMIN_TOKEN", by).finish()
    };
    assert_eq!(jobs(reader, &[]).expect_code(0).stdout, "no jobs\n");
    jobs(reader, &["create", "x", "-n", "1"]).expect_code(1).expect_error(&["`grafana` has the role reader"]);
    jobs(first, &["create", "x", "-n", "1"]).expect_code(0);
    let refused = tokens(first, &["create", "ci", "--role", "everything"]).expect_code(2).stderr;
    assert!(refused.contains("expected admin, hub, reader or team"), "{refused}");
    tokens(first, &["revoke", "grafana"]).expect_code(0);
    jobs(reader, &[]).expect_code(2).expect_error(&["the token `grafana` was revoked"]);
    let listed = tokens(first, &["list"]).expect_code(0).stdout;
    let row = listed.lines().find(|line| line.contains("grafana")).expect("it is listed");
    assert!(
        row.contains("reader") && row.contains("configured") && row.matches(" ago").count() == 2,
        "{row}"
    );
    let log = hub.stderr();
    for line in
        ["made the token `grafana` (reader)", "created job `x`", "revoked the token `grafana` (reader)"]
    {
        assert!(log.contains(&format!("audit: token `configured` {line}")), "{line}: {log}");
    }
    assert!(!log.contains(first) && !log.contains(reader), "{log}");
}

#[test]
fn a_job_is_created_for_workers_that_another_launcher_starts() {
    let (_hub, url) = hub([]);
    let create = |more: &[&str]| paramhub([&["jobs", "create", "-n", "1", "--hub", &url], more].concat());
    let printed = create(&["by-hand"]).finish().expect_code(0).stdout;
    let lines: Vec<(&str, &str)> = printed.lines().filter_map(|line| line.split_once('=')).collect();
    let names: Vec<&str> = lines.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["PARAMHUB_URL", "PARAMHUB_JOB", "PARAMHUB_SECRET"]);
    let worker = example("exchange", ["--steps", "5"]).env("RANK", "0");
    let worker = lines.into_iter().fold(worker, |worker, (name, value)| worker.env(name, value));
    worker.finish().expect_code(0);

    let json = create(&["as-json", "--json"]).finish().expect_code(0).stdout;
    let created: ServiceCreated = serde_json::from_str(&json).unwrap();
    assert_eq!(ManagerClient::new(&url, None).unwrap().job("as-json").unwrap().namespace, created.namespace);
    create(&["too-many", "--hubs", "1025"]).finish().expect_code(2).expect_error(&["1025 hubs"]);
    create(&["as-json"]).finish().expect_code(1).expect_error(&["as-json", "jobs stop"]);
    let refused = paramhub(["run", "-n", "1", "--hubs", "2", "--", "true"]).finish().expect_code(2);
    refused.expect_error(&["--hub URL"]);
}

#[test]
fn an_unreachable_manager_is_one_clear_line() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{port}");
    let refused = paramhub(["jobs", "--hub", &url]).finish().expect_code(1);
    refused.expect_error(&[&url, "Is `paramhub hub`"]);
}

#[test]
fn the_doctor_measures_and_reports_problems() {
    let findings = paramhub(["doctor", "--json"]).finish();
    let findings: Vec<serde_json::Value> = serde_json::from_str(&findings.stdout).unwrap();
    for what in
        ["cores", "processor", "memory", "open files", "manager port", "data port", "clock", "loopback"]
    {
        assert!(findings.iter().any(|finding| finding["what"] == what), "nothing about {what}");
    }
    let loopback = findings.iter().find(|finding| finding["what"] == "loopback").unwrap();
    assert!(loopback["text"].as_str().unwrap().contains(" GB/s "), "{loopback}");
    let (_hub, url) = hub([]);
    let with_hub = paramhub(["doctor", "--hub", &url]).finish();
    assert!(with_hub.stdout.contains("answers: hubs 1"), "{}", with_hub.stdout);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let without = paramhub(["doctor", "--hub", &port]).finish().expect_code(1);
    assert!(without.stdout.lines().any(|line| line.starts_with("fail") && line.contains(&port)));
}

#[test]
fn a_reader_that_goes_away_ends_no_command_in_a_panic() {
    let (_hub, url) = hub([]);
    for stream in ["stdout", "stderr"] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_paramhub"));
        // Errors of the command go to stderr.
        let arguments = if stream == "stdout" { ["jobs", "list"] } else { ["jobs", "misspelt"] };
        command.args(arguments).args(["--hub", &url]).stdin(std::process::Stdio::null());
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        match stream {
            "stdout" => command.stdout(writer).stderr(std::process::Stdio::piped()),
            _ => command.stdout(std::process::Stdio::piped()).stderr(writer),
        };
        let ended = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(if stream == "stdout" { 0 } else { 2 }), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_paramhub"));
    let ended = command.args(["jobs", "list", "--hub", &url]).stdout(full).output().unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(1) && stderr.contains("cannot write to standard output"), "{stderr}");
}

#[test]
fn a_log_without_a_reader_ends_no_hub() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_paramhub"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.args(["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--log", "debug"]);
    let mut hub = command.stderr(writer).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    let mut stdout = std::io::BufReader::new(hub.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut ready).unwrap();
    let url = ready.split_whitespace().find(|word| word.starts_with("http://")).expect("a URL").to_owned();
    let client = ManagerClient::new(&url, None).unwrap();
    let request = CreateService { name: "unread".into(), workers: 1, options: Default::default() };
    // Each of these calls writes to the log.
    let created = client.create_service(&request).and_then(|_| client.stop_job("unread"));
    let hubs = client.hubs();
    let is_running = hub.try_wait().unwrap().is_none();
    hub.kill().unwrap();
    hub.wait().unwrap();
    assert!(is_running && created.is_ok() && hubs.is_ok_and(|hubs| hubs.len() == 1));
}

#[test]
fn a_data_port_says_at_once_that_it_is_no_manager() {
    let hub = paramhub(["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0"]).start();
    let ready = hub.wait_for("hub ready: ");
    let data = ready.split_whitespace().skip_while(|word| *word != "data").nth(1).expect("an address");
    for arguments in [&["hubs"][..], &["jobs", "list"], &["jobs", "create", "x", "-n", "1"]] {
        let refused = paramhub(arguments.iter().copied().chain(["--hub", data])).finish().expect_code(2);
        refused.expect_error(&["this is a hub's data port", "connection manager"]);
    }
    let doctor = paramhub(["doctor", "--hub", data]).finish().expect_code(1);
    let is_named = doctor
        .stdout
        .lines()
        .any(|line| line.starts_with("fail") && line.contains("data port: give the URL"));
    assert!(is_named, "{}", doctor.stdout);
    // A client of another protocol gets the verdict that follows a Hello, without having sent as many bytes
    // as one has.
    let mut stream = std::net::TcpStream::connect(data).unwrap();
    stream.set_read_timeout(Some(crate::common::WAIT_TIMEOUT)).unwrap();
    std::io::Write::write_all(&mut stream, b"SSH-2.0-OpenSSH_9.6\r\n").unwrap();
    let mut verdict = Vec::new();
    std::io::Read::read_to_end(&mut stream, &mut verdict).unwrap();
    assert!(
        String::from_utf8_lossy(&verdict).contains("paramhub"),
        "{:?}",
        String::from_utf8_lossy(&verdict)
    );
}

#[test]
fn jobs_are_listed_by_state_the_newest_ones_and_within_the_terminal() {
    let (_hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    for number in 0..5 {
        let name = format!("team/a-job-with-a-rather-long-name-{number}");
        let request = CreateService { name, workers: 3, options: Default::default() };
        client.create_service(&request).unwrap();
    }
    let why = "a sentence that goes on and on, to say at length ".repeat(5);
    client.stop_job_because("team/a-job-with-a-rather-long-name-1", why.trim_end()).unwrap();
    let listed = |more: &[&str], columns: &str| {
        let listed = paramhub(["jobs", "list", "--hub", &url].into_iter().chain(more.iter().copied()));
        listed.env("COLUMNS", columns).finish().expect_code(0).stdout
    };
    let named = |more: &[&str]| {
        let json: Vec<JobStatus> = serde_json::from_str(&listed(&[more, &["--json"]].concat(), "")).unwrap();
        json.iter().map(|job| job.name.chars().next_back().unwrap()).collect::<String>()
    };
    assert_eq!(named(&[]), "01234");
    assert_eq!(named(&["--limit", "2"]), "34");
    assert_eq!(named(&["--state", "failed"]), "1");
    assert_eq!(named(&["--state", "living", "--limit", "3"]), "234");
    assert_eq!(named(&["--state", "running,failed"]), "1");
    assert_eq!(listed(&["--state", "running"], ""), "no jobs\n");
    for columns in ["", "120", "200"] {
        let width = columns.parse().unwrap_or(200);
        let text = listed(&[], columns);
        for line in text.lines() {
            assert!(line.chars().count() <= width, "{} columns of {width}: {line}", line.chars().count());
        }
    }
    assert!(
        listed(&["--state", "failed"], "").contains("a sentence that goes on"),
        "the message's beginning is there"
    );
    let shown = paramhub(["jobs", "show", "team/a-job-with-a-rather-long-name-1", "--hub", &url]).finish();
    assert!(shown.expect_code(0).stdout.contains("at length"), "and all of it is shown");
}
