//! `paramhub bench exchange`: real worker processes, a real hub, every number checked.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Process, is_alive, paramhub, wait_until};

const KEYS: &str = r#"{"model": "tiny", "tensors": [
    {"name": "front", "shape": [64, 3, 7]}, {"name": "bias", "shape": [5]}, {"name": "back", "shape": [40000]}]}"#;
const ELEMENTS: f64 = 64.0 * 3.0 * 7.0 + 5.0 + 40_000.0;

/// The JSON and the terminal output of a short run.
fn tiny(keys: &str, more: &[&str]) -> (Value, String) {
    let arguments = ["bench", "exchange", "--keys", "keys.json", "--iters", "3", "--json", "out.json"];
    let program = paramhub(arguments.into_iter().chain(more.iter().copied())).file("keys.json", keys);
    let ended = program.finish().expect_code(0);
    (serde_json::from_slice(&ended.read("out.json")).expect("valid JSON"), ended.stdout)
}

#[test]
fn a_tiny_model_is_exchanged_exactly_and_timed_beside_raw_streams() {
    let more = ["--workers", "2", "--raw", "--cores", "2", "--streams", "3", "--chunk", "4K"];
    let (results, shown) = tiny(KEYS, &[&more[..], &["--optimizer", "nesterov"]].concat());
    let number = |name: &str| results[name].as_f64().unwrap_or_else(|| panic!("no {name} in {results}"));
    assert_eq!((results["model"].as_str(), results["transport"].as_str()), (Some("tiny"), Some("tcp")));
    assert_eq!((number("workers"), number("bytes_per_worker")), (2.0, 4.0 * ELEMENTS));
    assert_eq!(number("max_abs_error"), 0.0);
    let median = number("seconds_median");
    assert!(0.0 < number("p10") && number("p10") <= median && median <= number("p90"));
    assert!((number("exchanges_per_second") * median - 1.0).abs() < 1e-9);
    assert!((number("raw_ratio") * median / number("raw_seconds_median") - 1.0).abs() < 1e-9);
    assert!((number("algbw") * median * 1e9 / (4.0 * ELEMENTS) - 1.0).abs() < 1e-9);
    assert_eq!(number("busbw"), number("algbw"), "two workers: 2 (N - 1) / N is 1");
    assert!(number("cpu_seconds_worker") > 0.0 && number("cpu_seconds_hub") > 0.0);
    // A process has some megabytes before it holds any tensor.
    assert!(number("hub_peak_bytes") > 1e6 && number("worker_peak_bytes") > 8.0 * ELEMENTS);
    assert_eq!(results["hub_busy"].as_array().map(Vec::len), Some(2));
    let settings = &results["settings"];
    assert_eq!((settings["optimizer"].as_str(), settings["raw"].as_bool()), (Some("nesterov"), Some(true)));
    assert_eq!(settings["streams"].as_u64(), Some(3));
    for part in [
        "tiny: 3 keys",
        "3 streams a worker and core",
        "raw streams",
        "busbw",
        "hub core 1 busy",
        "all exact",
    ] {
        assert!(shown.contains(part), "no {part} in\n{shown}");
    }
}

#[test]
fn every_optimizer_and_dtype_is_exact_and_a_bare_list_will_do() {
    let bare = r#"[{"name": "w", "shape": [3000]}, {"name": "b", "shape": []}]"#;
    for (more, bytes) in [
        (&["--workers", "2", "--optimizer", "mean", "--dtype", "bf16"][..], 2.0 * 3001.0),
        (&["--workers", "2", "--optimizer", "sgd", "--dtype", "f16", "--chunk", "4K"], 2.0 * 3001.0),
        (&["--workers", "1", "--optimizer", "adam", "--warmup", "0"], 4.0 * 3001.0),
        (&["--workers", "3", "--scale", "10"], 4.0 * 301.0),
    ] {
        let (results, shown) = tiny(bare, more);
        assert_eq!(results["bytes_per_worker"].as_f64(), Some(bytes), "{more:?}");
        assert_eq!(results["max_abs_error"].as_f64(), Some(0.0), "{more:?}: {shown}");
        assert_eq!(results["model"], "keys", "a bare list is called as its file");
        assert!(results["raw_ratio"].is_null() && results["raw_seconds_median"].is_null());
        assert!(!shown.contains("raw"), "{shown}");
    }
}

