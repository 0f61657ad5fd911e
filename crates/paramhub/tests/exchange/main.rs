//! Workers, a hub and a manager over real sockets in one process: exchanges give the right numbers, and
//! errors are reported, over TCP, over shared memory, and with every other rank over shared memory.

/// Makes a test of each function for each of the transports, in a module of the transport's name.
macro_rules! over_transports {
    ([] $($test:ident),+ $(,)?) => {};
    ([$transport:ident $($further:ident)*] $($test:ident),+ $(,)?) => {
        mod $transport {
            $(#[test]
            fn $test() {
                super::$test(crate::cluster::Transports::$transport());
            })+
        }
        over_transports!([$($further)*] $($test),+);
    };
}

mod bad_frames;
mod bystander;
mod clipped_sites;
mod clipping;
mod cluster;
mod consistency;
mod elastic;
mod encrypted;
mod factors;
mod fairness;
mod groups;
mod in_place;
mod information_book;
mod kvstore;
mod late_sites;
mod local;
mod losses;
mod many;
mod meet;
mod numerics;
mod offences;
mod own_codec;
mod panics;
mod program_states;
mod quantised;
mod raw;
mod reproducible;
mod rewind;
mod rounded_sites;
mod shared;
mod sites;
mod stale_sites;
mod state;
mod stragglers;
mod streams;
mod stuck;
mod syncers;
mod tenants;
