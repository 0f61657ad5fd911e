use super::*;

fn address(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

fn has_to_go(guest: &Guest) -> bool {
    !guest.is_proven() && !guest.places.lock().strangers.contains_key(&guest.number)
}

/// Lets whoever is there stop being young.
fn age(places: &Places) {
    for stranger in places.lock().strangers.values_mut() {
        stranger.since = stranger.since.checked_sub(YOUNG).unwrap();
    }
}

#[tokio::test]
async fn the_address_with_most_strangers_makes_room_with_its_oldest() {
    let places = Places::new(8, 8);
    let lone = places.enter(address(1));
    let crowd: Vec<Guest> = (0..8).map(|_| places.enter(address(2))).collect();
    assert!(!places.make_room(), "all have only just come");
    age(&places);
    assert!(places.make_room());
    assert!(has_to_go(&crowd[0]) && !has_to_go(&lone));
    crowd[0].must_go().await;
    assert_eq!(crowd.iter().filter(|guest| has_to_go(guest)).count(), 1);
    assert_eq!((places.taken().strangers, places.taken().made_room), (8, 1));
    // A newcomer of the crowd's own address stays, and the crowd's next oldest goes.
    let newcomer = places.enter(address(2));
    assert!(places.make_room());
    assert!(has_to_go(&crowd[1]) && !has_to_go(&newcomer));
    drop((crowd, newcomer, lone));
    assert!(places.are_empty() && places.lock().by_peer.is_empty());
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
fn who_is_being_answered_does_not_make_room_until_the_answer_is_on_its_way() {
    let places = Places::new(1, 8);
    let answered = places.enter(address(1));
    answered.complete();
    age(&places);
    let _newer = places.enter(address(1));
    assert!(!places.make_room());
    answered.answer(10);
    assert!(places.make_room());
    assert!(has_to_go(&answered));
}

#[test]
fn strangers_who_send_much_make_room_for_those_who_send_little() {
    let places = Places::new(100, 8);
    let [small, large, next] = [(); 3].map(|()| places.enter(address(1)));
    small.hold(1000).unwrap();
    large.hold(STRANGERS_BYTES_MAX - 1000).unwrap();
    assert_eq!(places.lock().bytes, STRANGERS_BYTES_MAX);
    next.hold(1).unwrap();
    assert!(has_to_go(&large) && !has_to_go(&small) && !has_to_go(&next));
    assert_eq!(places.lock().bytes, 1001);
    assert!(large.hold(1).is_err());
    // What a proven caller sends is none of the strangers'.
    next.prove_hub(0).unwrap();
    next.hold(STRANGERS_BYTES_MAX).unwrap();
    assert_eq!(places.lock().bytes, 1000);
}

#[test]
fn each_kind_has_places_that_no_other_can_take() {
    let places = Places::new(8, 16);
    let prove = |kind: Kind| {
        let guest = places.enter(address(1));
        let proved = match kind {
            Kind::Operator => guest.prove_operator(),
            Kind::Hub(hub) => guest.prove_hub(hub),
            Kind::Rank(job) => guest.prove_rank(job, 10, true),
        };
        proved.map(|()| guest)
    };
    let (one, two) = (Namespace([1; 16]), Namespace([2; 16]));
    let ranks: Vec<Guest> = (0..10).map(|_| prove(Kind::Rank(one)).unwrap()).collect();
    // The other job's ranks could never be complete beside these.
    assert!(prove(Kind::Rank(two)).is_err());
    let operators: Vec<Guest> = (0..OPERATOR_PLACES).map(|_| prove(Kind::Operator).unwrap()).collect();
    assert!(prove(Kind::Operator).is_err());
    let hubs: Vec<Guest> = (0..=HUB_PLACES).map(|_| prove(Kind::Hub(3)).unwrap()).collect();
    let taken = places.taken();
    assert_eq!(
        taken,
        Taken { strangers: 0, hubs: HUB_PLACES, ranks: 10, operators: OPERATOR_PLACES, made_room: 0 }
    );
    drop((ranks, operators, hubs));
    assert!(places.are_empty());
    prove(Kind::Rank(two)).unwrap();
}

#[test]
fn a_job_has_two_places_for_each_rank() {
    let places = Places::new(8, 16);
    let job = Namespace([1; 16]);
    let calls: Vec<Guest> = (0..100)
        .map(|_| {
            let guest = places.enter(address(1));
            guest.prove_rank(job, 4, true).unwrap();
            guest
        })
        .collect();
    assert_eq!(places.taken().ranks, 2 * 4 + JOB_SPARE);
    drop(calls);
    assert!(places.are_empty());
}