#[test]
fn quantised_exchanges_of_two_to_four_processes_are_exact_and_small_both_ways() {
    let mixed = r#"[{"name": "fc.weight", "shape": [600, 700]}, {"name": "fc.bias", "shape": [600]},
        {"name": "conv.weight", "shape": [8, 4, 3, 3]}, {"name": "out.weight", "shape": [10, 70]}]"#;
    let others = 4.0 * (600.0 + 8.0 * 4.0 * 9.0);
    let matrices = 4.0 * (600.0 * 700.0 + 700.0);
    for (more, share) in [
        (&["--workers", "2", "--codec", "one-bit", "--optimizer", "nesterov"][..], 30.0),
        (&["--workers", "2", "--codec", "int8", "--optimizer", "adam"], 3.9),
        (&["--workers", "3", "--codec", "two-bit", "--optimizer", "adam", "--cores", "2"], 15.0),
        (&["--workers", "4", "--codec", "one-bit", "--optimizer", "mean"], 30.0),
    ] {
        let (results, shown) = tiny(mixed, more);
        assert_eq!(results["max_abs_error"].as_f64(), Some(0.0), "{more:?}: {shown}");
        // int8 is for all keys, the others are for matrices.
        let (exact_bytes, quantised) =
            if more.contains(&"int8") { (0.0, matrices + others) } else { (others, matrices) };
        let (results_of_shm, shown) = tiny(mixed, &[more, &["--transport", "shm"]].concat());
        assert_eq!(results_of_shm["max_abs_error"].as_f64(), Some(0.0), "{more:?}, shm: {shown}");
        for way in ["frame_bytes_sent", "frame_bytes_received"] {
            let bytes = results[way].as_f64().unwrap();
            // The rest is headers of the exact keys' chunks and an occasional heartbeat.
            assert!(bytes - exact_bytes - 100.0 < quantised / share, "{more:?}: {way} {bytes}");
            assert!(bytes - exact_bytes > quantised / share * 0.9, "{more:?}: {way} {bytes}");
        }
    }
}

