//! `paramhub run --deployment`: one option says where the hubs are. Hosts are launchers on loopback, and
//! network namespaces.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use crate::common::hosts::Network;
use crate::common::{Finished, Process, Program, hub, paramhub};

const TOKEN: &str = "of-this-run-only";

/// One of the examples, which checks every number of its exchanges.
fn worker() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_paramhub")).with_file_name("examples").join("exchange")
}

/// A URL at which no process listens. If another process takes it meanwhile, the one that wanted it reports
/// that.
fn free_url() -> String {
    format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

/// `run` with two workers a host. Their command comes last.
fn run(more: &[&str], command: &[&str]) -> Program {
    paramhub([&["run", "-n", "2"], more, &["--"], command].concat())
}

/// The flags of one of two hosts.
fn of_two<'a>(rank: &'a str, deployment: &'a str, url: &'a str) -> Vec<&'a str> {
    let hosts = ["--hosts", "2", "--host-rank", rank, "--name", "spread", "--hub", url];
    [&hosts[..], &["--deployment", deployment]].concat()
}

fn assert_exchanged(ended: &Finished, ranks: [u32; 2]) {
    for rank in ranks {
        let line = ended
            .stdout
            .lines()
            .find(|line| line.starts_with(&format!("[{rank}] ")) && line.contains("all numbers right"));
        assert!(line.is_some(), "rank {rank}: {}{}", ended.stdout, ended.stderr);
    }
}

#[test]
fn hubs_beside_the_workers_of_two_hosts_need_nothing_else() {
    let worker = worker();
    let command = [worker.to_str().unwrap(), "--steps", "20"];
    for deployment in ["cc", "cs"] {
        let url = free_url();
        // The second host starts first and waits for the first.
        let second = run(&of_two("1", deployment, &url), &command).start();
        let first = run(&of_two("0", deployment, &url), &command).start();
        assert_exchanged(&first.finish().expect_code(0), [0, 1]);
        assert_exchanged(&second.finish().expect_code(0), [2, 3]);
    }
}

#[test]
fn workers_find_their_places_among_all_hosts() {
    let (url, worker) = (free_url(), worker());
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $PARAMHUB_URL $PARAMHUB_RACK \
                  [$PARAMHUB_ADMIN_TOKEN]; exec $0 --steps 5";
    let command = ["sh", "-c", script, worker.to_str().unwrap()];
    let launchers = ["0", "1"].map(|rank| {
        let program = run(&of_two(rank, "cs", &url), &command);
        program.env("PARAMHUB_ADMIN_TOKEN", "operators-only").start()
    });
    for (host, launcher) in launchers.into_iter().enumerate() {
        let ended = launcher.finish().expect_code(0);
        for local in 0..2 {
            let rank = 2 * host + local;
            let line = format!("[{rank}] {rank}/4 {local}/2 127.0.0.1:29500 {url} spread/{host} []\n");
            assert!(ended.stdout.contains(&line), "no {line} in {}", ended.stdout);
        }
    }
}

#[test]
fn a_worker_that_fails_on_one_host_ends_the_run_on_the_other() {
    let url = free_url();
    let worker = worker();
    let command = [worker.to_str().unwrap(), "--steps", "100000", "--compute-ms", "1"];
    let launchers = ["0", "1"].map(|rank| run(&of_two(rank, "cs", &url), &command).start());
    launchers.iter().for_each(|launcher| drop(launcher.wait_for("exchanges 3 keys")));
    launchers[1].signal(Signal::TERM);
    let [first, second] = launchers.map(Process::finish);
    assert_eq!(second.code, 143, "{}", second.stderr);
    assert_eq!(first.code, 1, "{}", first.stderr);
    assert!(
        first.stderr.contains("paramhub: worker 0 exited") || first.stderr.contains("worker 1 exited"),
        "{}",
        first.stderr
    );
}

