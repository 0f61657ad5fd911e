//! Who holds which rank of a job.

use paramhub_core::auth::Incarnation;
use paramhub_core::service::ConnectService;

use super::COME_BACK_S;
use crate::clock::Now;

/// Ranges of ranks that a message lists before it only counts the rest.
const RANGES_LISTED: usize = 8;

/// One seat a rank.
pub(super) struct Seats {
    seats: Vec<Seat>,
    taken: u32,
    handed_in: u32,
    next_ticket: u64,
}

enum Seat {
    Empty,
    /// Its process waited as long as it may and went away; told apart from a rank that never came.
    GaveUp,
    Taken(Holder),
    /// The job is over; only that the rank had come is still of interest.
    Was,
}

/// The process that holds a rank.
pub(super) struct Holder {
    pub(super) incarnation: Incarnation,
    host: String,
    process: u32,
    /// Of its newest call.
    ticket: u64,
    handed_in: bool,
    /// Its work is done, without a hub.
    finished: bool,
    lost_at: Option<Now>,
}

impl Seats {
    pub(super) fn new(workers: u32) -> Self {
        let seats = (0..workers).map(|_| Seat::Empty).collect();
        Seats { seats, taken: 0, handed_in: 0, next_ticket: 1 }
    }

    /// Marks the ranks of a job that an earlier manager recorded.
    pub(super) fn restore(&mut self, connected: &[u32]) {
        for &rank in connected {
            if let Some(seat) = self.seats.get_mut(rank as usize) {
                *seat = Seat::Was;
            }
        }
    }

    pub(super) fn holder(&self, rank: u32) -> Option<&Holder> {
        match self.seats.get(rank as usize)? {
            Seat::Taken(holder) => Some(holder),
            _ => None,
        }
    }

    /// The host of a seated rank's process, as it told it.
    pub(super) fn host(&self, rank: u32) -> &str {
        self.holder(rank).map_or("", |holder| &holder.host)
    }

    /// Seats a rank, or renews its ticket where the same process calls again.
    pub(super) fn take(&mut self, call: &ConnectService) -> u64 {
        if self.holder(call.rank).is_some() {
            return self.call_again(call.rank);
        }
        let ticket = self.draw_ticket();
        self.seats[call.rank as usize] = Seat::Taken(Holder {
            incarnation: call.incarnation,
            host: printable(&call.host),
            process: call.process,
            ticket,
            handed_in: false,
            finished: false,
            lost_at: None,
        });
        self.taken += 1;
        ticket
    }

    /// Gives a seated rank's newest call its ticket; older calls have no say over the seat any more.
    pub(super) fn call_again(&mut self, rank: u32) -> u64 {
        let ticket = self.draw_ticket();
        if let Seat::Taken(holder) = &mut self.seats[rank as usize] {
            holder.ticket = ticket;
            holder.lost_at = None;
        }
        ticket
    }

    pub(super) fn release(&mut self, rank: u32, ticket: u64) {
        if self.owns(rank, ticket) {
            self.empty(rank, Seat::Empty);
        }
    }

    pub(super) fn give_up(&mut self, rank: u32, ticket: u64) {
        if self.owns(rank, ticket) {
            self.empty(rank, Seat::GaveUp);
        }
    }

    pub(super) fn vacate(&mut self, rank: u32) {
        self.empty(rank, Seat::Empty);
    }

    pub(super) fn lose(&mut self, rank: u32, ticket: u64, now: Now) {
        if !self.owns(rank, ticket) {
            return;
        }
        if let Seat::Taken(holder) = &mut self.seats[rank as usize] {
            holder.lost_at = Some(now);
        }
    }

    /// A rank whose connection broke in InitService and which has not come back in time.
    pub(super) fn gone(&self, now: Now) -> Option<(usize, &Holder)> {
        self.seats.iter().enumerate().find_map(|(rank, seat)| match seat {
            Seat::Taken(holder) if now.seconds_since(holder.lost_at?) >= COME_BACK_S => Some((rank, holder)),
            _ => None,
        })
    }

    pub(super) fn hand_in(&mut self, rank: u32) {
        if let Seat::Taken(holder) = &mut self.seats[rank as usize] {
            self.handed_in += u32::from(!holder.handed_in);
            holder.handed_in = true;
        }
    }

    pub(super) fn has_any_handed_in(&self) -> bool {
        self.handed_in > 0
    }

    pub(super) fn finish(&mut self, rank: u32) {
        if let Seat::Taken(holder) = &mut self.seats[rank as usize] {
            holder.finished = true;
        }
    }