#[test]
fn a_training_is_played_by_every_system() {
    let arguments =
        ["bench", "poseidon", "--model", "vgg19", "--scale", "1024", "--workers", "2", "--steps", "2"];
    let more =
        ["--rounds", "2", "--systems", "sequential,wfbp,poseidon,factors,one-bit,adam", "--link", "1gbit"];
    let written = ["--json", "out.json", "--svg", "out.svg"];
    let ended = paramhub(arguments.into_iter().chain(more).chain(written)).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let drawn = String::from_utf8(ended.read("out.svg")).unwrap();
    assert!(["1-bit", "Poseidon", "stalled"].iter().all(|text| drawn.contains(text)), "{drawn}");
    let compute = results["setting"]["compute_seconds"].as_f64().unwrap();
    // 32 images at 35.5 a second, divided by the scale.
    assert!((compute - 32.0 / 35.5 / 1024.0).abs() < 1e-9, "{compute}");
    let systems = results["systems"].as_array().unwrap();
    for (row, name) in systems.iter().zip(["sequential", "wfbp", "poseidon", "factors", "one-bit", "adam"]) {
        assert_eq!(row["system"], name);
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(number("seconds") >= compute && number("lowest") <= number("highest"), "{row}");
        assert!(number("speed_up") <= 2.0, "no more than the workers: {row}");
    }
    let planned = |system: usize| &results["setting"]["expected"][system];
    assert_eq!(planned(1)["by_factors"].as_array().map(Vec::len), Some(0));
    assert_eq!(planned(3)["by_factors"].as_array().map(Vec::len), Some(3));
    assert_eq!(planned(5)["by_factors"].as_array().map(Vec::len), Some(3));
    let sent = |system: usize| planned(system)["bytes_sent"].as_f64().unwrap();
    assert!(sent(2) < sent(1) && sent(4) < sent(1));
    // One byte takes 8 ns, and without overlap the time of all bytes is added to the computation.
    let bound = planned(0)["seconds"].as_f64().unwrap();
    assert!((bound - compute - 8e-9 * sent(0)).abs() < 1e-9 * sent(0), "{bound}");
    assert!((1..5).all(|system| planned(system)["seconds"].as_f64().unwrap() < bound));
    assert!(planned(5)["seconds"].is_null() && planned(5)["busiest_by_mean"].as_f64() > Some(1.2));
    for row in ["WFBP, hub only", "Poseidon", "Adam", "speed-up", "classifier.0"] {
        assert!(ended.stdout.contains(row), "no {row} in\n{}", ended.stdout);
    }
    for (flags, reason) in [
        (&["--model", "vgg19", "--scale", "8"][..], "it takes a square"),
        (&["--model", "transformer-1.1b"], "give their times with --profile"),
        (&["--model", "vgg19", "--profile", "none.json"], "none.json"),
    ] {
        let refused = paramhub(["bench", "poseidon"].into_iter().chain(flags.iter().copied())).finish();
        refused.expect_code(2).expect_error(&[reason]);
    }
}

#[test]
fn wrong_usage_is_answered_with_what_to_do() {
    let bench = |more: &[&str]| {
        let program = paramhub(["bench", "exchange"].into_iter().chain(more.iter().copied()));
        program.file("empty.json", "[]").file("no.json", "{").finish().expect_code(2)
    };
    bench(&["--model", "resnet51"]).expect_error(&[
        "resnet51",
        "alexnet, ",
        "resnet50, ",
        "transformer-1.1b",
    ]);
    bench(&["--keys", "gone.json"]).expect_error(&["gone.json", "No such file"]);
    bench(&["--keys", "empty.json"]).expect_error(&["empty"]);
    bench(&["--keys", "no.json"]).expect_error(&["no.json", "bare list"]);
    bench(&["--model", "resnet18", "--chunk", "10"]).expect_error(&["chunk size 10"]);
    bench(&["--model", "resnet18", "--json", "gone/out.json"]).expect_error(&["there is no folder gone"]);
    bench(&["--model", "transformer-1.1b", "--workers", "1024"]).expect_error(&["memory", "--scale"]);
    for (more, part) in [
        (&[][..], "--model"),
        (&["--model", "resnet18", "--keys", "x"], "cannot be used with"),
        (&["--model", "resnet18", "--transport", "pigeon"], "tcp"),
        (&["--model", "resnet18", "--optimizer", "magic"], "nesterov"),
        (&["--model", "resnet18", "--dtype", "f64"], "f64"),
        (&["--model", "resnet18", "--dtype", "one-bit"], "elements lie in memory"),
        (&["--model", "resnet18", "--codec", "three-bit"], "one-bit, two-bit, int8"),
        (&["--model", "resnet18", "--workers", "0"], "--workers"),
        (&["--model", "resnet18", "--streams", "65"], "1..=64"),
        (&["--model", "resnet18", "--scale", "0"], "--scale"),
    ] {
        let refused = bench(more);
        assert!(refused.stderr.contains(part), "{more:?}: {}", refused.stderr);
    }
}

