//! File, environment and flags: their precedence, refused values, and what is shown.

use crate::common::{Finished, Program, paramhub};

const FILE: &str = "admin_token = 'very-secret'\n\n[train]\nworkers = 2\nepochs = 5\nbatch = 7\n";

#[track_caller]
fn has(finished: &Finished, line: &str) {
    assert!(finished.stdout.lines().any(|found| found == line), "no `{line}` in\n{}", finished.stdout);
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let shown = paramhub(["train", "--workers", "8", "--print-config"])
        .file("paramhub.toml", FILE)
        .env("PARAMHUB_TRAIN_WORKERS", "6")
        .env("PARAMHUB_TRAIN_EPOCHS", "9")
        .finish()
        .expect_code(0);
    for line in ["workers = 8", "epochs = 9", "batch = 7", "net = \"lenet\"", "lr = 0.02"] {
        has(&shown, line);
    }
    assert!(!shown.stdout.contains("very-secret") && shown.stdout.contains("admin_token is set"));
    assert_eq!(shown.stderr, "");
}

#[test]
fn a_printed_configuration_reproduces_the_flags() {
    let flags = [
        "hub",
        "--cores",
        "3",
        "--streams",
        "2",
        "--listen",
        "127.0.0.1:0,127.0.0.2:0",
        "--memory",
        "2G",
        "--pin",
        "no",
    ];
    let first = paramhub(flags.into_iter().chain(["--print-config"])).finish().expect_code(0);
    has(&first, "memory = \"2G\"");
    has(&first, "cores = 3");
    has(&first, "streams = 2");
    let second =
        paramhub(["hub", "--config", "mine.toml", "--print-config"]).file("mine.toml", &first.stdout);
    assert_eq!(second.finish().expect_code(0).stdout, first.stdout);
}

#[test]
fn shared_memory_is_switched_off_by_flag_environment_and_file() {
    let shown = |program: Program| program.finish().expect_code(0);
    let by_default = shown(paramhub(["hub", "--print-config"]));
    has(&by_default, "shared_memory = true");
    has(&by_default, "spin_us = 0");
    has(&shown(paramhub(["hub", "--spin-us", "50", "--print-config"])), "spin_us = 50");
    has(&by_default, "transport = \"auto\"");
    has(&shown(paramhub(["hub", "--no-shared-memory", "--print-config"])), "shared_memory = false");
    let off = |value| paramhub(["hub", "--print-config"]).env("PARAMHUB_HUB_NO_SHARED_MEMORY", value);
    has(&shown(off("true")), "shared_memory = false");
    let file = "[hub]\nshared_memory = false\n[train]\ntransport = 'shm'\n";
    let by_file = shown(paramhub(["hub", "--print-config"]).file("paramhub.toml", file));
    has(&by_file, "shared_memory = false");
    has(&by_file, "transport = \"shm\"");
    has(&shown(off("false").file("paramhub.toml", file)), "shared_memory = true");
    let by_flag = paramhub(["train", "--transport", "tcp", "--print-config"]);
    has(&shown(by_flag.env("PARAMHUB_TRAIN_TRANSPORT", "shm")), "transport = \"tcp\"");
}

#[test]
fn another_file_can_be_named_by_flag_and_by_environment() {
    let by_environment = paramhub(["train", "--print-config"])
        .file("other.toml", "[train]\nseed = 42\n")
        .file("paramhub.toml", "[train]\nseed = 43\n")
        .env("PARAMHUB_CONFIG", "other.toml");
    has(&by_environment.finish().expect_code(0), "seed = 42");
    let missing = paramhub(["train", "--config", "nowhere.toml"]).finish().expect_code(2);
    missing.expect_error(&["nowhere.toml", "cannot be read"]);
}

#[test]
fn an_unknown_key_names_file_line_and_nearest_key() {
    let refused = paramhub(["train"]).file("paramhub.toml", "[train]\nworkers = 2\noptimiser = 'sgd'\n");
    let error = refused.finish().expect_code(2);
    error.expect_error(&["paramhub.toml, line 3", "`optimiser`", "did you mean `optimizer`?"]);
}

#[test]
fn a_variable_that_nothing_reads_is_named_with_the_nearest_one() {
    let shown = paramhub(["hub", "--print-config"])
        .env("PARAMHUB_HUB_CORE", "3")
        .env("PARAMHUB_SERVICE_HOST", "10.0.0.1")
        .env("PARAMHUB_PORT_7770_TCP", "tcp://10.0.0.1:7770")
        .env("PARAMHUB_TRACE", "trace.json")
        .finish();
    let stderr = shown.expect_code(0).stderr;
    let expected = "paramhub: the environment sets PARAMHUB_HUB_CORE, which nothing reads: did you mean PARAMHUB_HUB_CORES?\n";
    assert_eq!(stderr, expected);
}