    pub(super) fn finished(&self) -> Vec<u32> {
        self.ranks(|seat| matches!(seat, Seat::Taken(holder) if holder.finished))
    }

    pub(super) fn have_all_finished(&self) -> bool {
        self.seats.iter().all(|seat| matches!(seat, Seat::Taken(holder) if holder.finished))
    }

    pub(super) fn are_full(&self) -> bool {
        self.taken as usize == self.seats.len()
    }

    pub(super) fn have_all_handed_in(&self) -> bool {
        self.handed_in as usize == self.seats.len()
    }

    pub(super) fn absent(&self) -> Vec<u32> {
        self.ranks(|seat| matches!(seat, Seat::Empty))
    }

    pub(super) fn gave_up(&self) -> Vec<u32> {
        self.ranks(|seat| matches!(seat, Seat::GaveUp))
    }

    pub(super) fn taken(&self) -> Vec<u32> {
        self.ranks(|seat| matches!(seat, Seat::Taken(_) | Seat::Was))
    }

    pub(super) fn not_handed_in(&self) -> Vec<u32> {
        self.ranks(|seat| !matches!(seat, Seat::Taken(holder) if holder.handed_in))
    }

    /// Drops host names and the like of a job that is over.
    pub(super) fn forget_processes(&mut self) {
        for seat in &mut self.seats {
            *seat = if matches!(seat, Seat::Taken(_) | Seat::Was) { Seat::Was } else { Seat::Empty };
        }
    }

    fn owns(&self, rank: u32, ticket: u64) -> bool {
        self.holder(rank).is_some_and(|holder| holder.ticket == ticket)
    }

    fn empty(&mut self, rank: u32, seat: Seat) {
        self.seats[rank as usize] = seat;
        self.taken -= 1;
    }

    fn draw_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    fn ranks(&self, wanted: impl Fn(&Seat) -> bool) -> Vec<u32> {
        (0u32..).zip(&self.seats).filter(|(_, seat)| wanted(seat)).map(|(rank, _)| rank).collect()
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&describe_process(&self.host, self.process))
    }
}

/// A process as people look for it.
pub(super) fn describe_process(host: &str, process: u32) -> String {
    match printable(host).as_str() {
        "" => format!("process {process}"),
        host => format!("process {process} on {host}"),
    }
}

/// A host name fit for a message, whatever a client sent.
fn printable(host: &str) -> String {
    host.chars().filter(|character| character.is_ascii_graphic()).take(255).collect()
}

/// `rank 1`, `ranks 1 and 3`, `ranks 0 to 5, 7 and 9`; many ranges are cut short and the rest counted.
pub(super) fn list_ranks(ranks: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => ranges.push((rank, rank)),
        }
    }
    let hidden: u32 = ranges.iter().skip(RANGES_LISTED).map(|(first, last)| last - first + 1).sum();
    ranges.truncate(RANGES_LISTED);
    let mut words: Vec<String> = Vec::new();
    for (first, last) in ranges {
        match last - first {
            0 => words.push(first.to_string()),
            1 => words.extend([first.to_string(), last.to_string()]),
            _ => words.push(format!("{first} to {last}")),
        }
    }
    if hidden > 0 {
        words.push(format!("{hidden} more"));
    }
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", super::join_words(&words))
}

/// [`list_ranks`] with a verb that agrees in number.
pub(super) fn list_ranks_with_verb(ranks: &[u32], one: &str, many: &str) -> String {
    format!("{} {}", list_ranks(ranks), if ranks.len() == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_ranks_are_compressed() {
        assert_eq!(list_ranks(&[1]), "rank 1");
        assert_eq!(list_ranks(&[1, 3]), "ranks 1 and 3");
        assert_eq!(list_ranks(&[1, 2]), "ranks 1 and 2");
        assert_eq!(list_ranks(&[0, 1, 2, 3, 7, 9]), "ranks 0 to 3, 7 and 9");
        let odd: Vec<u32> = (0..100).map(|half| 2 * half + 1).collect();
        assert_eq!(list_ranks(&odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 92 more");
        assert_eq!(list_ranks_with_verb(&[4], "has", "have"), "rank 4 has");
        assert_eq!(list_ranks_with_verb(&[4, 5], "has", "have"), "ranks 4 and 5 have");
    }

    #[test]
    fn a_host_name_cannot_garble_a_message() {
        assert_eq!(describe_process("node\n7\u{1b}[31m", 12), "process 12 on node7[31m");
        assert_eq!(describe_process("", 12), "process 12");
    }
}