#[test]
fn a_killed_worker_or_hub_or_an_interrupt_ends_all_processes() {
    for (victim, code, reason) in [
        (Some("1"), 1, "worker 1 was killed by SIGKILL"),
        (Some("2"), 1, "the hub was killed by SIGKILL"),
        (None, 130, "interrupted by SIGINT"),
    ] {
        let arguments = ["bench", "exchange", "--keys", "keys.json", "--workers", "2", "--iters", "1000000"];
        let bench = paramhub(arguments.into_iter().chain(["--raw"])).file("keys.json", KEYS).start();
        let mut found = Vec::new();
        // A worker has a second thread once its job runs.
        let threads = |pid: i32| std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        wait_until("hub and workers exchange", || {
            found = processes_of(&bench);
            found.len() == 3 && found.iter().all(|&(pid, _)| threads(pid) > 1)
        });
        match victim {
            Some(victim) => {
                let (pid, _) = found.iter().find(|(_, number)| number == victim).expect("it was started");
                kill_process(Pid::from_raw(*pid).expect("a process"), Signal::KILL).expect("it is there");
            }
            None => bench.signal(Signal::INT),
        }
        let ended = bench.finish().expect_code(code);
        assert!(ended.stderr.contains(reason), "{}", ended.stderr);
        assert!(found.iter().all(|&(pid, _)| !is_alive(pid)), "a process was left behind");
    }
}

#[test]
fn kernels_are_measured_beside_a_triad() {
    let ended = paramhub(["bench", "kernels", "--size", "64K", "--json", "out.json"]).finish().expect_code(0);
    let speeds: Vec<Value> = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    for operation in ["sum: add f32", "convert: encode bf16", "optimize: adamw"] {
        let of_one: Vec<_> = speeds.iter().filter(|speed| speed["operation"] == operation).collect();
        assert!(of_one.iter().any(|speed| speed["isa"] == "baseline"), "{of_one:?}");
        assert!(of_one.iter().all(|speed| speed["ratio"].as_f64() > Some(0.0)), "{of_one:?}");
        assert!(ended.stdout.contains(operation), "{}", ended.stdout);
    }
    paramhub(["bench", "kernels", "--size", "1K"])
        .finish()
        .expect_code(2)
        .expect_error(&["--size 1K", "32K"]);
}

const VARIANTS: [(&str, bool); 8] = [
    ("normal", true),
    ("non-temporal", true),
    ("wide", true),
    ("worker-by-interface", true),
    ("push-then-pull", true),
    ("no-aggregator", false),
    ("no-optimizer", false),
    ("communication", false),
];

#[test]
fn operations_of_the_engine_are_timed_in_every_graph_with_every_number_of_threads() {
    let ended = paramhub(["bench", "engine", "--operations", "1000", "--rounds", "3", "--json", "out.json"]);
    let ended = ended.finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    assert_eq!((results["operations"].as_u64(), results["rounds"].as_u64()), (Some(1000), Some(3)));
    let costs = results["costs"].as_array().expect("a list");
    // Six graphs with one thread and with two, and a channel.
    assert_eq!(costs.len(), 13);
    for cost in costs {
        let number = |name: &str| cost[name].as_f64().unwrap_or_else(|| panic!("no {name} in {cost}"));
        assert!(0.0 < number("p10") && number("p10") <= number("nanoseconds"), "{cost}");
        assert!(number("nanoseconds") <= number("p90"), "{cost}");
        assert!((number("operations_per_second") * number("nanoseconds") / 1e9 - 1.0).abs() < 1e-9);
        assert!(ended.stdout.contains(cost["graph"].as_str().expect("a name")), "{}", ended.stdout);
    }
    for (arguments, says) in [
        (["--threads", "1,0"], "--threads 0: 0 threads for compute operations: expected 1 to 256"),
        (["--operations", "10"], "expected --operations from 1000 and --rounds from 1 on"),
    ] {
        let refused = paramhub(["bench", "engine"].into_iter().chain(arguments)).finish().expect_code(2);
        assert!(refused.stderr.contains(says), "{}", refused.stderr);
    }
}

