//! Every kernel against a plain scalar reference, bit for bit, in every body this CPU can run, and a user's own.

mod conversions;
mod custom_rules;
mod finite;
mod nontemporal;
mod optimizers;
mod quantise;
mod squares;
mod sums;
mod support;
mod vectors;
