//! A manager, hubs and workers on hosts of their own, which are network namespaces behind one switch: what listens where,
//! who dials whom, and that nothing else is needed.

mod common;
mod hosts;

use common::{Process, wait_until};
use hosts::{Host, Network};
use rustix::process::Signal;

const TOKEN: &str = "of-these-hosts-only";
const MANAGER_PORT: u16 = 7770;
const HUB_PORT: u16 = 7771;

/// Manager, two hubs and two hosts with two workers each.
struct Cluster {
    manager: Host,
    hubs: [Host; 2],
    workers: [Host; 2],
    /// Keeps the switch.
    _network: Network,
}

impl Cluster {
    /// None, with a line that says so, where this process may not make network namespaces.
    fn build() -> Option<Cluster> {
        let mut network = match Network::new() {
            Ok(network) => network,
            Err(why) => {
                eprintln!("skipped: network namespaces are not permitted here: {why}");
                return None;
            }
        };
        let manager = network.host();
        let hubs = [network.host(), network.host()];
        let workers = [network.host(), network.host()];
        Some(Cluster { manager, hubs, workers, _network: network })
    }

    fn url(&self) -> String {
        format!("http://{}:{MANAGER_PORT}", self.manager.address)
    }

    fn start_manager(&self) -> Process {
        let listen = format!("{}:{MANAGER_PORT}", self.manager.address);
        let manager = self
            .manager
            .paramhub(["manager", "--listen", &listen])
            .env("PARAMHUB_ADMIN_TOKEN", TOKEN)
            .start();
        manager.wait_for("manager ready: ");
        manager
    }

    fn start_hub(&self, host: &Host) -> Process {
        let listen = format!("{}:{HUB_PORT}", host.address);
        let flags = ["hub", "--manager", &self.url(), "--listen", &listen, "--cores", "1", "--pin", "no"];
        host.paramhub(flags).env("PARAMHUB_ADMIN_TOKEN", TOKEN).start()
    }

    /// Any of the commands that operators use, from the manager's host.
    fn operate(&self, arguments: &[&str]) -> String {
        let program = self.manager.paramhub(arguments.iter().copied());
        program
            .env("PARAMHUB_URL", &self.url())
            .env("PARAMHUB_ADMIN_TOKEN", TOKEN)
            .finish()
            .expect_code(0)
            .stdout
    }

    /// Creates a job of four and starts its workers, which know no more than the three lines that `jobs create` prints and
    /// their ranks.
    fn start_job(&self, create: &[&str], arguments: &[&str]) -> Vec<Process> {
        let printed = self.operate(&[&["jobs", "create", "-n", "4"], create].concat());
        let worker = |rank: usize| {
            let program = self.workers[rank / 2].example("exchange", arguments.iter().copied());
            let program = printed
                .lines()
                .filter_map(|line| line.split_once('='))
                .fold(program, |program, (name, value)| program.env(name, value));
            program.env("RANK", &rank.to_string()).start()
        };
        (0..4).map(worker).collect()
    }
}

#[test]
fn a_job_across_hosts_uses_the_given_ports_and_its_workers_only_dial_out() {
    let Some(cluster) = Cluster::build() else { return };
    // In the order that is wrong everywhere else: the workers' job is there before any hub, one hub before the manager.
    let early = cluster.start_hub(&cluster.hubs[0]);
    wait_until("the hub waits", || early.stderr().contains("tries again"));
    let manager = cluster.start_manager();
    early.wait_for("hub ready: ");
    let workers = cluster.start_job(&["across", "--hubs", "2"], &["--steps", "100000", "--compute-ms", "1"]);
    wait_until("all ranks have come", || cluster.operate(&["jobs", "show", "across"]).contains("0 1 2 3"));
    assert!(
        cluster.operate(&["jobs", "show", "across"]).contains("connecting"),
        "it waits for the second hub"
    );
    let late = cluster.start_hub(&cluster.hubs[1]);
    late.wait_for("hub ready: ");
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));

    // While it runs.
    assert_eq!(cluster.manager.listening(), [format!("{}:{MANAGER_PORT}", cluster.manager.address)]);
    for hub in &cluster.hubs {
        assert_eq!(hub.listening(), [format!("{}:{HUB_PORT}", hub.address)]);
        wait_until("both hosts' workers have streams here", || {
            let peers = hub.peers(HUB_PORT);
            cluster.workers.iter().all(|host| peers.contains(&host.address))
        });
        assert!(hub.dialled().iter().all(|to| *to == format!("{}:{MANAGER_PORT}", cluster.manager.address)));
    }
    for host in &cluster.workers {
        assert_eq!(host.listening(), [] as [String; 0]);
        for to in host.dialled() {
            let hub = |hub: &Host| to == format!("{}:{HUB_PORT}", hub.address);
            assert!(cluster.hubs.iter().any(hub), "a worker has a connection to {to}");
        }
    }

    // Errors cross hosts, too: one worker is killed, and the others learn which.
    let mut workers = workers;
    let killed = workers.remove(3);
    killed.signal(Signal::KILL);
    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("rank 3"), "{}", ended.stderr);
    }
    killed.finish();

    for worker in cluster.start_job(&["to-the-end", "--hubs", "2"], &["--steps", "20"]) {
        let ended = worker.finish().expect_code(0);
        assert!(ended.stdout.contains("all numbers right"), "{}", ended.stdout);
    }
    for server in [early, late, manager] {
        server.signal(Signal::TERM);
        server.finish().expect_code(0);
    }
}

#[test]
fn who_is_missing_is_told_across_hosts() {
    let Some(cluster) = Cluster::build() else { return };
    let _manager = cluster.start_manager();
    let alone = cluster.start_hub(&cluster.hubs[0]);
    alone.wait_for("hub ready: ");
    let address = format!("{}:{HUB_PORT}", cluster.hubs[0].address);
    let options = ["pair", "--hubs", "2", "--rendezvous-timeout", "1"];
    let told: Vec<String> = cluster
        .start_job(&options, &["--steps", "1"])
        .into_iter()
        .map(|worker| worker.finish().expect_code(1).stderr)
        .collect();
    let named = format!("of the 2 hubs that it waits for only 1, hub 0 ({address})");
    assert!(told.iter().any(|told| told.contains(&named)), "{told:?}");

    cluster.operate(&["jobs", "create", "nobody", "-n", "2", "--lease", "0.5"]);
    wait_until("its lease has run out", || {
        cluster.operate(&["jobs", "show", "nobody"]).contains("lease of 0.5 s ran out")
    });

    // The cable is pulled: the workers, on other hosts, name the hub.
    let workers =
        cluster.start_job(&["cut", "--dead-after", "1"], &["--steps", "100000", "--compute-ms", "1"]);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    cluster.hubs[0].pull_the_cable();
    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains(&address), "{}", ended.stderr);
    }
}
