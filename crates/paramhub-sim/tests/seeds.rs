//! Thousands of seeds, and planted faults that must be found.

use paramhub_sim::{Plant, Scenario, explore, run, shrunk};

#[test]
fn no_seed_breaks_a_rule() {
    let explored = explore(0..5000).unwrap_or_else(|failing| panic!("{failing}"));
    println!("{explored:?}");
    assert!(explored.finished > 5000 / 3, "most jobs have failed: {explored:?}");
    assert!(explored.broken_streams > 5000, "few streams broke: {explored:?}");
}

#[test]
fn planted_faults_are_found_and_made_small() {
    for plant in [Plant::RepeatCounted, Plant::StaleStream, Plant::RankTwice, Plant::NoResume] {
        let planted = (0..3000).map(|seed| Scenario { plant: Some(plant), ..Scenario::new(seed) });
        let failing: Vec<Scenario> = planted.filter(|scenario| run(scenario).is_err()).collect();
        let Some(first) = failing.first() else { panic!("{plant:?} was not found") };
        let (smallest, failure) = shrunk(first);
        println!("{plant:?}: {} of 3000 seeds; seed {}: {failure}", failing.len(), smallest.seed);
        assert!(smallest.faults.len() <= 2, "{plant:?} is not made small: {:?}", smallest.faults);
    }
}

#[test]
fn a_seed_has_one_outcome() {
    for seed in 0..100 {
        let scenario = Scenario::new(seed);
        assert_eq!(run(&scenario), run(&scenario), "seed {seed}");
    }
}
