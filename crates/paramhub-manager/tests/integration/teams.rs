//! Teams that share a manager: what their tokens open, the names of their jobs, and their quotas.

use std::path::Path;

use crate::common::*;
use paramhub_control::ManagerClient;
use paramhub_core::auth::Namespace;
use paramhub_core::service::{
    CreateService, CreateToken, ErrorCode, HubCommand, JobOptions, JobPlan, JobState, JobStatus, MoveJob,
    RegisterHub, TeamQuotas, TokenRole,
};
use paramhub_core::wire::VERSION;
use paramhub_manager::{ManagerConfig, RunningManager};

const FIRST: &str = "the-first-token";
const NO_QUOTAS: TeamQuotas = TeamQuotas { jobs: None, weight: None, memory_bytes: None, streams: None };

fn client(manager: &RunningManager, token: &str) -> ManagerClient {
    ManagerClient::new(&manager.url(), Some(token.to_owned())).unwrap()
}

fn start_kept(state: Option<&Path>) -> (RunningManager, ManagerClient) {
    let state = state.map(Path::to_path_buf);
    let (manager, _) = start(ManagerConfig { admin_token: Some(FIRST.into()), state, ..config() });
    let admin = client(&manager, FIRST);
    (manager, admin)
}

/// A manager with the teams `vision` and `speech`, which have the same quotas; its admin, and a caller of each.
fn start_teams(quotas: TeamQuotas) -> (RunningManager, [ManagerClient; 3]) {
    let (manager, admin) = start_kept(None);
    let members = ["vision", "speech"].map(|team| {
        admin.set_team(team, &quotas).unwrap();
        client(&manager, &token(&admin, team, team))
    });
    let [vision, speech] = members;
    (manager, [admin, vision, speech])
}

fn token(admin: &ManagerClient, name: &str, team: &str) -> String {
    let request = CreateToken { name: name.into(), role: TokenRole::Team, team: Some(team.into()) };
    admin.create_token(&request).unwrap().token
}

fn create(name: &str, weight: u32) -> CreateService {
    CreateService { name: name.into(), workers: 1, options: JobOptions { weight, ..JobOptions::default() } }
}

/// Creates a job and takes it through ConnectService and InitService.
fn run(client: &ManagerClient, name: &str, workers: u32) -> (Job, Result<(), String>) {
    let job = Job::create(client, name, workers);
    assert!(job.all_ranks(0..workers, Job::connect).iter().all(Result::is_ok));
    let outcomes = job.all_ranks(0..workers, |job, rank| job.init(rank, settings(8)));
    let outcome = outcomes.into_iter().try_for_each(|outcome| match outcome {
        Ok(_) => Ok(()),
        Err(refused) => Err(refused.to_string()),
    });
    (job, outcome)
}

fn names(jobs: &[JobStatus]) -> Vec<&str> {
    jobs.iter().map(|job| job.name.as_str()).collect()
}

#[test]
fn a_team_has_its_own_jobs_by_short_and_full_name() {
    let (_manager, [admin, vision, _]) = start_teams(NO_QUOTAS);
    let job = Job::create(&vision, "digits", 1);
    assert_eq!(names(&admin.jobs().unwrap()), ["vision/digits"]);
    for text in ["digits", "vision/digits", &job.namespace.to_string()] {
        assert_eq!(vision.job(text).unwrap().namespace, job.namespace, "{text}");
    }
    for text in ["digits", "vision/digits"] {
        assert_eq!(vision.membership(text).unwrap().namespace, job.namespace);
        let taken = vision.create_service(&create(text, 1));
        assert_eq!(code(&taken), ErrorCode::NameTaken);
    }
    assert!(vision.hubs().unwrap().is_empty(), "a launcher asks how many there are");
    assert_eq!(vision.stop_job("digits").unwrap().state, JobState::Failed);
    // What has ended keeps its name, and the admin sees all.
    assert_eq!(vision.job("digits").unwrap().namespace, job.namespace);
    let again = Job::create(&vision, "vision/digits", 1);
    assert_eq!(vision.stop_job(&again.namespace.to_string()).unwrap().name, "vision/digits");
    assert_eq!(names(&vision.jobs().unwrap()), ["vision/digits", "vision/digits"]);
    for empty in ["", "vision/"] {
        assert_eq!(code(&vision.create_service(&create(empty, 1))), ErrorCode::BadRequest);
    }
}