#[test]
fn a_value_that_a_manager_refuses_as_wrong_is_wrong_usage_too() {
    let run = |more: &[&'static str]| paramhub(more.iter().copied()).finish().expect_code(2);
    run(&["run", "--name", "no such name", "--", "true"]).expect_error(&["is no job name"]);
    run(&["run", "--dead-after", "0", "--", "true"]).expect_error(&["dead_after_s", "1 to 86400 seconds"]);
    let train = ["train", "--net", "mlp", "--epochs", "1", "--workers", "2", "--name", "no such name"];
    let refused = paramhub(train).finish().expect_code(2);
    assert!(refused.stderr.contains("is no job name"), "{}", refused.stderr);
}

#[test]
fn a_hub_is_found_wrong_before_its_manager_starts() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (more, code, part) in [
        (&["--cores", "0"][..], 2, "not 0"),
        (&["--cores", "100000"], 2, "100000"),
        (&["--job-share", "200"], 2, "1 to 100 percent"),
        (&["--advertise", "a:1,b:2"], 2, "2 addresses are advertised for 1"),
        (&["--listen", &taken], 1, "in use"),
    ] {
        let common = ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--log", "info"];
        let refused = paramhub(common.into_iter().chain(more.iter().copied())).finish().expect_code(code);
        // At this log level, the default, a manager that starts logs a line. There is none, so none has
        // started.
        refused.expect_error(&[part]);
    }
    let processors = std::thread::available_parallelism().unwrap().get();
    let many = (processors * 8 + 1).to_string();
    let arguments = ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--cores", &many];
    let refused = paramhub(arguments).finish().expect_code(2);
    refused.expect_error(&["take turns", &format!("ask for {processors}, ")]);
}

#[test]
fn wrong_values_say_what_would_do() {
    for (arguments, part) in [
        (&["train", "--optimizer", "mean"][..], "updates no parameters"),
        (&["train", "--net", "resnet"], "use `mlp`, `lenet`, `cifar-quick` or `inception`"),
        (&["train", "--codec", "f8"], "expected f32, f16, bf16, one-bit, two-bit, int8"),
        (&["train", "--codec", "one-bit", "--consistency", "async"], "only in a synchronous job"),
        (&["train", "--consistency", "eventual"], "staleness:STEPS"),
        (&["train", "--chunk-bytes", "1000001"], "chunk size 1000001 is not a multiple of 4"),
        (
            &["train", "--reproducible", "--consistency", "async"],
            "`reproducible` cannot be combined with asynchronous",
        ),
        (&["train", "--transport", "ipc"], "expected auto, tcp or shm"),
        (&["train", "--exchange", "local", "--transport", "tcp"], "locally nothing travels"),
        (&["train", "--exchange", "depcha", "--transport", "shm"], "it is for hubs"),
        (&["train", "--exchange", "funnel", "--reproducible"], "it is about sums that hubs make"),
        (&["train", "--exchange", "concom", "--chunk-bytes", "64K"], "`chunk_bytes` would have no effect"),
        (
            &["train", "--exchange", "funnel", "--stragglers", "backup:1"],
            "`stragglers` other than wait would have no effect",
        ),
        (&["train", "--exchange", "concom", "--resume"], "would have no effect with the exchange concom"),
        (&["train", "--compute-threads", "2"], "use the exchange funnel, concom or depcha"),
        (&["train", "--exchange", "ring"], "[possible values: hub, local, funnel, concom, depcha]"),
        (&["train", "--workers", "100"], "choose a --batch from 1 to 14"),
        (&["train", "--exchange", "local", "--codec", "f16"], "use the exchange hub"),
        (&["train", "--optimizer", "nesterov", "--momentum", "0"], "momentum"),
        (&["train", "--json", "no/such/folder/out.json"], "there is no folder"),
        (&["run", "-n", "0", "--", "true"], "0 is not in 1..="),
        (&["jobs", "--hub", "ftp://somewhere"], "neither http nor https"),
        (&["hub", "--cores", "many"], "expected a whole number"),
        (&["run", "--dead-after", "soon", "--", "true"], "expected a number"),
        (&["train", "--resume"], "--checkpoints DIR"),
        (&["train", "--checkpoint-every", "10"], "--checkpoints DIR"),
        (&["run", "--name", "a", "--resume", "--", "true"], "--checkpoints DIR"),
        (&["manager", "--listen", "127.0.0.1:0", "--hub-dead-after", "0.01"], "between 100 ms and a day"),
        (
            &["hub", "--join", "http://127.0.0.1:1", "--hub-dead-after", "5"],
            "give it to the connection manager",
        ),
        (&["manager", "--listen", "0.0.0.0:0"], "without an admin token"),
        (&["jobs", "list", "--state", "sleeping"], "possible values: living"),
    ] {
        let refused = paramhub(arguments.iter().copied()).finish().expect_code(2);
        assert!(refused.stderr.contains(part), "{arguments:?}: {}", refused.stderr);
        assert!(refused.stderr.starts_with("paramhub: "), "{arguments:?}: {}", refused.stderr);
        assert_eq!(refused.stdout, "", "{arguments:?}");
    }
    let missing = paramhub(["train", "--data", "idx:nowhere"]).finish().expect_code(1);
    missing.expect_error(&["nowhere"]);
}

/// Most programs are built without etcd.
#[cfg(not(feature = "etcd"))]
#[test]
fn a_state_in_etcd_needs_a_feature_of_the_build() {
    for command in
        [["manager", "--state", "etcd://127.0.0.1/p"], ["manager", "--state", "etcds://127.0.0.1/p?ca=x"]]
    {
        let refused = paramhub(command).finish().expect_code(2);
        refused.expect_error(&["built without the feature `etcd`", "--features etcd"]);
    }
}
