//! Connections between workers and hubs, and between hubs, that are reset on their way, which costs a job nothing, and
//! processes that die, which is noticed at once.

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobOptions, JobState, JobStatus, OnWorkerLoss};
use paramhub_core::composition::Reduction;
use rustix::process::Signal;

use crate::common::{Process, example, hub, paramhub, wait_until};
use crate::relay::{Learns, Relay};

const WORKERS: u32 = 4;
/// A hub's cores, to each of which every worker has a stream.
const CORES: usize = 2;
/// The racks of a job at one hub for all.
const NO_RACKS: &[&str] = &[""];
/// More bytes than wait anywhere on the way: when so many have passed, steps have been made.
const SOME_STEPS: u64 = 8 << 20;
/// More seconds than any test waits: a death that is noticed by waiting for so long fails its test.
const PATIENT: f64 = 60.0;

fn await_some_steps(relay: &Relay) {
    let before = relay.passed();
    wait_until("steps are made", || relay.passed() > before + SOME_STEPS);
}

/// A job each of whose hubs is reached over a relay. The callers are workers and hubs of other racks.
struct Job {
    hubs: Vec<Process>,
    relays: Vec<Relay>,
    client: ManagerClient,
    name: String,
    workers: Vec<Process>,
}

impl Job {
    /// A job with a hub for each of these racks. The ranks are in one after the other.
    fn start(racks: &[&str], options: JobOptions, arguments: &[&str]) -> Job {
        let (mut hubs, mut relays, mut url): (Vec<Process>, Vec<Relay>, _) = (Vec::new(), Vec::new(), None);
        for rack in racks {
            let relay = Relay::new();
            let (cores, advertised) = (CORES.to_string(), relay.address.to_string());
            let mut flags = vec!["--cores", &cores, "--no-shared-memory", "--advertise", &advertised];
            if !rack.is_empty() {
                flags.extend(["--rack", rack]);
            }
            let hub = match &url {
                None => {
                    let (hub, its_url) = hub(flags);
                    url = Some(its_url);
                    hub
                }
                Some(url) => {
                    let joins = ["hub", "--listen", "127.0.0.1:0", "--manager", url];
                    paramhub(joins.into_iter().chain(flags)).start()
                }
            };
            let ready = hub.wait_for("hub ready: ");
            let listens = ready.split_whitespace().skip_while(|word| *word != "data").nth(1).unwrap();
            relay.lead_to(listens.parse().unwrap());
            hubs.push(hub);
            relays.push(relay);
        }
        let url = url.expect("a job has a hub");
        let client = ManagerClient::new(&url, None).unwrap();
        let name = format!("redials-{}-{}", options.on_worker_loss, options.reduction);
        let options = JobOptions { hubs: Some(racks.len() as u32), ..options };
        let created =
            client.create_service(&CreateService { name: name.clone(), workers: WORKERS, options }).unwrap();
        let start = |rank: u32| {
            example("exchange", arguments.iter().copied())
                .env("PARAMHUB_URL", &url)
                .env("PARAMHUB_JOB", &created.namespace.to_string())
                .env("PARAMHUB_SECRET", &String::from(created.secret()))
                .env("PARAMHUB_RACK", racks[rank as usize % racks.len()])
                .env("RANK", &rank.to_string())
                .start()
        };
        let workers: Vec<Process> = (0..WORKERS).map(start).collect();
        workers.iter().for_each(|worker| drop(worker.wait_for(" keys")));
        Job { hubs, relays, client, name, workers }
    }

    fn status(&self) -> JobStatus {
        self.client.job(&self.name).unwrap()
    }

    /// Cuts connections in every way, while steps are made. Each time the job goes on. Returns how many were cut.
    fn cut_often(&self) -> usize {
        self.relays.iter().for_each(await_some_steps);
        let all: Vec<usize> = self.relays.iter().map(Relay::connections).collect();
        let mut cut = 0;
        let ways = [
            (None, Learns::Both),
            (Some(1), Learns::Both),
            (Some(4), Learns::Caller),
            (Some(3), Learns::Listener),
            (None, Learns::Caller),
            (None, Learns::Listener),
            (Some(0), Learns::Listener),
            (None, Learns::Both),
        ];
        for (number, (only, learns)) in ways.into_iter().enumerate() {
            for (relay, all) in self.relays.iter().zip(&all) {
                await_some_steps(relay);
                cut += relay.forget(only, learns);
                let what = format!("cut {number} is mended: {only:?}, {learns:?}");
                wait_until(&what, || relay.connections() == *all);
            }
        }
        self.relays.iter().for_each(await_some_steps);
        cut
    }

    fn await_updates(&self) {
        let before = self.status().counters.updates;
        wait_until("the job goes on", || {
            let status = self.status();
            assert_ne!(status.state, JobState::Failed, "{}", status.message);
            status.counters.updates > before
        });
    }
}

/// A job whose workers have all left, once its hub has reported that.
fn ended(client: &ManagerClient, name: &str) -> JobStatus {
    wait_until("the job's end", || client.job(name).unwrap().state.has_ended());
    client.job(name).unwrap()
}

/// A job as by default, but for the time that a busy machine may take to run the threads of both ends.
fn by_default(on_worker_loss: OnWorkerLoss) -> JobOptions {
    JobOptions { on_worker_loss, redial_grace_s: 20.0, ..Default::default() }
}

/// Gradients that differ from rank to rank, so that sums depend on their order.
const FRACTIONS: &[&str] =
    &["--steps", "600", "--compute-ms", "2", "--reproducible", "--seed", "7", "--save", "parameters"];

