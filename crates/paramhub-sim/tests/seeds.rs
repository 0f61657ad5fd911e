//! Thousands of seeds, and planted faults that must be found.

use paramhub_sim::{Plant, Scenario, explore, run, shrunk};

/// Faults of the program, and what is said of each when it is found.
const PLANTS: [(Plant, &str); 13] = [
    (Plant::RepeatCounted, "has the sum of"),
    (Plant::StaleStream, "although nobody died"),
    (Plant::RankTwice, "although nobody died"),
    (Plant::NoResume, "broke the rules"),
    (Plant::CutsLose, "although nobody died"),
    (Plant::AnswersUnsaved, "ranks know that it was further"),
    (Plant::HoldersForgotten, "two processes are told that they have rank"),
    (Plant::CommandsOnce, "although nobody died"),
    (Plant::JobsNotAsked, "the run is stuck"),
    (Plant::JoinsAtOwnStep, "joins between two steps"),
    (Plant::RewindsToOwnStep, "joins between two steps"),
    (Plant::SumsKept, "has the sum of"),
    (Plant::AllWorkersAwaited, "the run is stuck"),
];

/// Faults that only jobs of several sites can have.
const PLANTS_BETWEEN_SITES: [(Plant, &str); 3] = [
    (Plant::SumCountedAgain, "has the sum of"),
    (Plant::SumsNotSentAgain, "the run is stuck"),
    (Plant::LeavesUnheard, "although nobody died"),
];

/// Faults that only jobs with standbys can have.
const PLANTS_OF_STANDBYS: [(Plant, &str); 3] = [
    (Plant::StandbyNotTold, "takes over chunk"),
    (Plant::TakesOverAlone, "has taken over at version"),
    (Plant::CopiedTooSoon, "without it, and workers have version"),
];

#[test]
fn no_seed_breaks_a_rule() {
    let explored = explore(0..5000).unwrap_or_else(|failing| panic!("{failing}"));
    println!("{explored:?}");
    assert!(explored.finished > 5000 / 3, "most jobs have failed: {explored:?}");
    assert!(explored.had_to_finish > 5000 / 6, "few jobs had to go through: {explored:?}");
    assert!(explored.broken_streams > 5000, "few streams broke: {explored:?}");
    assert!(explored.without_workers > 200, "few jobs went through with other workers: {explored:?}");
    assert!(explored.rewinds > 500, "few jobs went back: {explored:?}");
    assert!(explored.begun_anew > 20, "few jobs began anew: {explored:?}");
    assert!(explored.cut > 80, "few jobs kept all their workers although streams were cut: {explored:?}");
    assert!(explored.with_sites > 400, "few jobs of several sites have finished: {explored:?}");
    assert!(explored.sites_cut > 30, "few sites kept together although their streams were cut: {explored:?}");
    assert!(explored.with_standbys > 300, "few jobs with standbys have finished: {explored:?}");
    assert!(explored.without_hubs > 60, "few jobs went through without a hub that was killed: {explored:?}");
    assert!(explored.new_standbys > 300, "few hubs became standbys of running jobs: {explored:?}");
    assert!(explored.further_standbys > 15, "few hubs took further shares: {explored:?}");
    assert!(explored.took_over_later > 40, "few such hubs took over: {explored:?}");
    assert!(explored.left_drained > 40, "few jobs left drained hubs: {explored:?}");
    assert!(explored.without_several_hubs > 40, "few jobs lost several hubs in turn: {explored:?}");
    assert!(explored.without_manager > 200, "few jobs went through without their manager: {explored:?}");
}

#[test]
fn planted_faults_are_found_and_made_small() {
    for (plant, symptom) in PLANTS {
        find((0..3000).map(Scenario::new), plant, symptom);
    }
}

#[test]
fn planted_faults_between_sites_are_found_and_made_small() {
    for (plant, symptom) in PLANTS_BETWEEN_SITES {
        let scenarios = (0..15_000).map(Scenario::new).filter(|scenario| scenario.racks.is_some());
        find(scenarios, plant, symptom);
    }
}

#[test]
fn planted_faults_of_standbys_are_found_and_made_small() {
    for (plant, symptom) in PLANTS_OF_STANDBYS {
        let scenarios = (0..15_000).map(Scenario::new).filter(|scenario| scenario.replicas);
        find(scenarios, plant, symptom);
    }
}

/// Finds the first of the scenarios that fails because of a planted fault, and makes it small.
fn find(scenarios: impl Iterator<Item = Scenario>, plant: Plant, symptom: &str) {
    let fails = |scenario: &Scenario| run(scenario).is_err_and(|failure| failure.contains(symptom));
    let mut planted = scenarios.map(|scenario| Scenario { plant: Some(plant), ..scenario });
    let Some(failing) = planted.find(fails) else { panic!("{plant:?} was not found") };
    let (smallest, failure) = shrunk(&failing);
    println!("{plant:?}: seed {}: {failure}", smallest.seed);
    assert!(smallest.faults.len() <= 4, "{plant:?} is not made small: {:?}", smallest.faults);
}

#[test]
fn a_seed_has_one_outcome() {
    for seed in 0..100 {
        let scenario = Scenario::new(seed);
        assert_eq!(run(&scenario), run(&scenario), "seed {seed}");
    }
}
