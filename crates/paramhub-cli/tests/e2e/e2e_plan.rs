//! `paramhub plan`: the deployments of a model on a network.

use serde_json::Value;

use crate::common::{Program, paramhub};

fn plan<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Program {
    paramhub(["plan"].into_iter().chain(arguments))
}

fn json(program: Program) -> Value {
    serde_json::from_str(&program.finish().expect_code(0).stdout).unwrap()
}

/// The costs of one arrangement.
fn of<'a>(report: &'a Value, arrangement: &str) -> &'a Value {
    let rows = report["exchanges"].as_array().unwrap();
    rows.iter().find(|row| row["arrangement"] == arrangement).unwrap()
}

fn close(value: &Value, expected: f64) -> bool {
    (value.as_f64().unwrap() / expected - 1.0).abs() < 1e-3
}

const RACK: [&str; 8] =
    ["--model", "resnet18", "--workers", "8", "--rates", "worker=500mbit", "--interfaces", "8"];

#[test]
fn the_plan_of_a_rack_shows_the_gain_of_its_hub() {
    let report = json(plan(RACK.into_iter().chain(["--json"])));
    // 11,689,512 parameters of 4 bytes.
    assert_eq!(report["network"]["model_bytes"], 46_758_048);
    assert!(close(&of(&report, "NCC")["seconds"], 0.7481) && close(&of(&report, "CS")["seconds"], 1.3092));
    assert!(close(&of(&report, "CC")["seconds"], 5.2369));
    assert_eq!(of(&report, "NCC")["limit"], "worker");
    assert_eq!(of(&report, "NCS")["hub_machines"], 8);
    assert_eq!(report["recommendation"]["exchange"]["arrangement"], "NCC");
    assert!(report["reduction"].is_null());

    let shown = plan(RACK).finish().expect_code(0).stdout;
    for part in ["resnet18: 46.8 MB", "8 x 500 Mbit/s", "1309.2 ms", "recommended: NCC, one dedicated hub"] {
        assert!(shown.contains(part), "no `{part}` in\n{shown}");
    }
}

#[test]
fn the_plan_of_racks_shows_both_sides_of_the_condition() {
    let racks = RACK
        .into_iter()
        .map(|part| if part == "worker=500mbit" { "worker=500mbit,core=125mbit" } else { part });
    let racks: Vec<&str> = racks.chain(["--racks", "2"]).collect();
    let report = json(plan(racks.iter().copied().chain(["--json"])));
    let inequality = &report["reduction"]["inequality"];
    assert!(close(&inequality["flat_s"], 5.985) && close(&inequality["rack_s"], 0.7481), "{inequality}");
    assert_eq!(report["reduction"]["holds"], true);
    assert_eq!(report["reduction"]["chosen"], "sharded");
    let crossed = |arrangement| of(&report, arrangement)["core_bytes"].as_f64().unwrap();
    assert_eq!(crossed("NCC"), 4.0 * crossed("tree"));
    assert_eq!(crossed("NCS"), 4.0 * crossed("ring"));

    let shown = plan(racks).finish().expect_code(0).stdout;
    for part in ["5985.0 ms for the core, flat, >", "--reduction auto takes sharded", "recommended: sharded"]
    {
        assert!(shown.contains(part), "no `{part}` in\n{shown}");
    }
}

#[test]
fn prices_give_the_cost_of_a_step() {
    let prices = "worker=6913,worker-port=260,hub=8407,hub-port=162.5,switch-port=165,cable=31.25";
    let priced = ["--compute-ms", "54", "--prices", prices];
    let report = json(plan(RACK.into_iter().chain(priced).chain(["--json"])));
    let value = |arrangement| &of(&report, arrangement)["value"];
    // 260 + 165 + 31.25 + 4 * 165 + 2 * 31.25 for the worker, an eighth of 8407 + 8 * (162.5 + ..) for the hub.
    assert!(close(&value("CS")["price_per_worker"], 6913.0 + 1178.75), "{report}");
    assert!(close(&value("NCC")["price_per_worker"], 8091.75 + (8407.0 + 8.0 * 1081.25) / 8.0), "{report}");
    assert!(close(&value("NCC")["steps_per_second"], 1.0 / 0.748_13), "{report}");
    let shown = plan(RACK.into_iter().chain(priced)).finish().expect_code(0).stdout;
    assert!(shown.contains("steps/s") && shown.contains("8092"), "{shown}");
    let refused = plan(RACK.into_iter().chain(["--prices", prices])).finish().expect_code(2);
    assert!(refused.stderr.contains("--compute-ms"), "{}", refused.stderr);
}