#[test]
fn another_teams_job_is_answered_like_one_that_does_not_exist() {
    let (manager, [admin, vision, speech]) = start_teams(NO_QUOTAS);
    let hub = Hub::join(&admin, HubBehaviour::Serve);
    let (job, outcome) = run(&vision, "digits", 1);
    outcome.unwrap();
    Job::create(&vision, "connecting", 1);
    Job::create(&admin, "admins", 1);
    admin.set_team("vis", &NO_QUOTAS).unwrap();
    let prefix = client(&manager, &token(&admin, "prefix", "vis"));

    let unknown = Namespace([7; 16]).to_string();
    let known = job.namespace.to_string();
    let calls: [(&str, CallOnJob); 6] = [
        ("show", |client, job| told(client.job(job))),
        ("stop", |client, job| told(client.stop_job(job))),
        ("end", |client, job| told(client.workers_have_ended(job, "over"))),
        ("membership", |client, job| told(client.membership(job))),
        ("book", |client, job| told(client.information_book(job))),
        ("best scheme", |client, job| told(client.best_scheme(job, "conv"))),
    ];
    for other in [&speech, &prefix] {
        assert!(other.jobs().unwrap().is_empty());
        for (what, call) in calls {
            let (code, as_unknown) = call(other, &unknown);
            assert_eq!(code, ErrorCode::NotFound);
            for target in ["vision/digits", "vision/connecting", "digits", "connecting", "admins", &known] {
                let expected = (ErrorCode::NotFound, as_unknown.replace(&unknown, target));
                assert_eq!(call(other, target), expected, "{what} {target}");
            }
        }
    }
    assert_eq!(vision.job("digits").unwrap().state, JobState::Running);
    hub.finish(&job);
}

/// A call about a job, which is refused.
type CallOnJob = fn(&ManagerClient, &str) -> (ErrorCode, String);

fn told<T: std::fmt::Debug>(refused: Result<T, paramhub_control::ControlError>) -> (ErrorCode, String) {
    (code(&refused), message(&refused))
}

#[test]
fn no_team_can_take_or_block_a_name_of_another() {
    let (_manager, [admin, vision, speech]) = start_teams(NO_QUOTAS);
    for squatted in ["digits", "vision/digits", "vision", "../vision/digits"] {
        speech.create_service(&create(squatted, 1)).unwrap();
    }
    for own in ["digits", "vision"] {
        vision.create_service(&create(own, 1)).unwrap();
    }
    admin.create_service(&create("digits", 1)).unwrap();
    assert_eq!(names(&vision.jobs().unwrap()), ["vision/digits", "vision/vision"]);
    let theirs = speech.jobs().unwrap();
    assert_eq!(
        names(&theirs),
        ["speech/digits", "speech/vision/digits", "speech/vision", "speech/../vision/digits"]
    );
    assert_eq!(speech.job("vision/digits").unwrap().name, "speech/vision/digits");
    assert_eq!(names(&admin.jobs().unwrap()).len(), 7);
}

#[test]
fn a_teams_token_opens_nothing_but_jobs() {
    let (manager, [admin, vision, _]) = start_teams(NO_QUOTAS);
    let offer = RegisterHub {
        protocol: VERSION,
        shape: shape(),
        place: Default::default(),
        machine: String::new(),
        keeps_checkpoints: None,
        encrypt: false,
        labels: Vec::new(),
    };
    let more =
        |role, team: Option<&str>| CreateToken { name: "more".into(), role, team: team.map(Into::into) };
    for refused in [
        code(&vision.tokens()),
        code(&vision.create_token(&more(TokenRole::Admin, None))),
        code(&vision.create_token(&more(TokenRole::Team, Some("vision")))),
        code(&vision.revoke_token("speech")),
        code(&vision.teams()),
        code(&vision.set_team("vision", &NO_QUOTAS)),
        code(&vision.set_team("mine", &NO_QUOTAS)),
        code(&vision.remove_team("speech")),
        code(&vision.register_hub(&offer)),
        code(&vision.links()),
        code(&vision.probe_links()),
        code(&vision.drain_hub(0, true)),
        code(&vision.drain_status(0)),
        code(&vision.move_job("vision/a", MoveJob { from: 0, to: None })),
        code(&vision.move_status("vision/a")),
    ] {
        assert_eq!(refused, ErrorCode::Forbidden);
    }
    let vision_token = token(&admin, "alice", "vision");
    let head = format!("GET /metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {vision_token}\r\n\r\n");
    assert!(raw(manager.address(), head.as_bytes()).starts_with("HTTP/1.1 403"));

    // Another token of the team has the same jobs, which outlive the first.
    let alice = client(&manager, &vision_token);
    let job = Job::create(&alice, "digits", 1);
    admin.revoke_token("alice").unwrap();
    for refused in [code(&alice.jobs()), code(&alice.stop_job("digits")), code(&alice.membership("digits"))] {
        assert_eq!(refused, ErrorCode::Unauthorized);
    }
    assert_eq!(code(&alice.create_service(&create("x", 1))), ErrorCode::Unauthorized);
    assert_eq!(vision.job("digits").unwrap().namespace, job.namespace);
    vision.stop_job("digits").unwrap();
}