#[test]
fn every_variant_of_an_ablation_is_exact_or_says_that_it_was_not_checked() {
    let arguments =
        ["bench", "ablate", "--keys", "keys.json", "--workers", "3", "--cores", "2", "--iters", "2"];
    let more =
        ["--rounds", "2", "--raw", "--optimizer", "nesterov", "--json", "out.json", "--svg", "out.svg"];
    let ablation = paramhub(arguments.into_iter().chain(more)).file("keys.json", KEYS);
    let ended = ablation.finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let found = results["variants"].as_array().expect("variants");
    assert!(results["raw_seconds_median"].as_f64() > Some(0.0));
    let of = |variant: &str| {
        let position = found.iter().position(|found| found["variant"] == variant);
        &found[position.unwrap_or_else(|| panic!("no {variant} in {results}"))]
    };
    let normal: Vec<f64> = serde_json::from_value(of("normal")["seconds"].clone()).expect("each round's");
    for (variant, is_exact) in VARIANTS {
        // Only x86_64 has such stores.
        if variant == "non-temporal" && !cfg!(target_arch = "x86_64") {
            continue;
        }
        let seconds: Vec<f64> = serde_json::from_value(of(variant)["seconds"].clone()).expect("each round's");
        assert!(seconds.len() == 2 && seconds.iter().all(|seconds| *seconds > 0.0), "{variant}: {seconds:?}");
        // The median of two is their mean.
        let factor = (seconds[0] / normal[0] + seconds[1] / normal[1]) / 2.0;
        assert!((of(variant)["factor"].as_f64().unwrap() / factor - 1.0).abs() < 1e-9, "{variant}");
        assert!(of(variant)["cpu_seconds_hub"].as_f64() > Some(0.0), "{variant}");
        assert_eq!(of(variant)["max_abs_error"].as_f64(), is_exact.then_some(0.0), "{variant}");
        // The largest key is one chunk, in whole kilobytes.
        let chunk_bytes = if variant == "wide" { 157 << 10 } else { 32 << 10 };
        assert_eq!(of(variant)["chunk_bytes"].as_u64(), Some(chunk_bytes), "{variant}");
    }
    assert_eq!(ended.stdout.matches("not checked").count(), 3, "{}", ended.stdout);
    let drawn = plot(&ended.read("out.svg"));
    assert!(drawn.contains("worker by interface") && drawn.contains("numbers not checked"), "{drawn}");
}

#[test]
fn single_variants_can_be_asked_for_in_every_dtype() {
    for (variant, more) in [
        ("worker-by-interface", &["--dtype", "f16", "--optimizer", "adam", "--cores", "3"][..]),
        ("wide", &["--dtype", "bf16", "--optimizer", "adam", "--cores", "3"]),
        ("push-then-pull", &["--dtype", "bf16", "--optimizer", "mean"]),
        ("copies", &["--dtype", "bf16", "--optimizer", "adam", "--transport", "shm"]),
        ("copies-20", &["--optimizer", "nesterov"]),
    ] {
        let arguments = ["bench", "ablate", variant, "--keys", "keys.json", "--workers", "2", "--iters", "1"];
        let ablation = paramhub(arguments.into_iter().chain(["--rounds", "1"]).chain(more.iter().copied()));
        let ended = ablation.file("keys.json", KEYS).finish().expect_code(0);
        assert_eq!(ended.stdout.matches("exact").count(), 2, "{}", ended.stdout);
    }
    let refused = paramhub(["bench", "ablate", "tall", "--keys", "keys.json"]).finish().expect_code(2);
    assert!(refused.stderr.contains("push-then-pull"), "{}", refused.stderr);
    let refused = paramhub(["bench", "ablate", "--keys", "gone.json"]).finish().expect_code(2);
    refused.expect_error(&["gone.json"]);
    let refused = paramhub(["bench", "ablate", "wide", "--keys", "keys.json", "--transport", "shm"]);
    refused.file("keys.json", KEYS).finish().expect_code(2).expect_error(&["over TCP"]);
    let refused = paramhub(["bench", "ablate", "copies", "--keys", "keys.json"]);
    refused.file("keys.json", KEYS).finish().expect_code(2).expect_error(&["no parameters to copy"]);
    let refused = paramhub(["bench", "ablate", "normal", "--keys", "keys.json"]).finish().expect_code(2);
    assert!(refused.stderr.contains("invalid value 'normal'"), "{}", refused.stderr);
}

