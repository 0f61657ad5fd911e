//! `paramhub bench designs`: real ranks, real collectives, every sum checked.

use serde_json::Value;

use crate::common::paramhub;

const ORDERS: [&str; 3] = ["front-first", "last-first", "back-then-front"];

#[test]
fn designs_of_collectives_are_played_beside_a_hub_and_their_timelines_written() {
    let arguments = ["bench", "designs", "--model", "inception-bn", "--scale", "1024", "--ranks", "3,2"];
    let more = ["--over", "native", "--steps", "2", "--rounds", "1", "--stretch", "100"];
    let written = ["--json", "out.json", "--svg", "out.svg", "--trace", "trace"];
    let ended = paramhub(arguments.into_iter().chain(more).chain(written)).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    assert_eq!(results["setting"]["keys"], 278);
    let all = results["ranks"].as_array().unwrap();
    assert_eq!(all.iter().map(|of| of["ranks"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 2]);
    assert_eq!(all[0]["stretch"], all[1]["stretch"], "computation does not depend on the number of ranks");
    for (of, ranks) in all.iter().zip([3.0, 2.0]) {
        let compute = of["compute_seconds"].as_f64().unwrap();
        let rows = of["rows"].as_array().unwrap();
        let design_and_order =
            |row: &Value| ["design", "order"].map(|name| row[name].as_str().unwrap().to_owned()).join(" ");
        let expected = ["funnel", "concom", "depcha", "hub"]
            .iter()
            .flat_map(|design| ORDERS.map(|order| format!("{design} {order}")));
        assert!(rows.iter().map(design_and_order).eq(expected), "{rows:?}");
        for row in rows {
            let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
            assert!(number("seconds") >= compute && number("lowest") <= number("highest"), "{row}");
            assert!(number("bound_seconds") >= compute && number("alone_seconds") > 0.0, "{row}");
            assert!((0.0..=1.0).contains(&number("hidden_share")), "{row}");
            let steps = 1_281_167.0 / (32.0 * ranks);
            assert!((number("epoch_seconds") / number("seconds") / steps - 1.0).abs() < 1e-9, "{row}");
        }
        // A caller that first waits for the whole backward pass hides nothing.
        let bound = |row: usize| rows[row]["bound_seconds"].as_f64().unwrap();
        let alone = rows[0]["alone_seconds"].as_f64().unwrap();
        assert!((bound(0) - compute - alone).abs() < 1e-6 * bound(0), "{}", rows[0]);
        // A chain hides a part of its own collectives, however long they took when they were measured.
        for row in &rows[6..9] {
            let sum = compute + row["alone_seconds"].as_f64().unwrap();
            assert!(row["bound_seconds"].as_f64().unwrap() < sum, "{row}");
        }
        assert_eq!(rows[0]["against_front_first"], 1.0);
    }
    let drawn = String::from_utf8(ended.read("out.svg")).unwrap();
    assert!(
        ["depcha", "over native, keys last first", "3 ranks"].iter().all(|text| drawn.contains(text)),
        "{drawn}"
    );
    let again = paramhub(["bench", "plot", "results.json", "--svg", "again.svg"]);
    let again = again.file("results.json", results.to_string()).finish().expect_code(0);
    assert_eq!(String::from_utf8(again.read("again.svg")).unwrap(), drawn);
    let trace: Value = serde_json::from_slice(&ended.read("trace/depcha-native-last-first-3.json")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |name: &str, rank: u64| {
        events
            .iter()
            .filter(|event| event["name"] == name && event["pid"] == rank && event["ph"] == "X")
            .count()
    };
    for rank in 0..3 {
        // A leading step and two others. An allreduce is an operation and a call inside it.
        assert_eq!((of("forward fc", rank), of("backward conv1.conv", rank)), (3, 3));
        assert_eq!((of("allreduce fc.weight", rank), of("update fc.bias", rank)), (6, 3));
    }
    let lanes = String::from_utf8(ended.read("trace/native-front-first-2.svg")).unwrap();
    assert!(["concom over native", "caller of push", "barrier"].iter().all(|text| lanes.contains(text)));
    for row in ["funnel over native", "front first", "of bound"] {
        assert!(ended.stdout.contains(row), "no {row} in\n{}", ended.stdout);
    }
}

#[test]
fn computation_is_stretched_to_a_share_of_the_collectives() {
    let arguments =
        ["bench", "designs", "--scale", "1024", "--ranks", "2", "--over", "native", "--share", "4"];
    let more = [
        "--designs",
        "depcha",
        "--order",
        "last-first",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--json",
        "out.json",
    ];
    let ended = paramhub(arguments.into_iter().chain(more)).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let of = &results["ranks"][0];
    let [stretch, compute] = ["stretch", "compute_seconds"].map(|name| of[name].as_f64().unwrap());
    let unstretched = 32.0 / 350.7 / 1024.0;
    assert!(stretch > 0.0 && (compute / (stretch * unstretched) - 1.0).abs() < 0.01, "{of}");
}

#[test]
fn a_network_learns_by_every_design_to_the_same_loss() {
    let arguments =
        ["bench", "designs", "--train", "lenet", "--ranks", "2", "--over", "native", "--batch", "32"];
    let more = ["--epochs", "1", "--rounds", "1", "--json", "out.json"];
    let ended = paramhub(arguments.into_iter().chain(more)).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let rows = results["ranks"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
        assert!(number("computing") > 0.0 && number("seconds") > 0.0, "{row}");
        assert!((0.0..=1.0).contains(&number("hidden_share")), "{row}");
        // A sum of two ranks has only one order.
        assert_eq!(row["loss"], rows[0]["loss"]);
    }
}

#[test]
fn designs_that_cannot_be_compared_are_refused() {
    let bench = |flags: &[&str]| {
        paramhub(["bench", "designs"].into_iter().chain(flags.iter().copied())).finish().expect_code(2)
    };
    bench(&["--over", "native", "--scale", "8"]).expect_error(&["it takes a square"]);
    bench(&["--over", "native", "--share", "0"]).expect_error(&["computation cannot be so long"]);
    bench(&["--over", "native", "--model", "transformer-1.1b"])
        .expect_error(&["give their times with --profile"]);
    for (flags, part) in [
        (&["--ranks", "1"][..], "--ranks"),
        (&["--train", "lenet", "--stretch", "2"], "cannot be used with"),
        (&["--share", "1", "--stretch", "2"], "cannot be used with"),
        (&["--epochs", "2"], "--train"),
    ] {
        let refused = bench(flags);
        assert!(refused.stderr.contains(part), "{flags:?}: {}", refused.stderr);
    }
    #[cfg(not(feature = "mpi"))]
    bench(&["--over", "mpi", "--designs", "depcha"]).expect_error(&["--features mpi", "libclang"]);
}

#[test]
#[cfg(feature = "mpi")]
fn collectives_go_over_mpi_where_it_is_installed() {
    let has_mpirun = std::process::Command::new("mpirun").arg("--version").output();
    if !has_mpirun.is_ok_and(|output| output.status.success()) {
        println!("skipped: there is no mpirun (Debian's openmpi-bin)");
        return;
    }
    let arguments = ["bench", "designs", "--scale", "1024", "--ranks", "2", "--over", "mpi"];
    let more = ["--designs", "funnel,concom,depcha", "--steps", "1", "--rounds", "1", "--json", "out.json"];
    let ended = paramhub(arguments.into_iter().chain(more)).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let rows = results["ranks"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 9);
    assert!(
        rows.iter().all(|row| row["over"] == "mpi" && row["alone_seconds"].as_f64() > Some(0.0)),
        "{rows:?}"
    );
}