#[test]
fn no_row_of_the_table_is_better_than_the_recommended_one() {
    // Links to the core are so fast that the condition for summing within each rack does not hold, though its
    // bound is lower.
    let wide = ["--bytes", "80M", "--workers", "8", "--racks", "2", "--interfaces", "4"];
    for core in ["3200mbit", "1600mbit", "800mbit", "100mbit"] {
        let rates = format!("worker=800mbit,core={core}");
        let report = json(plan(wide.into_iter().chain(["--rates", &rates, "--json"])));
        let rows = report["exchanges"].as_array().unwrap();
        let least = rows.iter().map(|row| row["seconds"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
        let recommended = report["recommendation"]["exchange"]["seconds"].as_f64().unwrap();
        assert!(recommended <= least * 1.01, "{core}: {recommended} s, and the table has {least} s");
    }
}

#[test]
fn prices_decide_what_is_recommended() {
    let recommended = |hub: &str| {
        let prices = format!("worker=7000,worker-port=260,hub={hub},switch-port=165,cable=31.25");
        let priced = ["--compute-ms", "400", "--prices", &prices, "--json"];
        let report = json(plan(RACK.into_iter().chain(priced)));
        let rows = report["exchanges"].as_array().unwrap();
        let worth = |row: &Value| row["value"]["steps_per_second_per_thousand"].as_f64().unwrap();
        let most = rows.iter().map(worth).fold(0.0, f64::max);
        let arrangement = report["recommendation"]["exchange"]["arrangement"].as_str().unwrap().to_owned();
        assert!(worth(of(&report, &arrangement)) * 1.01 >= most, "{report}");
        arrangement
    };
    assert_eq!(recommended("8000"), "NCC", "one hub makes the steps nearly twice as fast");
    assert_eq!(recommended("80000"), "CS", "but not at any price");
}

#[test]
fn bytes_a_file_and_halves_are_sizes_too() {
    let network = ["--workers", "4", "--rates", "worker=1gbit,hub=4gbit", "--json"];
    let bytes = |program| json(program)["network"]["model_bytes"].as_u64().unwrap();
    assert_eq!(bytes(plan(["--bytes", "100M"].into_iter().chain(network))), 100 << 20);
    let half = ["--model", "resnet18", "--dtype", "bf16"];
    assert_eq!(bytes(plan(half.into_iter().chain(network))), 46_758_048 / 2);
    let list = r#"[{"name": "w", "shape": [1000, 250]}]"#;
    let file = plan(["--keys", "mine.json"].into_iter().chain(network)).file("mine.json", list);
    assert_eq!(bytes(file), 1_000_000);
}

#[test]
fn computation_that_hides_an_exchange_saves_machines() {
    let report = json(plan(RACK.into_iter().chain(["--compute-ms", "1400", "--json"])));
    assert_eq!(report["recommendation"]["exchange"]["arrangement"], "CS");
    // 2 (N-1)/N M both ways in 1.4 s.
    let needed = &of(&report, "CS")["hub_side_bits_per_second"];
    assert!(close(needed, 2.0 * 2.0 * 7.0 / 8.0 * 46_758_048.0 * 8.0 / 1.4), "{needed}");
}

#[test]
fn schemes_are_planned_without_a_job() {
    let model = ["--model", "vgg19-22k", "--schemes", "--batch", "32", "--workers", "8"];
    let report = json(plan(model.into_iter().chain(["--json"])));
    let schemes: Vec<_> =
        report["layers"].as_array().unwrap().iter().map(|layer| layer["scheme"].as_str().unwrap()).collect();
    assert_eq!(schemes, ["factors"; 3]);
    assert_eq!(report["rest"]["scheme"], "hub");
    let page = include_str!("../../../../docs/poseidon.md");
    let shown = plan(model).finish().expect_code(0).stdout;
    assert!(page.contains(&shown), "docs/poseidon.md shows otherwise:\n{shown}");
    let dedicated = ["--deployment", "ncc", "--interfaces", "8"];
    let shown = plan(model.into_iter().chain(dedicated)).finish().expect_code(0).stdout;
    assert!(shown.contains("1 hub on machines of their own, each with 8.00 times a worker"), "{shown}");
    for (arguments, expected) in [
        (vec!["--model", "vgg19", "--workers", "8", "--schemes"], "--batch"),
        (vec!["--model", "vgg19", "--workers", "0", "--schemes", "--batch", "8"], "1 to 1024"),
        (vec!["--bytes", "1M", "--workers", "8", "--schemes", "--batch", "8"], "--bytes"),
        (vec!["--model", "vgg19", "--workers", "8"], "--rates"),
    ] {
        let refused = plan(arguments).finish().expect_code(2);
        assert!(refused.stderr.contains(expected), "{}", refused.stderr);
    }
}

#[test]
fn the_documentation_shows_what_is_printed() {
    let page = include_str!("../../../../docs/planning.md");
    let mut examples = 0;
    for block in page.split("```console\n").skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        let (command, printed) = block.split_once('\n').unwrap();
        let arguments = command.strip_prefix("$ paramhub ").unwrap().split_whitespace();
        assert_eq!(paramhub(arguments).finish().expect_code(0).stdout, printed, "{command}");
        examples += 1;
    }
    assert_eq!(examples, 3);
}

#[test]
fn wrong_flags_are_refused_with_the_reason() {
    let sound = ["--bytes", "1M", "--workers", "4", "--rates", "worker=1gbit"];
    plan(sound).finish().expect_code(0);
    let network = ["--workers", "4", "--rates", "worker=1gbit"];
    let with = |more: &[&'static str]| sound.into_iter().chain(more.iter().copied()).collect::<Vec<_>>();
    let sized = |more: &[&'static str]| more.iter().copied().chain(network).collect::<Vec<_>>();
    for (arguments, reason) in [
        (sized(&[]), "--bytes"),
        (sized(&["--model", "resnet51"]), "there is no such model"),
        (sized(&["--keys", "none.json"]), "none.json"),
        (sized(&["--model", "resnet18", "--bytes", "1M"]), "cannot be used with"),
        (with(&["--racks", "2"]), "core"),
        (with(&["--racks", "5"]), "5 racks: a plan is for 1 to 4"),
        (with(&["--racks", "0"]), "0 racks"),
        (with(&["--interfaces", "0"]), "--interfaces"),
        (with(&["--hubs", "0"]), "--hubs"),
        (with(&["--compute-ms", "0"]), "above zero"),
        (with(&["--compute-ms", "-5"]), "-5"),
        (vec!["--bytes", "0", "--workers", "4", "--rates", "worker=1gbit"], "nothing to exchange"),
        (vec!["--bytes", "1M", "--workers", "0", "--rates", "worker=1gbit"], "0 workers"),
        (vec!["--bytes", "1M", "--workers", "4", "--rates", "worker=1gbps"], "bits to some"),
        (vec!["--bytes", "1M", "--workers", "4", "--rates", "rack=1gbit"], "worker, hub or core"),
        (vec!["--bytes", "1M", "--workers", "4", "--rates", "hub=1gbit"], "the worker's is missing"),
    ] {
        let refused = plan(arguments.iter().copied()).finish().expect_code(2);
        assert!(refused.stderr.contains(reason), "{arguments:?}: {}", refused.stderr);
        assert!(refused.stdout.is_empty(), "{}", refused.stdout);
    }
}
