//! Meshes of threads in one process, and of processes, over real sockets on loopback and through memory that
//! they share.

/// Makes two tests of each function: one for ranks that share memory, one for ranks that do not.
macro_rules! in_every_way {
    ($($test:ident),+ $(,)?) => {
        mod memory {
            $(#[test]
            fn $test() {
                super::$test(crate::common::Way::Memory);
            })+
        }
        mod tcp {
            $(#[test]
            fn $test() {
                super::$test(crate::common::Way::Tcp);
            })+
        }
        mod encrypted {
            $(#[test]
            fn $test() {
                super::$test(crate::common::Way::Encrypted);
            })+
        }
    };
}

mod callers;
mod collectives;
mod common;
mod encrypted;
mod joining;
mod memory;
mod point_to_point;
mod probing;
mod processes;
mod redial;
mod relay;
