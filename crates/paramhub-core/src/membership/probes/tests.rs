use std::time::Duration;

use crate::membership::time::at;
use crate::placement::InterfaceShape;

use super::*;

fn hub(number: u32, rack: &str, mbit: u32) -> OfferedHub {
    let address = format!("10.0.0.{number}:7771");
    let interface = InterfaceShape { address, cores: vec![0], weight: mbit };
    let shape = HubShape { interfaces: vec![interface], local: None, between_hubs: None };
    (number, (shape, Place { rack: rack.into(), host: String::new() }))
}

fn racks(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(ToString::to_string).collect()
}

fn later(now: Now, seconds: f64) -> Now {
    Now { monotonic: now.monotonic + Duration::from_secs_f64(seconds), ..now }
}

fn order(commands: &HubCommands, hub: u32) -> &ProbeOrder {
    match commands.iter().find(|(number, _)| *number == hub) {
        Some((_, HubCommand::Probe(order))) => order,
        other => panic!("hub {hub} got {other:?}"),
    }
}

fn answer(probes: &mut Probes, commands: &HubCommands, hub: u32, outcome: ProbeOutcome) {
    let probe = order(commands, hub).probe;
    probes.record_answer(hub, ProbeReport { probe, outcome, is_rated: true });
}

fn mbit(mbit: f64) -> ProbeOutcome {
    ProbeOutcome::BitsPerSecond(mbit * 1e6)
}

/// Two racks whose hubs, of 1 Gbit/s, measure what the arguments give, in Mbit/s.
fn two_racks(into_a: ProbeOutcome, into_b: ProbeOutcome, now: Now) -> Probes {
    let mut probes = Probes::new(Nonce([1; 32]));
    let probers = probers(&[hub(0, "a", 1000), hub(1, "b", 1000)], &racks(&["a", "b"]));
    let commands = probes.begin(probes.rounds(&probers, false, now), now);
    answer(&mut probes, &commands, 0, into_a);
    answer(&mut probes, &commands, 1, into_b);
    assert!(probes.step(now).1 && !probes.are_under_way());
    probes
}

#[test]
fn one_hub_of_each_rack_dials_the_other() {
    let now = at(0.0);
    let hubs = [hub(3, "a", 1000), hub(4, "b", 10), hub(5, "b", 40), hub(6, "c", 10)];
    let probers = probers(&hubs, &racks(&["a", "b"]));
    assert_eq!(probers.iter().map(|prober| prober.hub).collect::<Vec<_>>(), [3, 5]);
    let mut probes = Probes::new(Nonce([1; 32]));
    let commands = probes.begin(probes.rounds(&probers, false, now), now);
    assert_eq!(commands.len(), 2);
    let (dials, waits) = (order(&commands, 3), order(&commands, 5));
    assert_eq!((dials.probe, dials.nonce, dials.streams), (waits.probe, waits.nonce, 4));
    assert_eq!((dials.dial.as_slice(), waits.dial.len()), (&["10.0.0.5:7771".to_string()][..], 0));
}

#[test]
fn the_thinnest_link_is_the_core() {
    let now = at(0.0);
    let probes = two_racks(mbit(119.0), mbit(95.0), now);
    let CoreBandwidth::Known { rate, source, .. } = probes.core(&racks(&["a", "b"]), 1000, later(now, 12.0))
    else {
        panic!("it was probed");
    };
    assert_eq!(rate.to_string(), "95 Mbit/s");
    assert_eq!(source, "95 Mbit/s, probed 12 s ago from rack a to rack b");
    let status = &probes.statuses(now)[1];
    assert_eq!((&*status.from, &*status.to, status.hubs, status.is_at_least), ("b", "a", [1, 0], false));
}

#[test]
fn a_rate_that_the_hubs_interfaces_limit_is_no_thin_core() {
    let now = at(0.0);
    let probes = two_racks(mbit(950.0), mbit(940.0), now);
    // There are four hubs in the weakest rack.
    let CoreBandwidth::Known { rate, source, .. } = probes.core(&racks(&["a", "b"]), 4000, now) else {
        panic!("it was probed");
    };
    assert_eq!(rate.to_string(), "4 Gbit/s");
    assert!(source.contains("at least 4 Gbit/s") && source.contains("carried 940 Mbit/s"), "{source}");
}