#[test]
fn a_token_needs_a_team_that_there_is_and_only_one_of_its_role_does() {
    let (_manager, [admin, ..]) = start_teams(NO_QUOTAS);
    let make = |role, team: Option<&str>| {
        code(&admin.create_token(&CreateToken { name: "x".into(), role, team: team.map(Into::into) }))
    };
    assert_eq!(make(TokenRole::Team, None), ErrorCode::BadRequest);
    assert_eq!(make(TokenRole::Team, Some("nobody")), ErrorCode::NotFound);
    assert_eq!(make(TokenRole::Admin, Some("vision")), ErrorCode::BadRequest);
    assert_eq!(code(&admin.set_team("No/Name", &NO_QUOTAS)), ErrorCode::BadRequest);
}

#[test]
fn jobs_at_once_and_weights_of_a_team_have_quotas() {
    let (_manager, [admin, vision, speech]) =
        start_teams(TeamQuotas { jobs: Some(2), weight: Some(5), ..NO_QUOTAS });
    vision.create_service(&create("a", 3)).unwrap();
    let refused = vision.create_service(&create("b", 3));
    assert_eq!(code(&refused), ErrorCode::DoesNotFit);
    assert!(
        message(&refused).contains(
            "job `vision/b` would have weight 3, and the jobs of team `vision` may have weight 5 together, of which \
             `vision/a` has weight 3: "
        ),
        "{refused:?}"
    );
    vision.create_service(&create("b", 2)).unwrap();
    let refused = vision.create_service(&create("c", 1));
    assert_eq!(code(&refused), ErrorCode::DoesNotFit);
    assert!(message(&refused).contains("may have 2 jobs at once, and has `vision/a`, `vision/b`: end one"));
    // They bind jobs in the team's name, whoever creates them, and nobody else's.
    assert_eq!(code(&admin.create_service(&create("vision/c", 1))), ErrorCode::DoesNotFit);
    speech.create_service(&create("a", 5)).unwrap();
    admin.create_service(&create("c", 100)).unwrap();
    let [_, status] = &admin.teams().unwrap()[..] else { panic!("two teams") };
    assert_eq!((status.name.as_str(), status.jobs, status.weight), ("vision", 2, 5));
    vision.stop_job("a").unwrap();
    vision.create_service(&create("c", 3)).unwrap();
    // A quota that is raised counts at once.
    admin.set_team("vision", &TeamQuotas { jobs: Some(3), ..NO_QUOTAS }).unwrap();
    vision.create_service(&create("d", 100)).unwrap();
}

#[test]
fn memory_and_streams_of_a_team_have_quotas_over_all_of_its_hubs() {
    let memory = TeamQuotas { memory_bytes: Some(3 * MEMORY_BYTES), ..NO_QUOTAS };
    let (_manager, [admin, vision, speech]) = start_teams(memory);
    let hubs = [(); 2].map(|()| Hub::join(&admin, HubBehaviour::Serve));
    let (first, outcome) = run(&vision, "a", 2);
    outcome.unwrap();
    assert_eq!(admin.teams().unwrap()[1].memory_bytes, 2 * MEMORY_BYTES);
    // Each hub's part would fit, and both together do not.
    let (second, outcome) = run(&vision, "b", 2);
    let refused = outcome.unwrap_err();
    assert!(
        refused.contains(
            "job `vision/b` needs 200 MiB at its hubs, and the jobs of team `vision` may have 300 MiB of memory together, \
             of which `vision/a` has 200 MiB of memory: "
        ),
        "{refused}"
    );
    assert_eq!(second.client.job("b").unwrap().state, JobState::Failed);
    assert_eq!(vision.job("a").unwrap().state, JobState::Running);
    let (_, outcome) = run(&speech, "a", 2);
    outcome.unwrap();
    hubs.iter().for_each(|hub| hub.finish(&first));
    eventually("the first job's memory is free", || admin.teams().unwrap()[1].memory_bytes == 0);
    let (_, outcome) = run(&vision, "c", 2);
    outcome.unwrap();

    admin.set_team("vision", &TeamQuotas { streams: Some(7), ..NO_QUOTAS }).unwrap();
    let (_, outcome) = run(&vision, "d", 2);
    let refused = outcome.unwrap_err();
    assert!(
        refused.contains(
            "job `vision/d` would open 4 streams to its hubs, and the jobs of team `vision` may have 7 streams together, of \
             which `vision/c` has 4 streams: "
        ),
        "{refused}"
    );
    // Hubs refuse their part before they allocate: they learn what is left.
    let plans: Vec<_> = hubs.into_iter().flat_map(Hub::die).filter_map(allocation).collect();
    let left = |name: &str| {
        let team = &plans.iter().find(|plan| plan.name == name).unwrap().team;
        [&team.memory_bytes, &team.streams]
            .map(|allowance| allowance.as_ref().map(|allowance| allowance.left))
    };
    assert_eq!(left("vision/a"), [Some(3 * MEMORY_BYTES), None]);
    assert_eq!(left("vision/b"), [Some(MEMORY_BYTES), None]);
    assert_eq!(left("speech/a"), [Some(3 * MEMORY_BYTES), None]);
    assert_eq!(left("vision/d"), [None, Some(3)]);
}

