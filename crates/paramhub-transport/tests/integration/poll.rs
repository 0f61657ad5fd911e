//! Waiting and waking.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use paramhub_transport::{Event, Events, Interest, Poller, Waker};

/// Far longer than anything here takes: reaching it is a failure, not a measurement.
const LONG: Option<Duration> = Some(Duration::from_secs(30));
const NOT_AT_ALL: Option<Duration> = Some(Duration::ZERO);

fn ready(poller: &Poller, timeout: Option<Duration>) -> Vec<Event> {
    let mut events = Events::with_capacity(8);
    poller.wait(&mut events, timeout).unwrap();
    assert_eq!((events.len(), events.is_empty()), (events.iter().count(), events.iter().next().is_none()));
    let mut ready: Vec<_> = events.iter().collect();
    ready.sort_by_key(|event| event.token);
    ready
}

#[test]
fn interest_decides_what_is_reported_until_it_is_drained() {
    let poller = Poller::new().unwrap();
    let (mut near, mut far) = UnixStream::pair().unwrap();
    poller.add(&near, u64::MAX, Interest::READABLE).unwrap();
    assert_eq!(ready(&poller, NOT_AT_ALL), []);
    far.write_all(b"x").unwrap();
    let readable = Event { token: u64::MAX, readable: true, writable: false, hangup: false };
    assert_eq!(ready(&poller, LONG), [readable]);
    assert_eq!(ready(&poller, LONG), [readable], "level-triggered");
    poller.modify(&near, 5, Interest::BOTH).unwrap();
    assert_eq!(ready(&poller, LONG), [Event { token: 5, writable: true, ..readable }]);
    near.read_exact(&mut [0]).unwrap();
    assert_eq!(ready(&poller, LONG), [Event { token: 5, readable: false, writable: true, hangup: false }]);
    poller.modify(&near, 5, Interest::default()).unwrap();
    assert_eq!(ready(&poller, NOT_AT_ALL), []);
    drop(far);
    let hangup = Event { token: 5, readable: true, writable: true, hangup: true };
    assert_eq!(ready(&poller, LONG), [hangup], "whatever the interest");
    poller.remove(&near).unwrap();
    assert_eq!(ready(&poller, NOT_AT_ALL), []);
    assert!(poller.remove(&near).is_err());
}

#[test]
fn events_beyond_the_capacity_come_with_the_next_wait() {
    let poller = Poller::new().unwrap();
    let wakers = [Waker::new().unwrap(), Waker::new().unwrap()];
    for (token, waker) in (0..).zip(&wakers) {
        poller.add(waker, token, Interest::READABLE).unwrap();
        waker.wake();
    }
    let mut events = Events::with_capacity(1);
    let mut seen = [false; 2];
    while seen != [true; 2] {
        poller.wait(&mut events, LONG).unwrap();
        let event = events.iter().next().expect("an event");
        seen[event.token as usize] = true;
        wakers[event.token as usize].drain();
    }
}

#[test]
fn a_wait_ends_by_its_timeout() {
    let poller = Poller::new().unwrap();
    assert_eq!(ready(&poller, Some(Duration::from_micros(300))), []);
    assert_eq!(ready(&poller, NOT_AT_ALL), []);
}

#[test]
fn a_wake_is_remembered_until_it_is_drained() {
    let poller = Poller::new().unwrap();
    let waker = Waker::new().unwrap();
    poller.add(&waker, 1, Interest::READABLE).unwrap();
    waker.wake();
    waker.clone().wake();
    assert_eq!(ready(&poller, LONG).len(), 1);
    assert_eq!(ready(&poller, LONG).len(), 1);
    waker.drain();
    assert_eq!(ready(&poller, NOT_AT_ALL), []);
    waker.drain();
    waker.wake();
    assert_eq!(ready(&poller, LONG).len(), 1);
}

/// A sleeper that drains and then looks must see every item, in any interleaving: a lost wake hangs here.
#[test]
fn no_wake_is_lost_between_draining_and_sleeping() {
    const ITEMS: u64 = 200_000;
    let poller = Poller::new().unwrap();
    let waker = Waker::new().unwrap();
    poller.add(&waker, 0, Interest::READABLE).unwrap();
    let queued = Arc::new(AtomicU64::new(0));
    let taken = Arc::new(AtomicU64::new(0));
    let other = std::thread::spawn({
        let (waker, queued, taken) = (waker.clone(), queued.clone(), taken.clone());
        move || {
            for item in 1..=ITEMS {
                queued.store(item, Ordering::Relaxed);
                waker.wake();
                // The pace varies, so that wakes hit every point between draining and sleeping.
                for _ in 0..item % 97 {
                    std::hint::spin_loop();
                }
                // Sometimes wait until the item is taken, so that the sleeper falls asleep between wakes.
                while item % 1000 == 0 && taken.load(Ordering::Relaxed) < item {
                    std::thread::yield_now();
                }
            }
        }
    });
    let mut events = Events::with_capacity(1);
    while taken.load(Ordering::Relaxed) < ITEMS {
        poller.wait(&mut events, LONG).unwrap();
        assert!(!events.is_empty(), "a wake was lost at item {}", queued.load(Ordering::Relaxed));
        waker.drain();
        taken.store(queued.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    other.join().unwrap();
}

#[test]
fn a_spinning_wait_sees_what_comes_and_ends_in_time() {
    let poller = Poller::new().unwrap();
    let waker = Waker::new().unwrap();
    poller.add(&waker, 3, Interest::READABLE).unwrap();
    let mut events = Events::with_capacity(4);
    for spin in [Duration::ZERO, Duration::from_millis(5), Duration::from_secs(3600)] {
        poller.wait_spinning(&mut events, spin, Some(Duration::from_millis(20))).unwrap();
        assert!(events.is_empty());
        std::thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            poller.wait_spinning(&mut events, spin, Some(Duration::from_secs(60))).unwrap();
        });
        assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [3]);
        waker.drain();
    }
}
