//! `paramhub train`: the main task, with real worker processes, hub and data.

use paramhub::ManagerClient;
use paramhub::service::JobState;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::parameters::{assert_differ_by_rounding, parameters};
use crate::common::{hub, is_alive, paramhub, rank_of, wait_until, workers_of};

const SMALL: [&str; 7] = ["train", "--net", "mlp", "--epochs", "12", "--workers", "4"];

fn with<'a>(more: &'a [&'a str]) -> impl Iterator<Item = &'a str> {
    SMALL.into_iter().chain(more.iter().copied())
}

#[test]
fn four_workers_learn_through_a_hub_and_end_with_the_same_parameters() {
    let arguments = ["train", "--net", "lenet", "--data", "digits", "--epochs", "8", "--json", "out.json"];
    let ended = paramhub(arguments).finish().expect_code(0);
    let text = String::from_utf8(ended.read("out.json")).unwrap();
    let results: serde_json::Value = serde_json::from_str(&text).unwrap();
    let number = |name: &str| results[name].as_f64().unwrap_or_else(|| panic!("no {name} in {text}"));
    assert!(number("accuracy") >= 0.95, "{text}");
    assert_eq!(number("max_parameter_difference"), 0.0);
    assert!(number("steps_per_second") > 0.0 && (0.0..=1.0).contains(&number("hidden_fraction")));
    // Every gradient is sent and every parameter received, each with its headers.
    let parameters = 114_880.0 * 4.0;
    let bytes = number("bytes_per_worker_per_step");
    assert!(bytes > 2.0 * parameters * 0.9 && bytes < 2.0 * parameters * 1.2, "{bytes}");
    assert_eq!(results["workers"].as_array().unwrap().len(), 4);
    assert_eq!(results["hub_busy"].as_array().unwrap().len(), 1);
    assert_eq!(results["settings"]["epochs"], 8);

    for row in [
        "test accuracy",
        "steps/s",
        "bytes per worker and step",
        "compute",
        "waiting",
        "hidden",
        "core 0 busy",
    ] {
        assert!(ended.stdout.contains(row), "no {row} in\n{}", ended.stdout);
    }
    let measured = ended.stderr.matches("  test accuracy 0.").count();
    assert_eq!(measured, 8, "it shows on the way how well it does: {}", ended.stderr);
    assert!(ended.stderr.contains("step 176/176") && ended.stderr.contains("examples/s"), "{}", ended.stderr);
    let controls = |text: &str| text.chars().any(|c| c.is_control() && c != '\n');
    assert!(!controls(&ended.stdout) && !controls(&ended.stderr), "control characters without a terminal");
}

#[test]
fn reproducible_runs_end_at_the_bits_of_one_process() {
    let saved = |more: &[&str]| {
        let common = ["--epochs", "2", "--reproducible", "--save", "p.safetensors"];
        let ended = paramhub(with(&common).chain(more.iter().copied())).finish().expect_code(0);
        let file = ended.read("p.safetensors");
        assert_eq!(safetensors::SafeTensors::deserialize(&file).unwrap().len(), 6);
        file
    };
    let local = saved(&["--exchange", "local"]);
    for more in
        [&[][..], &["--cores", "2"], &["--chunk-bytes", "4K"], &["--optimizer", "sgd", "--chunk-bytes", "1M"]]
    {
        assert!(saved(more) == local, "{more:?} ended elsewhere than one process");
    }
    assert!(saved(&["--seed", "2"]) != local, "any run gives the same bits, so this test shows nothing");
}

#[test]
fn layers_by_factors_reach_the_parameters_of_the_hub() {
    let trained = |scheme: &str| {
        let common = ["--epochs", "2", "--scheme", scheme, "--save", "p.safetensors", "--json", "out.json"];
        let ended = paramhub(with(&common)).finish().expect_code(0);
        let results: serde_json::Value = serde_json::from_slice(&ended.read("out.json")).unwrap();
        assert_eq!(results["max_parameter_difference"], 0.0, "all ranks have the same bits");
        let values = parameters(&ended.read("p.safetensors"));
        (values, ended.stderr)
    };
    let (by_hub, output) = trained("hub");
    assert!(!output.contains("goes by"), "{output}");
    let (by_factors, output) = trained("factors");
    assert!(
        output.contains("layer fc1 goes by factors: as asked")
            && output.contains("layer fc3 goes by factors"),
        "{output}"
    );
    let (mixed, output) = trained("auto");
    // 10 outputs of 64 inputs are fewer numbers than 16 samples of both.
    assert!(
        output.contains("layer fc1 goes by factors") && output.contains("layer fc3 goes by hub"),
        "{output}"
    );
    let (to_hub, output) = trained("factors-to-hub");
    assert!(output.contains("layer fc1 goes by factors-to-hub: as asked"), "{output}");
    assert!(trained("factors-to-hub").0 == to_hub, "another run ends at other bits");
    let untrained = ["--epochs", "1", "--lr", "1e-20", "--exchange", "local", "--save", "p.safetensors"];
    let initial = parameters(&paramhub(with(&untrained)).finish().expect_code(0).read("p.safetensors"));
    for (other, name) in [(by_factors, "factors"), (mixed, "auto"), (to_hub, "factors-to-hub")] {
        assert_differ_by_rounding(&other, &by_hub, &initial, name);
        assert!(
            other != by_hub,
            "products are summed in another order, so something was not exchanged by factors"
        );
    }
    let refused = paramhub(with(&["--scheme", "factors", "--exchange", "local"])).finish().expect_code(2);
    refused.expect_error(&["`scheme` would have no effect with the exchange local", "use the exchange hub"]);
}

#[test]
fn the_transport_is_chosen_and_shown_and_changes_no_bit() {
    let (_hub, without) = hub(["--no-shared-memory"]);
    let trained = |more: &[&str], shown: &str| {
        let common = ["--epochs", "2", "--reproducible", "--save", "p.safetensors", "--json", "out.json"];
        let ended = paramhub(with(&common).chain(more.iter().copied())).finish().expect_code(0);
        let row = ended.stdout.lines().find(|line| line.contains("transport")).expect("a transport");
        assert!(row.contains(&format!(" {shown} ")), "{more:?}: {row}");
        let results: serde_json::Value = serde_json::from_slice(&ended.read("out.json")).unwrap();
        let workers = results["workers"].as_array().unwrap();
        assert!(workers.iter().all(|worker| worker["transport"] == shown), "{more:?}: {results}");
        ended.read("p.safetensors")
    };
    let over_tcp = trained(&["--transport", "tcp"], "tcp");
    for (more, shown) in [
        (&[][..], "shared memory"),
        (&["--transport", "shm", "--cores", "2"], "shared memory"),
        (&["--hub", &without], "tcp"),
    ] {
        assert!(trained(more, shown) == over_tcp, "{more:?} ended at other bits");
    }
    let refused = paramhub(with(&["--transport", "shm", "--hub", &without])).finish().expect_code(1);
    for part in ["rank ", "the transport shm needs", "--no-shared-memory", "use the transport auto or tcp"] {
        assert!(refused.stderr.contains(part), "no `{part}` in: {}", refused.stderr);
    }
}

#[test]
fn data_comes_from_folders_as_well() {
    let folder = concat!("idx:", env!("CARGO_MANIFEST_DIR"), "/../../data/digits");
    let trained_on = |data: &str| {
        let common = ["--exchange", "local", "--epochs", "1", "--save", "p.safetensors", "--data", data];
        paramhub(with(&common)).finish().expect_code(0).read("p.safetensors")
    };
    assert_eq!(trained_on("digits"), trained_on(folder), "the bundled digits are IDX files like any other");

    let arguments = [
        "train",
        "--net",
        "cifar-quick",
        "--data",
        "cifar10:cifar",
        "--epochs",
        "1",
        "--workers",
        "2",
        "--batch",
        "8",
    ];
    let mut program = paramhub(arguments);
    std::fs::create_dir(program.folder().join("cifar")).unwrap();
    let record =
        |number: usize| (0..3073).map(move |at| if at == 0 { number % 10 } else { number * at % 251 } as u8);
    for name in (1..=5).map(|batch| format!("data_batch_{batch}.bin")).chain(["test_batch.bin".into()]) {
        let records: Vec<u8> = (0..20).flat_map(record).collect();
        program = program.file(&format!("cifar/{name}"), &records);
    }
    let ended = program.finish().expect_code(0);
    assert!(ended.stderr.contains("step 6/6"), "{}", ended.stderr);
}

#[test]
fn one_process_trains_without_a_hub() {
    let ended = paramhub(with(&["--exchange", "local", "--json", "out.json"])).finish().expect_code(0);
    let json = String::from_utf8(ended.read("out.json")).unwrap();
    let results: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(results["accuracy"].as_f64().unwrap() >= 0.9, "{json}");
    assert!(results["bytes_per_worker_per_step"].is_null());
    assert_eq!(results["max_parameter_difference"], 0.0);
    assert!(!ended.stdout.contains("hub core"), "{}", ended.stdout);
}

#[test]
fn every_consistency_codec_and_optimizer_learns() {
    for more in [
        &["--consistency", "async"][..],
        &["--consistency", "staleness:2", "--codec", "bf16"],
        &["--codec", "f16", "--optimizer", "nesterov"],
        &["--optimizer", "adamw", "--cores", "2"],
        &["--optimizer", "adam", "--workers", "1"],
        &["--codec", "two-bit", "--optimizer", "nesterov", "--chunk-bytes", "4K"],
    ] {
        let ended = paramhub(with(more)).finish().expect_code(0);
        let row = ended.stdout.lines().find(|line| line.contains("test accuracy")).expect("an accuracy");
        let accuracy: f64 = row.split_whitespace().find_map(|word| word.parse().ok()).expect("a number");
        assert!(accuracy >= 0.85, "{more:?}: {accuracy}");
    }
}

/// One bit is enough to learn if its losses are fed back. Ranks have the same parameters to the bit although
/// each has losses of its own.
#[test]
fn quantised_gradients_learn_what_exact_ones_do_with_a_fraction_of_the_bytes() {
    let trained = |more: &[&str]| {
        // Through shared memory there are no bytes to save.
        let common = ["--epochs", "40", "--json", "out.json", "--transport", "tcp"];
        let ended = paramhub(with(&common).chain(more.iter().copied())).finish().expect_code(0);
        let results: serde_json::Value = serde_json::from_slice(&ended.read("out.json")).unwrap();
        let number = |name: &str| results[name].as_f64().unwrap_or_else(|| panic!("no {name} in {results}"));
        assert_eq!(number("max_parameter_difference"), 0.0, "{more:?}");
        [number("accuracy"), number("bytes_per_worker_per_step")]
    };
    let [exact, exact_bytes] = trained(&[]);
    for (more, share) in [
        (&["--codec", "one-bit"][..], 0.06),
        (&["--codec", "two-bit", "--workers", "3"], 0.1),
        (&["--codec", "one-bit", "--optimizer", "adam", "--workers", "2", "--cores", "2"], 0.06),
        (&["--codec", "int8", "--optimizer", "adam", "--workers", "2", "--cores", "2"], 0.28),
    ] {
        let [accuracy, bytes] = trained(more);
        println!("{more:?}: accuracy {accuracy} beside {exact}, {bytes} bytes beside {exact_bytes}");
        assert!(accuracy > 0.9 && accuracy > exact - 0.04, "{more:?}: {accuracy} beside {exact}");
        // Biases, headers and heartbeats are the same.
        assert!(bytes < exact_bytes * share, "{more:?}: {bytes} of {exact_bytes}");
    }
}

#[test]
fn the_progress_of_trainings_is_reported_by_epoch_and_drawn() {
    let trained = |codec: &str| {
        let more = ["--codec", codec, "--test-every", "3", "--workers", "2", "--json", "out.json"];
        paramhub(with(&more)).finish().expect_code(0).read("out.json")
    };
    let [exact, quantised] = ["f32", "one-bit"].map(trained);
    let results: serde_json::Value = serde_json::from_slice(&exact).unwrap();
    let epochs = results["epochs"].as_array().unwrap();
    assert_eq!(epochs.len(), 12);
    let steps = results["steps"].as_u64().unwrap();
    for (number, epoch) in (1..).zip(epochs) {
        assert_eq!(
            (epoch["epoch"].as_u64(), epoch["step"].as_u64()),
            (Some(number), Some(number * steps / 12))
        );
        assert_eq!(epoch["accuracy"].is_number(), number % 3 == 0, "{epoch}");
    }
    assert_eq!(epochs[11]["accuracy"], results["accuracy"], "both are of the final parameters");
    assert!(epochs[11]["loss"].as_f64() < epochs[0]["loss"].as_f64());

    let plot = |more: &[&str]| {
        let arguments = ["bench", "plot", "f32.json", "--svg", "out.svg"].into_iter();
        let program = paramhub(arguments.chain(more.iter().copied()));
        program.file("f32.json", &exact).file("one-bit.json", &quantised).finish()
    };
    let drawn = plot(&["one-bit.json", "--curve", "error"]).expect_code(0).read("out.svg");
    let drawn = String::from_utf8(drawn).unwrap();
    assert!(["mlp, f32", "mlp, one-bit", "% wrong"].iter().all(|text| drawn.contains(text)), "{drawn}");
    let refused = plot(&["gone.json"]).expect_code(1).stderr;
    assert!(refused.contains("cannot read gone.json"), "{refused}");
    let refused = paramhub(with(&["--test-every", "0"])).finish().expect_code(2).stderr;
    assert!(refused.contains("--test-every"), "{refused}");
}

#[test]
fn a_running_hub_serves_two_trainings_at_once_and_forgets_both() {
    let (hub, url) = hub([]);
    let first = paramhub(with(&["--hub", &url])).start();
    let second = paramhub(with(&["--hub", &url, "--optimizer", "adam"])).start();
    for train in [first, second] {
        let ended = train.finish().expect_code(0);
        assert!(ended.stdout.contains("test accuracy"), "{}", ended.stdout);
    }
    let client = ManagerClient::new(&url, None).unwrap();
    let finished = || client.jobs().unwrap().iter().filter(|job| job.state == JobState::Finished).count();
    wait_until("both jobs are finished", || finished() == 2);
    assert!(client.jobs().unwrap().iter().all(|job| job.name.starts_with("train-")));
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

/// A report of so many epochs is longer than the longest line that a launcher accepts.
#[test]
fn a_training_of_a_thousand_epochs_reports_all_of_them() {
    let arguments = [
        "train",
        "--net",
        "mlp",
        "--workers",
        "2",
        "--batch",
        "700",
        "--epochs",
        "1000",
        "--json",
        "report.json",
    ];
    let ended =
        paramhub(arguments.into_iter().chain(["--save", "learnt.safetensors"])).finish().expect_code(0);
    let report = ended.read("report.json");
    assert!(report.len() > 64 << 10, "{} bytes would have fitted", report.len());
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert_eq!(report["epochs"].as_array().unwrap().len(), 1000);
    assert!(!ended.stderr.contains("\"event\""), "{}", ended.stderr);
    assert!(ended.stdout.contains("test accuracy"), "{}", ended.stdout);
}

#[test]
fn ctrl_c_ends_workers_and_hub_with_130() {
    let train = paramhub(with(&["--epochs", "100000"])).start();
    wait_until("training has begun", || train.stderr().contains("step 1/"));
    let workers = workers_of(train.pid());
    assert_eq!(workers.len(), 4);
    train.signal(Signal::INT);
    let ended = train.finish().expect_code(130);
    assert!(ended.stderr.contains("interrupted"), "{}", ended.stderr);
    assert!(!workers.into_iter().any(is_alive));
}

#[test]
fn a_worker_that_dies_is_named_and_nothing_is_left() {
    let train = paramhub(with(&["--epochs", "100000"])).start();
    wait_until("training has begun", || train.stderr().contains("step 1/"));
    let workers = workers_of(train.pid());
    let rank = rank_of(workers[2]);
    kill_process(Pid::from_raw(workers[2]).unwrap(), Signal::KILL).unwrap();
    let ended = train.finish().expect_code(1);
    let last = ended.stderr.lines().last().unwrap();
    assert!(last.starts_with("paramhub: ") && last.contains(&format!("worker {rank} was killed")), "{last}");
    assert!(!workers.into_iter().any(is_alive));
}