#[test]
fn results_are_used_for_an_hour_and_failures_for_a_minute() {
    let now = at(0.0);
    let both = probers(&[hub(0, "a", 1000), hub(1, "b", 1000)], &racks(&["a", "b"]));
    let probes = two_racks(mbit(100.0), mbit(100.0), now);
    assert!(probes.rounds(&both, false, later(now, 3599.0)).is_empty());
    assert_eq!(probes.rounds(&both, true, now).len(), 1, "unless a job asks");
    assert_eq!(probes.rounds(&both, false, later(now, 3601.0)).len(), 1);
    let probes = two_racks(mbit(100.0), ProbeOutcome::Failed("no way".into()), now);
    assert!(probes.rounds(&both, false, later(now, 59.0)).is_empty());
    assert_eq!(probes.rounds(&both, false, later(now, 61.0)).len(), 1);
}

#[test]
fn a_silent_hub_is_named_at_the_deadline_and_asked_no_more() {
    let now = at(0.0);
    let mut probes = Probes::new(Nonce([1; 32]));
    let names = ["a", "b", "c", "d", "e"];
    let hubs: Vec<OfferedHub> = (0..).zip(names).map(|(number, rack)| hub(number, rack, 1000)).collect();
    let all = probers(&hubs, &racks(&names));
    let mut commands = probes.begin(probes.rounds(&all, false, now), now);
    let (mut at, mut waited, mut asked) = (now, 0, 0);
    while probes.are_under_way() {
        let probe_of_2 = commands.iter().any(|(hub, _)| *hub == 2).then(|| order(&commands, 2).probe);
        asked += u32::from(probe_of_2.is_some());
        for (hub, _) in commands.iter().filter(|(hub, _)| *hub != 2) {
            let alone = Some(order(&commands, *hub).probe) == probe_of_2;
            let outcome = if alone { ProbeOutcome::Failed("none came".into()) } else { mbit(100.0) };
            answer(&mut probes, &commands, *hub, outcome);
        }
        if probe_of_2.is_some() {
            assert!(!probes.step(later(at, ROUND_S - 0.1)).1 && probes.are_under_way(), "it waits for hub 2");
            at = later(at, ROUND_S);
            waited += 1;
        }
        commands = probes.step(at).0;
    }
    assert_eq!((waited, asked), (1, 1));
    let CoreBandwidth::Unknown(why) = probes.core(&racks(&names), 1000, at) else { panic!("c is silent") };
    assert!(why.contains("rack c") && why.contains("hub 2 (10.0.0.2:7771)"), "{why}");
    assert!(matches!(probes.core(&racks(&["a", "b", "d", "e"]), 1000, at), CoreBandwidth::Known { .. }));
    // The hubs that it was to probe with in later rounds are not asked again at once either.
    assert!(probes.rounds(&all, false, at).is_empty());
}

#[test]
fn answers_of_unknown_and_lost_hubs_are_ignored() {
    let now = at(0.0);
    let mut probes = Probes::new(Nonce([1; 32]));
    let both = probers(&[hub(0, "a", 1000), hub(1, "b", 1000)], &racks(&["a", "b"]));
    let commands = probes.begin(probes.rounds(&both, false, now), now);
    let probe = order(&commands, 0).probe;
    // A third hub, an unknown probe, and a number that is no rate.
    probes.record_answer(7, ProbeReport { probe, outcome: mbit(1.0), is_rated: true });
    let unknown = Namespace([0; 16]);
    probes.record_answer(0, ProbeReport { probe: unknown, outcome: mbit(1.0), is_rated: true });
    assert!(!probes.step(now).1);
    answer(&mut probes, &commands, 0, ProbeOutcome::BitsPerSecond(f64::NAN));
    probes.forget(1);
    assert!(probes.step(now).1, "no probe waits for a lost hub");
    let problems: Vec<String> = probes.statuses(now).into_iter().map(|link| link.problem).collect();
    assert!(problems[1].contains("reports NaN") && problems[0].contains("was lost"), "{problems:?}");
    let mut known = two_racks(mbit(1.0), mbit(1.0), now);
    known.forget(0);
    assert!(known.statuses(now).is_empty());
}

#[test]
fn many_racks_meet_in_a_bounded_number_of_rounds() {
    let now = at(0.0);
    let hubs: Vec<OfferedHub> = (0..40).map(|number| hub(number, &format!("r{number:02}"), 10)).collect();
    let names: BTreeSet<String> = hubs.iter().map(|(_, (_, place))| place.rack.clone()).collect();
    let rounds = Probes::new(Nonce([1; 32])).rounds(&probers(&hubs, &names), false, now);
    assert_eq!(rounds.len(), ROUNDS_MAX);
    assert!(rounds.iter().all(|round| round.len() == 20), "every hub is in every round");
}
