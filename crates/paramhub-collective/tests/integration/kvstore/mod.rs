//! Key-value stores of all designs, between ranks that are threads here, over real communicators.

mod ends;
mod exercise;
mod orders;
mod semantics;
mod team;
mod timelines;

use super::communicators::group;