#[test]
fn dedicated_hubs_are_those_of_the_manager() {
    let (_first, url) = hub([]);
    let worker = worker();
    let command = [worker.to_str().unwrap(), "--steps", "10"];
    let at = |deployment: &'static str| ["--hub", &url, "--deployment", deployment].map(str::to_owned);
    let alone = at("ncc");
    let alone: Vec<&str> = alone.iter().map(String::as_str).collect();
    // A hub of another rack, or of another run, does not take part.
    let listen = ["hub", "--listen", "127.0.0.1:0", "--manager", &url];
    let _elsewhere = paramhub(listen.into_iter().chain(["--rack", "elsewhere"])).start();
    _elsewhere.wait_for("hub ready: ");
    assert_exchanged(&run(&alone, &command).finish().expect_code(0), [0, 1]);
    run(&[&alone[..], &["--reduction", "flat"]].concat(), &command).finish().expect_code(2);
    let _second = paramhub(listen).start();
    _second.wait_for("hub ready: ");
    let refused = run(&alone, &command).finish().expect_code(2);
    refused.expect_error(&["2 hubs have joined", "ncc is one dedicated hub", "ncs"]);
    let both = at("ncs");
    let both: Vec<&str> = both.iter().map(String::as_str).chain(["--hubs", "2"]).collect();
    assert_exchanged(&run(&both, &command).finish().expect_code(0), [0, 1]);
    // With cs only the hubs beside the workers serve them: other hubs do not take part.
    let beside = at("cs");
    let beside: Vec<&str> = beside.iter().map(String::as_str).collect();
    assert_exchanged(&run(&beside, &command).finish().expect_code(0), [0, 1]);
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    let two = ["--hosts", "2", "--host-rank", "1"];
    for (flags, part) in [
        (&["--deployment", "ncs"][..], "start `paramhub hub` there"),
        (&["--deployment", "cs", "--hubs", "2"], "leave out --hubs"),
        (&["--hosts", "2"], "give --host-rank"),
        (&["--host-rank", "1"], "give --hosts, too"),
        (&["--hosts", "2", "--host-rank", "2"], "hosts count from 0"),
        (&two, "give --hub URL"),
        (&[&two[..], &["--hub", "http://127.0.0.1:1"]].concat(), "give --name"),
        (&["--hosts", "1024"], "at most 1024"),
    ] {
        let refused = run(flags, &["true"]).finish().expect_code(2);
        assert!(refused.stderr.contains(part), "{flags:?}: {}", refused.stderr);
    }
    let trains =
        |more: &[&str]| paramhub([&["train", "--epochs", "1"], more].concat()).finish().expect_code(2);
    trains(&["--deployment", "ncc"]).expect_error(&["--hub URL"]);
    trains(&["--deployment", "cs", "--hub", "http://127.0.0.1:1"]).expect_error(&["leave out --hub"]);
}

#[test]
fn hosts_that_do_not_agree_are_refused() {
    let url = free_url();
    let script = ["sh", "-c", "sleep 300"];
    let first = run(&of_two("0", "cc", &url), &script).start();
    let odd = [&of_two("1", "cc", &url)[..], &["--workers", "3"]].concat();
    let refused = run(&odd, &script).finish().expect_code(2);
    refused.expect_error(&["job `spread` has 4 workers", "-n 3 on --hosts 2 make 6"]);
    first.signal(Signal::TERM);
    first.finish().expect_code(143);
    let late = [&of_two("1", "cc", &url)[..], &["--rendezvous-timeout", "0.5"]].concat();
    let alone = run(&late, &script).finish().expect_code(1);
    assert!(alone.stderr.contains("the first host has not created job `spread`"), "{}", alone.stderr);
}

#[test]
fn workers_that_wait_for_others_elsewhere_are_ended_with_the_job() {
    let url = free_url();
    // These workers do not even join.
    let launchers = ["0", "1"]
        .map(|rank| run(&of_two(rank, "cs", &url), &["sh", "-c", "echo waits; exec sleep 300"]).start());
    launchers.iter().for_each(|launcher| drop(launcher.wait_for("waits")));
    launchers[0].signal(Signal::TERM);
    let [first, second] = launchers.map(Process::finish);
    first.expect_code(143);
    let ended = second.expect_code(1);
    assert!(ended.stderr.contains("job `spread` has failed: stopped: its launcher was"), "{}", ended.stderr);
}

#[test]
fn a_launcher_that_waits_for_the_first_host_can_be_interrupted() {
    let url = free_url();
    // The launcher calls this URL once it has caught its signals.
    let listener = TcpListener::bind(url.strip_prefix("http://").unwrap()).unwrap();
    let waits = run(&of_two("1", "cs", &url), &["true"]).start();
    drop(listener.accept().unwrap());
    drop(listener);
    waits.signal(Signal::INT);
    let ended = waits.finish().expect_code(130);
    ended.expect_error(&["interrupted before the first host had created job `spread`"]);
}

#[test]
fn hosts_of_their_own_need_a_token_and_one_url() {
    let Some(mut network) = Network::new() else { return };
    let machines = [network.host(), network.host()];
    let url = format!("http://{}:7770", machines[0].address);
    let worker = worker();
    let command = ["--", worker.to_str().unwrap(), "--steps", "20"];
    let start = |rank: usize, token: Option<&str>| {
        let rank_text = rank.to_string();
        let flags = of_two(&rank_text, "cs", &url);
        let program = machines[rank].paramhub([&["run", "-n", "2"], &flags[..], &command].concat());
        token.iter().fold(program, |program, token| program.env("PARAMHUB_ADMIN_TOKEN", token)).start()
    };
    let refused = start(0, None).finish().expect_code(2);
    assert!(refused.stderr.contains("PARAMHUB_ADMIN_TOKEN"), "{}", refused.stderr);
    let [first, second] = [0, 1].map(|rank| start(rank, Some(TOKEN)));
    assert_exchanged(&first.finish().expect_code(0), [0, 1]);
    assert_exchanged(&second.finish().expect_code(0), [2, 3]);
}