#[test]
fn a_breakdown_adds_up_to_the_whole_step_and_is_drawn() {
    let arguments = ["bench", "breakdown", "--net", "mlp,lenet", "--workers", "2", "--batch", "100"];
    let more = ["--epochs", "1", "--rounds", "2", "--json", "out.json", "--svg", "out.svg"];
    let ended = paramhub(arguments.into_iter().chain(more)).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    assert_eq!((results["workers"].as_u64(), results["data"].as_str()), (Some(2), Some("digits")));
    let nets = results["nets"].as_array().expect("nets");
    assert_eq!(nets.iter().map(|net| net["net"].as_str().unwrap()).collect::<Vec<_>>(), ["mlp", "lenet"]);
    for net in nets {
        let stages = net["stages"].as_array().expect("stages");
        let names: Vec<&str> = stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
        assert_eq!(names, ["compute", "copy", "aggregation", "optimisation", "whole"]);
        let number = |stage: &Value, name: &str| {
            stage[name].as_f64().unwrap_or_else(|| panic!("no {name} in {stage}"))
        };
        assert!(stages.iter().all(|stage| number(stage, "adds_seconds") >= 0.0), "{net}");
        assert!(stages.iter().all(|stage| number(stage, "cpu_seconds_worker") > 0.0), "{net}");
        let all: f64 = stages.iter().map(|stage| number(stage, "adds_seconds")).sum();
        assert!((all / number(&stages[4], "seconds_median") - 1.0).abs() < 1e-9, "{net}");
        assert!(net["steps"].as_u64() >= Some(2) && net["elements"].as_u64() > Some(1000), "{net}");
    }
    for part in ["aggregation", "synchronisation and other", "lenet"] {
        assert!(ended.stdout.contains(part), "{}", ended.stdout);
    }
    assert!(plot(&ended.read("out.svg")).contains("milliseconds a step"));
}

#[test]
fn a_breakdown_of_what_cannot_be_trained_is_refused() {
    let breakdown = |more: &[&str]| {
        paramhub(["bench", "breakdown"].into_iter().chain(more.iter().copied())).finish().expect_code(2)
    };
    breakdown(&["--net", "mlp,mlp"]).expect_error(&["--net mlp", "twice"]);
    breakdown(&["--workers", "1000", "--batch", "1000"]).expect_error(&["--batch"]);
    breakdown(&["--svg", "gone/out.svg"]).expect_error(&["--svg gone/out.svg"]);
    for (more, part) in [
        (&["--net", "resnet"][..], "cifar-quick"),
        (&["--optimizer", "mean"], "updates no parameters"),
        (&["--batch", "0"], "--batch"),
        (&["--cores", "0"], "--cores"),
        (&["--chunk", "big"], "no size"),
    ] {
        let refused = breakdown(more);
        assert!(refused.stderr.contains(part), "{more:?}: {}", refused.stderr);
    }
}