#[test]
fn connections_that_are_reset_change_no_bit_and_cost_no_worker() {
    let expected = parameters_of(NO_RACKS, JobOptions::default(), FRACTIONS, false);
    for on_worker_loss in [OnWorkerLoss::Fail, OnWorkerLoss::Rewind] {
        let found = parameters_of(NO_RACKS, by_default(on_worker_loss), FRACTIONS, true);
        assert!(found == expected, "other bits than undisturbed with {on_worker_loss}");
    }
}

#[test]
fn connections_that_are_reset_change_no_bit_of_clipped_gradients() {
    let clipped = [FRACTIONS, &["--clip-norm", "0.5"]].concat();
    let [expected, found] =
        [false, true].map(|is_cut| parameters_of(NO_RACKS, by_default(OnWorkerLoss::Fail), &clipped, is_cut));
    assert!(found == expected, "other bits than undisturbed");
}

#[test]
fn connections_between_hubs_that_are_reset_change_no_bit() {
    for reduction in [Reduction::Tree, Reduction::Ring, Reduction::Sharded] {
        assert_equal_between_hubs(reduction, FRACTIONS);
    }
}

#[test]
fn connections_between_hubs_that_are_reset_change_no_bit_of_clipped_gradients() {
    let clipped = [FRACTIONS, &["--clip-norm", "0.5"]].concat();
    for reduction in [Reduction::Tree, Reduction::Sharded] {
        assert_equal_between_hubs(reduction, &clipped);
    }
}

/// Fails unless a job of two racks ends with the same parameters whether its connections are cut or not.
fn assert_equal_between_hubs(reduction: Reduction, arguments: &[&str]) {
    let options = JobOptions { reduction, ..by_default(OnWorkerLoss::Fail) };
    let [expected, found] =
        [false, true].map(|is_cut| parameters_of(&["a", "b"], options, arguments, is_cut));
    assert!(found == expected, "other bits than undisturbed with {reduction}");
}

/// The parameters with which the ranks of a job end, whose connections are cut often or never.
fn parameters_of(racks: &[&str], options: JobOptions, arguments: &[&str], is_cut: bool) -> Vec<u8> {
    let job = Job::start(racks, options, arguments);
    let cut = if is_cut { job.cut_often() } else { 0 };
    let Job { hubs, relays, client, name, workers } = job;
    let mut parameters = workers.into_iter().map(|worker| worker.finish().expect_code(0).read("parameters"));
    let of_rank_0 = parameters.next().expect("there is a rank 0");
    assert!(parameters.all(|other| other == of_rank_0), "the ranks of {name} differ");
    let status = ended(&client, &name);
    assert_eq!(status.state, JobState::Finished, "{}", status.message);
    assert_eq!(status.losses.map_or(0, |losses| losses.workers_lost), 0);
    assert!(status.counters.streams_moved >= cut as u64, "{cut} were cut: {:?}", status.counters);
    drop((hubs, relays));
    of_rank_0
}

#[test]
fn connections_that_are_reset_cost_no_contribution_where_others_would_go_on() {
    let options = by_default(OnWorkerLoss::Continue);
    // The workers check every number of every step, which would be another without one of them.
    let job = Job::start(NO_RACKS, options, &["--steps", "600", "--compute-ms", "2"]);
    job.cut_often();
    let Job { hubs, relays, client, name, workers } = job;
    for worker in workers {
        let ended = worker.finish().expect_code(0);
        assert!(ended.stdout.contains("all numbers right"), "{ended:?}");
    }
    let status = ended(&client, &name);
    assert_eq!(
        (status.state, status.losses.map_or(0, |losses| losses.workers_lost)),
        (JobState::Finished, 0)
    );
    drop((hubs, relays));
}

/// Steps that are mostly computation, so that a process which dies has read all that had come to it.
const SLOW: &[&str] = &["--steps", "1000", "--compute-ms", "1500", "--elements", "1000"];

#[test]
fn a_process_that_dies_is_not_waited_for() {
    for on_worker_loss in [OnWorkerLoss::Fail, OnWorkerLoss::Continue] {
        let options =
            JobOptions { on_worker_loss, redial_grace_s: PATIENT, dead_after_s: 300.0, ..Default::default() };
        let job = Job::start(NO_RACKS, options, SLOW);
        job.await_updates();
        job.workers[1].signal(Signal::KILL);
        let reason = "rank 1 was lost: its connection ended without a leave message";
        wait_until("the hub says so", || job.hubs[0].stderr().contains(reason));
        match on_worker_loss {
            OnWorkerLoss::Continue => job.await_updates(),
            _ => wait_until("the job fails", || job.status().message.contains(reason)),
        }
    }
}

#[test]
fn a_hub_that_dies_is_not_dialled_for_long() {
    let options = JobOptions { redial_grace_s: PATIENT, dead_after_s: 300.0, ..Default::default() };
    // With and without something to read for the hub when it dies.
    for arguments in [SLOW, &["--steps", "100000"]] {
        let (hub, url) = hub(["--cores", "2", "--no-shared-memory"]);
        let client = ManagerClient::new(&url, None).unwrap();
        let created =
            client.create_service(&CreateService { name: "hubs-die".into(), workers: 1, options }).unwrap();
        let worker = example("exchange", arguments.iter().copied())
            .env("PARAMHUB_URL", &url)
            .env("PARAMHUB_JOB", &created.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(created.secret()))
            .env("RANK", "0")
            .start();
        worker.wait_for(" keys");
        hub.signal(Signal::KILL);
        let ended = worker.finish().expect_code(1);
        let is_said = ["it closed the connection", "nobody listens there any more"];
        assert!(is_said.iter().any(|said| ended.stderr.contains(said)), "{ended:?}");
    }
}