fn allocation(command: HubCommand) -> Option<Box<JobPlan>> {
    match command {
        HubCommand::Allocate(plan) => Some(plan),
        _ => None,
    }
}

#[test]
fn teams_and_their_tokens_outlive_the_manager() {
    let directory = tempfile::tempdir().unwrap();
    let quotas = TeamQuotas { jobs: Some(1), memory_bytes: Some(1 << 40), ..NO_QUOTAS };
    let (manager, admin) = start_kept(Some(directory.path()));
    admin.set_team("vision", &NO_QUOTAS).unwrap();
    admin.set_team("vision", &quotas).unwrap();
    admin.set_team("gone", &quotas).unwrap();
    admin.remove_team("gone").unwrap();
    let token = token(&admin, "alice", "vision");
    client(&manager, &token).create_service(&create("digits", 1)).unwrap();
    manager.stop();

    let (manager, admin) = start_kept(Some(directory.path()));
    let [team] = &admin.teams().unwrap()[..] else { panic!("one team") };
    assert_eq!((team.name.as_str(), team.quotas, team.jobs), ("vision", quotas, 1));
    let alice = client(&manager, &token);
    assert_eq!(names(&alice.jobs().unwrap()), ["vision/digits"]);
    assert_eq!(code(&alice.create_service(&create("more", 1))), ErrorCode::DoesNotFit);
    alice.stop_job("digits").unwrap();
    alice.create_service(&create("digits", 1)).unwrap();
    assert_eq!(code(&alice.create_service(&create("more", 1))), ErrorCode::DoesNotFit);
    let listed = admin.tokens().unwrap();
    assert!(listed.iter().any(|token| token.name == "alice" && token.team.as_deref() == Some("vision")));
}

#[test]
fn a_team_is_not_removed_under_its_tokens_or_jobs() {
    let (_manager, [admin, vision, _]) = start_teams(NO_QUOTAS);
    vision.create_service(&create("digits", 1)).unwrap();
    let refused = admin.remove_team("vision");
    assert_eq!(code(&refused), ErrorCode::Busy);
    assert!(message(&refused).contains("revoke `vision` first"), "{refused:?}");
    admin.revoke_token("vision").unwrap();
    let refused = admin.remove_team("vision");
    assert_eq!(code(&refused), ErrorCode::Busy);
    assert!(message(&refused).contains("has 1 jobs that live"), "{refused:?}");
    admin.stop_job("vision/digits").unwrap();
    assert_eq!(admin.remove_team("vision").unwrap().name, "vision");
    assert_eq!(code(&admin.remove_team("vision")), ErrorCode::NotFound);
    assert_eq!(admin.teams().unwrap().len(), 1);
}

#[test]
fn a_team_that_calls_without_end_leaves_room_for_operators() {
    let (manager, [admin, vision, speech]) = start_teams(NO_QUOTAS);
    let token = token(&admin, "flood", "vision");
    // Heads that prove the token, and bodies that do not come.
    let head = format!(
        "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n\
         content-length: 100\r\n\r\n"
    );
    let flood: Vec<_> = (0..300)
        .map(|_| {
            use std::io::Write;
            let mut stream = std::net::TcpStream::connect(manager.address()).unwrap();
            stream.write_all(head.as_bytes()).unwrap();
            stream
        })
        .collect();
    eventually("the team has no place left", || {
        vision.jobs().is_err_and(|refused| refused.to_string().contains("calls of team `vision`"))
    });
    assert!(admin.jobs().is_ok() && speech.jobs().is_ok());
    drop(flood);
}