/// The text of a plot. Fails unless the plot is well-formed and all of its text is inside.
fn plot(svg: &[u8]) -> String {
    let svg = std::str::from_utf8(svg).expect("UTF-8");
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some((before, tail)) = rest.split_once('<') {
        assert!(!before.contains('>'), "{before}");
        let (tag, tail) = tail.split_once('>').expect("a tag ends");
        rest = tail;
        let name = tag.trim_start_matches('/').split_whitespace().next().expect("a tag has a name");
        match tag {
            _ if tag.starts_with('/') => assert_eq!(open.pop(), Some(name), "in {svg}"),
            _ if tag.ends_with('/') || tag.starts_with('?') => {}
            _ => open.push(name),
        }
        if name == "text" && !tag.starts_with('/') {
            let at = |name: &str| -> f64 {
                let (_, value) = tag.split_once(&format!(" {name}=\"")).expect("it has a place");
                value.split('"').next().expect("a value").parse().expect("a number")
            };
            assert!((0.0..=960.0).contains(&at("x")) && at("y") >= 0.0, "{tag}");
        }
    }
    assert!(open.is_empty() && svg.starts_with("<svg") && svg.contains("</svg>"), "{open:?} are left open");
    svg.to_owned()
}

#[test]
fn a_sweep_measures_every_point_in_every_round_and_draws_them() {
    for (over, points, values) in [
        ("chunk", "64K,4K", [4096, 65_536]),
        ("streams", "1,3", [1, 3]),
        ("cores", "1,2", [1, 2]),
        ("workers", "1,2", [1, 2]),
    ] {
        let arguments = ["bench", "sweep", over, "--points", points, "--keys", "keys.json", "--workers", "2"];
        let more = ["--rounds", "2", "--iters", "2", "--raw", "--json", "out.json", "--svg", "out.svg"];
        let sweep = paramhub(arguments.into_iter().chain(more)).file("keys.json", KEYS);
        let ended = sweep.finish().expect_code(0);
        let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
        assert_eq!((results["sweep"].as_str(), results["rounds"].as_u64()), (Some(over), Some(2)));
        let found = results["points"].as_array().expect("points");
        assert_eq!(found.iter().map(|point| point["value"].as_u64().unwrap()).collect::<Vec<_>>(), values);
        for point in found {
            let number = |name: &str| point[name].as_f64().unwrap_or_else(|| panic!("no {name} in {point}"));
            let rounds = point["seconds"].as_array().expect("each round's").iter();
            let rounds: Vec<f64> = rounds.map(|seconds| seconds.as_f64().unwrap()).collect();
            assert_eq!(rounds.len(), 2);
            assert!((number("seconds_median") - (rounds[0] + rounds[1]) / 2.0).abs() < 1e-12, "{point}");
            let gradients = number("workers") * 4.0 * ELEMENTS / number("seconds_median") / 1e9;
            assert!((number("gradients") / gradients - 1.0).abs() < 1e-9, "{point}");
            assert!(number("raw_ratio") > 0.0 && number("cpu_seconds_hub") > 0.0, "{point}");
            assert_eq!(number("max_abs_error"), 0.0);
        }
        let varied = if over == "chunk" { "chunk_bytes" } else { over };
        let of = |point: &Value| {
            let settings = point["settings"][varied].as_u64();
            settings.or(point[varied].as_u64()).unwrap_or_else(|| panic!("no {varied} in {point}"))
        };
        assert_eq!([of(&found[0]), of(&found[1])], values, "it is in force");
        assert!(ended.stdout.contains("2 rounds") && ended.stdout.contains("exact"), "{}", ended.stdout);
        let drawn = plot(&ended.read("out.svg"));
        assert!(
            drawn.contains("bare TCP streams") && drawn.contains("tiny (0.2 MB of f32) over TCP"),
            "{drawn}"
        );
    }
}

