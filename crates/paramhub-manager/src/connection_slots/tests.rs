use super::*;

fn address(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

fn is_evicted(slot: &ConnectionSlot) -> bool {
    !slot.is_proven() && !slot.slots.lock().unauthenticated.contains_key(&slot.number)
}

/// Begins to serve the present connections, and lets them pass the least age for eviction.
fn age(slots: &ConnectionSlots) {
    for connection in slots.lock().unauthenticated.values_mut() {
        connection.served_since = Instant::now().checked_sub(MIN_AGE);
    }
}

#[tokio::test]
async fn the_address_with_most_unauthenticated_connections_makes_room_with_its_oldest() {
    let slots = ConnectionSlots::new(8, 8);
    let lone = slots.accept(address(1));
    let crowd: Vec<ConnectionSlot> = (0..8).map(|_| slots.accept(address(2))).collect();
    assert!(!slots.evict_excess(), "all have only just come");
    age(&slots);
    assert!(slots.evict_excess());
    assert!(is_evicted(&crowd[0]) && !is_evicted(&lone));
    crowd[0].evicted().await;
    assert_eq!(crowd.iter().filter(|slot| is_evicted(slot)).count(), 1);
    assert_eq!((slots.counts().unauthenticated, slots.counts().evictions), (8, 1));
    // A new connection from the crowd's own address stays, and the crowd's next oldest is evicted.
    let newcomer = slots.accept(address(2));
    assert!(slots.evict_excess());
    assert!(is_evicted(&crowd[1]) && !is_evicted(&newcomer));
    drop((crowd, newcomer, lone));
    assert!(slots.are_empty() && slots.lock().by_peer.is_empty());
}

#[test]
fn an_old_connection_makes_no_room_for_the_young_ones_of_a_busier_address() {
    let slots = ConnectionSlots::new(8, 8);
    let lone = slots.accept(address(1));
    age(&slots);
    let crowd: Vec<ConnectionSlot> = (0..8).map(|_| slots.accept(address(2))).collect();
    assert!(!slots.evict_excess(), "the crowd has only just come");
    age(&slots);
    assert!(slots.evict_excess());
    assert!(is_evicted(&crowd[0]) && !is_evicted(&lone));
}

#[test]
fn a_connection_that_the_manager_has_not_begun_to_serve_is_not_evicted() {
    let slots = ConnectionSlots::new(1, 8);
    let [first, second] = [(); 2].map(|()| slots.accept(address(1)));
    std::thread::sleep(2 * MIN_AGE);
    assert!(!slots.evict_excess(), "both wait for the manager");
    second.begin_service();
    assert!(!slots.evict_excess(), "the second has only just been looked at");
    std::thread::sleep(2 * MIN_AGE);
    assert!(slots.evict_excess());
    assert!(is_evicted(&second) && !is_evicted(&first));
    assert!(slots.evict_one(), "a missing descriptor ends any connection");
    assert!(is_evicted(&first));
}

#[test]
fn addresses_of_one_network_of_ipv6_count_as_one() {
    let here: IpAddr = "2001:db8::1".parse().unwrap();
    let there: IpAddr = "2001:db8::ffff:1".parse().unwrap();
    let elsewhere: IpAddr = "2001:db8:0:1::1".parse().unwrap();
    assert_eq!(counted_as(here), counted_as(there));
    assert_ne!(counted_as(here), counted_as(elsewhere));
    assert_eq!(counted_as("::ffff:10.0.0.7".parse().unwrap()), address(7));
}

#[test]
fn a_connection_keeps_its_slot_until_its_answer_is_on_its_way() {
    let slots = ConnectionSlots::new(1, 8);
    let answered = slots.accept(address(1));
    answered.complete_request();
    age(&slots);
    let _newer = slots.accept(address(1));
    assert!(!slots.evict_excess());
    answered.begin_answer(10);
    assert!(slots.evict_excess());
    assert!(is_evicted(&answered));
}

#[test]
fn unauthenticated_connections_that_send_much_make_room_for_those_that_send_little() {
    let slots = ConnectionSlots::new(100, 8);
    let [small, large, next] = [(); 3].map(|()| slots.accept(address(1)));
    small.count_bytes(1000).unwrap();
    large.count_bytes(UNAUTHENTICATED_BYTES_MAX - 1000).unwrap();
    assert_eq!(slots.lock().bytes, UNAUTHENTICATED_BYTES_MAX);
    next.count_bytes(1).unwrap();
    assert!(is_evicted(&large) && !is_evicted(&small) && !is_evicted(&next));
    assert_eq!(slots.lock().bytes, 1001);
    assert!(large.count_bytes(1).is_err());
    // Bytes of a proven caller do not count as those of unauthenticated ones.
    next.prove_hub(0).unwrap();
    next.count_bytes(UNAUTHENTICATED_BYTES_MAX).unwrap();
    assert_eq!(slots.lock().bytes, 1000);
}

#[test]
fn each_kind_has_places_that_no_other_can_take() {
    let slots = ConnectionSlots::new(8, 16);
    let prove = |kind: CallerKind| {
        let slot = slots.accept(address(1));
        let proved = match kind {
            CallerKind::Operator => slot.prove_operator(),
            CallerKind::Team(team) => slot.prove_team(&team),
            CallerKind::Hub(hub) => slot.prove_hub(hub),
            CallerKind::Rank(job) => slot.prove_rank(job, 10, true),
        };
        proved.map(|()| slot)
    };
    let (one, two) = (Namespace([1; 16]), Namespace([2; 16]));
    let ranks: Vec<ConnectionSlot> = (0..10).map(|_| prove(CallerKind::Rank(one)).unwrap()).collect();
    // The ranks of the other job could never be complete beside these.
    assert!(prove(CallerKind::Rank(two)).is_err());
    let operators: Vec<ConnectionSlot> =
        (0..OPERATOR_SLOTS).map(|_| prove(CallerKind::Operator).unwrap()).collect();
    assert!(prove(CallerKind::Operator).is_err());
    let mut teams: Vec<ConnectionSlot> = Vec::new();
    for number in 0..ALL_TEAMS_SLOTS / TEAM_SLOTS {
        let team = || CallerKind::Team(format!("team-{number}").into());
        teams.extend((0..TEAM_SLOTS).map(|_| prove(team()).unwrap()));
        assert!(prove(team()).is_err(), "one team has no more");
    }
    assert!(prove(CallerKind::Team("another".into())).is_err(), "nor have all together");
    let hubs: Vec<ConnectionSlot> = (0..=HUB_SLOTS).map(|_| prove(CallerKind::Hub(3)).unwrap()).collect();
    let counts = slots.counts();
    assert_eq!(
        counts,
        ConnectionCounts {
            unauthenticated: 0,
            hubs: HUB_SLOTS,
            ranks: 10,
            operators: OPERATOR_SLOTS,
            teams: ALL_TEAMS_SLOTS,
            evictions: 0
        }
    );
    drop((ranks, operators, teams, hubs));
    assert!(slots.are_empty());
    prove(CallerKind::Rank(two)).unwrap();
}

#[test]
fn a_job_has_two_places_for_each_rank() {
    let slots = ConnectionSlots::new(8, 16);
    let job = Namespace([1; 16]);
    let calls: Vec<ConnectionSlot> = (0..100)
        .map(|_| {
            let slot = slots.accept(address(1));
            slot.prove_rank(job, 4, true).unwrap();
            slot
        })
        .collect();
    assert_eq!(slots.counts().ranks, 2 * 4 + JOB_SPARE);
    drop(calls);
    assert!(slots.are_empty());
}