#[test]
fn a_sweep_over_what_cannot_be_is_refused() {
    let sweep = |arguments: &[&str]| {
        let begin = ["bench", "sweep"].into_iter();
        paramhub(begin.chain(arguments.iter().copied())).file("keys.json", KEYS).finish().expect_code(2)
    };
    let tiny = |arguments: &[&'static str]| sweep(&[arguments, &["--keys", "keys.json"]].concat());
    tiny(&["chunk", "--points", "4K,10"]).expect_error(&["--points 10", "1K to 16M"]);
    tiny(&["workers", "--points", "1,1025"]).expect_error(&["--points 1025", "1 to 1024"]);
    tiny(&["streams", "--points", "64,65"]).expect_error(&["--points 65"]);
    tiny(&["cores", "--points", "1,one"]).expect_error(&["--points one", "whole number"]);
    tiny(&["cores", "--points", "1"]).expect_error(&["two points"]);
    tiny(&["cores", "--svg", "gone/out.svg"])
        .expect_error(&["--svg gone/out.svg", "there is no folder gone"]);
    sweep(&["workers", "--model", "transformer-1.1b", "--points", "1,1024"]).expect_error(&["memory"]);
    for (arguments, part) in [
        (&["chunks", "--keys", "keys.json"][..], "streams"),
        (&["chunk"], "--model"),
        (&["chunk", "--keys", "keys.json", "--rounds", "0"], "--rounds"),
    ] {
        let refused = sweep(arguments);
        assert!(refused.stderr.contains(part), "{arguments:?}: {}", refused.stderr);
    }
}

/// The processes of a benchmark, each with its number: a rank, or the number of workers for the hub.
fn processes_of(bench: &Process) -> Vec<(i32, String)> {
    let processes = std::fs::read_dir("/proc").expect("/proc");
    let of_bench = |pid: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<&str> = command.trim_end_matches('\0').split('\0').collect();
        let is_ours = Pid::from_raw(parent) == Some(bench.pid()) && words.get(1) == Some(&"bench-peer");
        is_ours.then(|| (pid, words[3].to_owned()))
    };
    processes.filter_map(|entry| of_bench(entry.ok()?.file_name().to_str()?.parse().ok()?)).collect()
}

#[test]
fn jobs_at_once_are_exact_and_timed_beside_one_alone() {
    let more = ["--jobs", "3", "--workers", "2", "--iters", "4", "--warmup", "1", "--optimizer", "adam"];
    let arguments = ["bench", "tenants", "--keys", "keys.json", "--json", "out.json"];
    let ended = paramhub(arguments.into_iter().chain(more)).file("keys.json", KEYS).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number in {results}"));
    assert_eq!((results["jobs"].as_u64(), results["workers"].as_u64()), (Some(3), Some(2)));
    assert_eq!(number(&results["max_abs_error"]), 0.0);
    let (alone, together) =
        (number(&results["alone"]["seconds_median"]), number(&results["together"]["seconds_median"]));
    assert!(alone > 0.0 && (number(&results["fair_seconds"]) / alone - 3.0).abs() < 1e-9);
    assert!((number(&results["lost"]) - (1.0 - 3.0 * alone / together)).abs() < 1e-9);
    assert!(number(&results["core_seconds_alone"]) > 0.0 && number(&results["core_seconds_together"]) > 0.0);
    let jobs = results["job_seconds"].as_array().unwrap();
    assert_eq!(jobs.len(), 3);
    assert!(jobs.iter().all(|seconds| number(seconds) > 0.0));
    assert!(number(&results["last_by_first"]) >= 1.0);
    for part in ["3 jobs, alone and at once", "one alone", "3 at once", "fair shares", "all exact"] {
        assert!(ended.stdout.contains(part), "no {part} in\n{}", ended.stdout);
    }
    let redraw = |results: &[u8]| {
        let program = paramhub(["bench", "plot", "results.json", "--svg", "out.svg"]);
        program.file("results.json", results).finish()
    };
    let drawn = plot(&redraw(&ended.read("out.json")).expect_code(0).read("out.svg"));
    for text in ["3 jobs at once on one hub", "job 2", "a fair share: 3 times what one job alone takes"] {
        assert!(drawn.contains(text), "no `{text}` in {drawn}");
    }
    redraw(b"{}").expect_code(2).expect_error(&["results.json has no results of"]);
    let raw = paramhub(["bench", "tenants", "--model", "alexnet", "--raw"]).finish().expect_code(2);
    assert!(raw.stderr.contains("bench exchange"), "{}", raw.stderr);
}
